"""From paths to tokenizers and models: nothing random, nothing dropped, and messages that say what is wrong."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import try_to_load_from_cache
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    CohereConfig,
    GenerationConfig,
)

from tests.models.build import edit_json, plain_adapted, save_adapter, save_model, wrapped
from tests.rewards.encoders import ENCODERS, save_encoder
from tests.rewards.value_heads import HEAD, plain_value, save_value_head
from tests.tiny import EOS, KINDS, PAD, save_tiny, tiny_tokenizer
from tether.config.stage import StageTrainConfig
from tether.data.collate import pad_left
from tether.errors import ConfigError, ModelError
from tether.models import classifiers, device, tokenizer
from tether.models.adapters import changed_config, read_adapter, with_settings
from tether.models.classifiers import (
    check_adapter_head,
    check_classifier,
    check_value_head,
    classifier_on,
    empty_classifier,
    load_classifier,
    load_reward_model,
    load_value_head_model,
    reads_last_token,
)
from tether.models.device import bf16_supported, half_dtype
from tether.models.forward import last_token_scores
from tether.models.heads import ScalarHead
from tether.models.loading import load_causal_lm, load_config
from tether.models.paths import check_model_path, is_adapter, is_same_model, own_weights
from tether.models.saving import merge_adapter
from tether.models.tokenizer import load_generation_config, load_tokenizer, stop_token_ids

ROWS = [[5, 7, 8, 9, EOS], [8, EOS], [5, 11, 12, 13, 14, 6, 7]]
FP32 = {"dtype": torch.float32}


def ours(model):
    with torch.no_grad():
        return last_token_scores(model.base_model, model.score, *pad_left(ROWS), causal=True)


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 7, 8]]), use_cache=False).logits


# Classifiers


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(tmp_path, kind):
    path = save_model(tmp_path, kind, num_labels=1)
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        wanted = [plain(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]
    assert ours(load_classifier(str(path))).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", ["v_head", "v_head.summary", "value_head", "value_head.summary", "reward_head"])
@pytest.mark.parametrize("bias", [None, 0.5])
@pytest.mark.parametrize("trunk", ["classifier", "language model"])
def test_heads_under_other_names_are_taken_whole(tmp_path, name, bias, trunk):
    path = save_model(tmp_path, num_labels=1 if trunk == "classifier" else None, tied=False)
    weight = torch.linspace(-1, 1, 16)[None]

    def rename(tensors):
        tensors.pop("score.weight", None)
        tensors[f"{name}.weight"] = weight
        if bias is not None:
            tensors[f"{name}.bias"] = torch.tensor([bias])

    model = load_classifier(str(change_weights(path, rename)))
    assert torch.equal(model.score.weight, weight)
    assert model.score.bias is None if bias is None else model.score.bias.item() == bias


def test_the_bias_of_a_head_that_has_the_usual_name_is_kept(tmp_path):
    path = save_model(tmp_path, num_labels=1)
    before = ours(load_classifier(str(path)))
    change_weights(path, lambda tensors: tensors.update({"score.bias": torch.tensor([0.75])}))
    assert (ours(load_classifier(str(path))) - before).tolist() == pytest.approx([0.75] * 3, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("score.weight"), r"no head"),
        (
            lambda t: t.update({"rm.weight": t.pop("score.weight")}),
            r"no place in LlamaForSequenceClassification: rm.weight",
        ),
        (lambda t: t.update({"v_head.weight": t["score.weight"].clone()}), r"several heads: score, v_head"),
        (
            lambda t: t.update({"v_head.weight": t.pop("score.weight")[:, :3].contiguous()}),
            r"shape \[1, 3\], wanted \[1, 16\]",
        ),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"would be random: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_head_is_never_random(tmp_path, change, message):
    path = change_weights(save_model(tmp_path, num_labels=1), change)
    with pytest.raises(ModelError, match=message):
        load_classifier(str(path))


def test_a_language_model_is_no_reward_model(tmp_path):
    with pytest.raises(ModelError, match="no head"):
        load_classifier(str(save_model(tmp_path)))


@pytest.mark.parametrize("label", [1, "happy"])
@pytest.mark.parametrize("kind", ["llama", "bert", "roberta", "deberta"])
def test_one_label_of_several_is_the_score(tmp_path, kind, label):
    if kind == "llama":
        save_model(tmp_path, num_labels=3)
    else:
        save_encoder(tmp_path, kind, num_labels=3)
    edit_json(tmp_path / "config.json", lambda c: c.update(id2label={0: "sad", 1: "happy", 2: "neither"}))
    model, ids = load_reward_model(str(tmp_path), label=label), torch.tensor([[5, 7, 8, 9]])
    with torch.no_grad():
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()(input_ids=ids).logits
        got = model(input_ids=ids).logits
    assert got.shape == (1, 1) and model.config.num_labels == 1 and plain.unique().numel() == 3
    assert got.item() == pytest.approx(plain[0, 1].item(), abs=1e-6)
    with pytest.raises(ModelError, match=r"has no label 3; wanted one of 0 \(sad\), 1 \(happy\), 2 \(neither\)"):
        load_reward_model(str(tmp_path), label=3)


def test_one_label_of_an_adapters_several_is_the_score(tmp_path):
    base = save_model(tmp_path / "base", tied=False)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    adapted = wrapped(model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 7, 8, 9]])
    with torch.no_grad():
        wanted = adapted.eval()(input_ids=ids).logits[0]
        got = [load_reward_model(str(tmp_path / "adapter"), label=n)(input_ids=ids).logits.item() for n in (0, 1)]
    assert got == pytest.approx(wanted.tolist(), abs=1e-5) and got[0] != got[1]


def test_labels_of_a_model_on_the_hub_are_looked_at_too(monkeypatch):
    two = AutoConfig.for_model("distilbert", architectures=["DistilBertForSequenceClassification"])
    monkeypatch.setattr(classifiers, "is_adapter", lambda path, revision: False)
    monkeypatch.setattr(classifiers, "load_config", lambda path, **origin: two if origin["revision"] == "v2" else None)
    with pytest.raises(ModelError, match=r"rewards\.0\.path: lab/judge is a classifier with 2 labels; wanted one"):
        check_classifier("lab/judge", "rewards.0.path", revision="v2")
    check_classifier("lab/judge", "rewards.0.path", revision="v2", label="LABEL_1", label_key="rewards.0.label")
    two.num_labels = 1
    check_classifier("lab/judge", "rewards.0.path", revision="v2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 15}, r"The hidden size \(15\) is not a multiple of the number of attention heads"),
        ({"vocab_size": "40"}, r"Field 'vocab_size' expected int, got str \(value: '40'\)"),
        ({"dtype": "foo"}, r"its files cannot be read \(AttributeError: .*foo'\); wanted those of a model as saved"),
        ({"id2label": [1]}, r"its files cannot be read \(AttributeError: 'list' object has no attribute 'items'\)"),
        ({"num_labels": "x"}, r"its files cannot be read \(TypeError: "),
    ],
)
def test_values_that_a_library_cannot_read_are_told_with_the_folder(tmp_path, change, message):
    path = save_model(tmp_path / "m")
    edit_json(path / "config.json", lambda config: config.update(change))
    with pytest.raises(ModelError, match=rf"^{path}: .*{message}"):
        load_config(str(path))


def test_settings_of_an_adapter_that_peft_cannot_read_are_told_with_its_folder(tmp_path):
    base = save_model(tmp_path / "base", tied=False)
    path = save_adapter(tmp_path / "adapter", base)
    for change, message in (
        ({"r": "4"}, "its files cannot be read .TypeError: "),
        ({"target_modules": "("}, "missing \\), unterminated subpattern"),
        ({"target_modules": ["foo"]}, "Target modules .'foo'. not found in the base model"),
    ):
        start = read_adapter(str(path))
        settings = changed_config(start.config, task_type="CAUSAL_LM", **change)
        with pytest.raises(ModelError, match=rf"^{path}: {message}"):
            with_settings(load_causal_lm(str(base), **FP32), settings, None, start)
    edit_json(path / "adapter_config.json", lambda config: config.update(base_model_name_or_path=3))
    with pytest.raises(ModelError, match=rf"^{path}: base_model_name_or_path in adapter_config\.json is 3; wanted"):
        own_weights(str(path))


@pytest.mark.parametrize("ends", ["x", ["</s>"]])
def test_end_tokens_of_a_generation_config_are_ids(tmp_path, ends):
    path = save_model(tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ModelError, match=rf"^{path}: generation_config\.json has eos_token_id .*; wanted an id"):
        load_generation_config(str(path))


def test_labels_are_counted_in_the_weights_whatever_the_configuration_says_of_the_model(tmp_path):
    path = save_model(tmp_path / "judge", num_labels=2)
    edit_json(path / "config.json", lambda config: config.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(ModelError, match=r"^rewards\.0\.path: .* is a classifier with 2 labels; .*rewards\.0\.label"):
        check_classifier(str(path), "rewards.0.path", label_key="rewards.0.label")
    check_classifier(str(path), "rewards.0.path", label=1, label_key="rewards.0.label")
    base = save_model(tmp_path / "base", tied=False)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    wrapped(model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    told = r"^rewards\.0\.path: .* is the adapter of a classifier with 2 labels; wanted one label"
    for check in (check_classifier, check_adapter_head):
        with pytest.raises(ModelError, match=told):
            check(str(tmp_path / "adapter"), "rewards.0.path")
    check_classifier(str(tmp_path / "adapter"), "rewards.0.path", label=1)


def test_several_labels_are_refused_by_number(tmp_path):
    with pytest.raises(ModelError, match="got a classifier with 3 labels; wanted one label"):
        load_classifier(str(save_model(tmp_path, num_labels=3)))


@pytest.mark.parametrize("pad", ["own", "eos", None])
def test_the_pad_token_of_a_reward_model_does_not_matter(tmp_path, pad):
    path = save_model(tmp_path, "gpt2", num_labels=1, pad=pad)
    wanted = ours(load_classifier(str(path)))
    for pad_id in (None, PAD, EOS, 4000):
        edit_json(path / "config.json", lambda config, pad_id=pad_id: config.update(pad_token_id=pad_id))
        assert torch.equal(ours(load_classifier(str(path))), wanted)
    assert load_tokenizer(str(path)).pad_token_id == {"own": PAD, "eos": EOS, None: None}[pad]


def test_a_padding_index_that_the_embedding_cannot_have_is_a_model_error(tmp_path):
    path = save_model(tmp_path, num_labels=1)
    edit_json(path / "config.json", lambda config: config.update(pad_token_id=4000))
    with pytest.raises(ModelError, match=r"[Pp]adding_idx"):
        load_classifier(str(path))


def test_a_classifier_adapter_is_merged_into_its_base(tmp_path):
    base = save_model(tmp_path / "base", tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, reward=True)
    plain = plain_adapted(AutoModelForSequenceClassification, base, adapter, num_labels=1)
    with torch.no_grad():
        wanted = [plain(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]
    model = load_classifier(str(adapter))
    assert ours(model).tolist() == pytest.approx(wanted, abs=1e-5)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    half = load_classifier(str(adapter), dtype=torch.bfloat16)
    assert half.base_model.dtype == torch.bfloat16 and half.score.weight.dtype == torch.float32


def test_as_saved_is_the_default_type(tmp_path):
    path = save_model(tmp_path / "wide", num_labels=1)
    AutoModelForSequenceClassification.from_pretrained(path).bfloat16().save_pretrained(tmp_path / "half")
    assert load_classifier(str(path)).dtype == torch.float32
    assert load_classifier(str(tmp_path / "half")).base_model.dtype == torch.bfloat16
    assert load_classifier(str(tmp_path / "half"), **FP32).base_model.dtype == torch.float32


# Classifiers of families that pool otherwise


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder_classifiers_are_those_of_transformers(tmp_path, kind):
    path = save_encoder(tmp_path, kind)
    plain, model = AutoModelForSequenceClassification.from_pretrained(path).eval(), load_reward_model(str(path))
    assert type(model) is type(plain) and not model.training
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    assert load_reward_model(str(path), dtype=torch.bfloat16).dtype == torch.bfloat16
    check_classifier(str(path), "rewards.0.path")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("bert", lambda t: t.pop("classifier.weight"), r"would be random: classifier\.weight"),
        ("bert", lambda t: t.pop("classifier.bias"), r"would be random: classifier\.bias"),
        ("bert", lambda t: t.pop("bert.pooler.dense.weight"), r"would be random: bert\.pooler\.dense\.weight"),
        ("roberta", lambda t: t.pop("classifier.out_proj.bias"), r"would be random: classifier\.out_proj\.bias"),
        ("deberta", lambda t: t.pop("pooler.dense.weight"), r"would be random: pooler\.dense\.weight"),
        ("bert", lambda t: t.update({"score.bias": t.pop("classifier.bias")}), r"no place in Bert.*: score\.bias"),
        ("roberta", lambda t: t.update({"v_head.bias": torch.ones(1)}), r"no place in Roberta.*: v_head\.bias"),
        ("bert", lambda t: t.update({"classifier.weight": torch.ones(3, 16)}), r"weight has shape \[3, 16\]"),
    ],
)
def test_an_encoders_head_is_never_random_and_never_dropped(tmp_path, kind, change, message):
    path = change_weights(save_encoder(tmp_path, kind), change)
    with pytest.raises(ModelError, match=message):
        load_reward_model(str(path))


def test_what_an_encoder_classifier_never_uses_may_be_there(tmp_path):
    """RoBERTa's pooler is in many classifiers that transformers itself saved, whose head does without it."""
    path = save_encoder(tmp_path, "roberta")
    change_weights(path, lambda t: t.update({"roberta.pooler.dense.weight": torch.ones(16, 16)}))
    assert type(load_reward_model(str(path))).__name__ == "RobertaForSequenceClassification"
    edit_json(path / "config.json", lambda config: config.update(architectures=["PooledRewardModel"]))
    with pytest.raises(ModelError, match=r"no place in .*: roberta\.pooler\.dense\.weight"):
        load_reward_model(str(path))


def test_an_encoder_with_several_labels_is_refused_by_number(tmp_path):
    path = save_encoder(tmp_path, num_labels=2)
    for load in (load_reward_model, lambda path: check_classifier(path, "rewards.0.path")):
        with pytest.raises(ModelError, match="with 2 labels; wanted one"):
            load(str(path))


def test_where_a_decoder_is_needed_an_encoder_is_refused(tmp_path):
    with pytest.raises(ModelError, match="BertForSequenceClassification has no head called score; wanted a decoder"):
        load_classifier(str(save_encoder(tmp_path)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CohereConfig, "^CohereForCausalLM: there is no sequence classifier of this kind, .* value.kind head$"),
        (partial(BertConfig, is_decoder=True), "^BertLMHeadModel: BertForSequenceClassification is no .*kind head$"),
    ],
)
def test_a_model_whose_kind_has_no_classifier_names_the_other_critic(config, message):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ModelError, match=message):
        classifier_on(AutoModelForCausalLM.from_config(config(vocab_size=40, **shape)))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_adapter_of_an_encoder_classifier_is_merged_with_its_head(tmp_path, kind):
    base = save_encoder(tmp_path / "base", kind)
    adapter = save_adapter(tmp_path / "adapter", base, reward=True, target_modules=["query", "value", "dense"])
    ids = {"input_ids": torch.tensor([[2, 9, 12, 17, 3]])}
    plain = plain_adapted(AutoModelForSequenceClassification, base, adapter, num_labels=1)
    with torch.no_grad():
        wanted, before = plain(**ids).logits.item(), load_reward_model(str(base))(**ids).logits.item()
        model = load_reward_model(str(adapter))
        assert model(**ids).logits.item() == pytest.approx(wanted, abs=1e-5)
    assert abs(wanted - before) > 0.1
    assert not any("lora" in name or "modules_to_save" in name for name, _ in model.named_parameters())


def test_an_adapter_that_lacks_what_its_base_does_not_hold_is_refused(tmp_path):
    """DeBERTa's pooler is new in a classifier, and PEFT saves none but the head unless it is told to."""
    base = save_encoder(tmp_path / "base", "deberta")
    adapter = save_adapter(tmp_path / "adapter", base, reward=True, target_modules=["query_proj"])
    assert type(load_reward_model(str(adapter))).__name__ == "DebertaV2ForSequenceClassification"
    change_weights(base, lambda t: (t.pop("pooler.dense.weight"), t.pop("classifier.weight")))
    with pytest.raises(ModelError, match=r"would be random: pooler\.dense\.weight$"):
        load_reward_model(str(adapter))


# Value heads beside a language model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["full", "adapter"])
@pytest.mark.parametrize("pickled", [False, True])
def test_value_heads_give_their_value_at_the_last_token(tmp_path, kind, form, pickled):
    path = save_value_head(tmp_path, kind, form=form, pickled=pickled)
    check_value_head(str(path), "rewards.0.path")
    model, head = load_value_head_model(str(path), **FP32)
    with torch.no_grad():
        got = last_token_scores(model.base_model, head, *pad_left(ROWS), causal=True).tolist()
    assert got == pytest.approx([plain_value(path, ids) for ids in ROWS], abs=1e-5)


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_checkpoints_of_the_reward_stage_load_as_its_final_folder_does(tmp_path, form):
    final = save_value_head(tmp_path, form=form)
    checkpoint = Path(shutil.copytree(final, tmp_path / "out" / "checkpoint-5"))
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / "optimizer.pt").touch()
    for path in (final, checkpoint):
        assert torch.equal(load_value_head_model(str(path), **FP32)[1].weight, HEAD["v_head.summary.weight"])


def test_the_value_head_that_trl_saves_beside_an_adapter_is_read(tmp_path):
    """Also from the adapter's merged model; beside a full model, the file holds all weights."""
    path = save_value_head(tmp_path, form="adapter", pickled=True)
    (path / "value_head.bin").rename(path / "pytorch_model.bin")
    check_value_head(str(path), "rewards.0.path")
    ids = [5, 7, 8]
    expected = plain_value(path, ids)
    merge_adapter(str(path), tmp_path / "merged")
    for folder in (path, tmp_path / "merged"):
        model, head = load_value_head_model(str(folder), **FP32)
        with torch.no_grad():
            state = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            assert head(state).item() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ModelError, match=r"keeps its head in pytorch_model\.bin, .* set type value_head"):
        check_classifier(str(path), "rewards.0.path")
    full = save_value_head(tmp_path / "full", pickled=True)
    (full / "value_head.bin").rename(full / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"value_head\.bin is missing"):
        check_value_head(str(full), "rewards.0.path")


def test_a_missing_value_head_is_named_with_the_command_that_writes_it(tmp_path):
    path = save_value_head(tmp_path)
    (path / "value_head.safetensors").unlink()
    message = r"reward: value_head\.safetensors or value_head\.bin is missing.*llamafactory-cli train .*stage: rm"
    with pytest.raises(ModelError, match=message):
        load_value_head_model(str(path), **FP32)
    with pytest.raises(ModelError, match=rf"^rewards\.1\.path: .*{message}"):
        check_value_head(str(path), "rewards.1.path")


def test_a_head_that_is_elsewhere_is_found_by_name(tmp_path):
    path = change_weights(save_model(tmp_path / "inside"), lambda t: t.update(HEAD))
    with pytest.raises(ModelError, match="holds its head among its own weights; use type model"):
        check_value_head(str(path), "rewards.0.path")
    assert torch.equal(load_classifier(str(path)).score.weight, HEAD["v_head.summary.weight"])
    for form in ("full", "adapter"):
        beside = save_value_head(tmp_path / form, form=form)
        with pytest.raises(ModelError, match=r"keeps its head in value_head\.safetensors.* set type value_head"):
            check_classifier(str(beside), "rewards.0.path")


def test_value_heads_that_do_not_fit_are_refused(tmp_path):
    path = save_value_head(tmp_path)
    for tensors, message in [
        ({"v_head.summary.weight": torch.ones(1, 3)}, r"v_head\.summary\.weight has shape \[1, 3\], wanted \[1, 16\]"),
        ({"weight": torch.ones(1, 16)}, "no head; it holds weight"),
    ]:
        save_file(tensors, path / "value_head.safetensors")
        with pytest.raises(ModelError, match=message):
            load_value_head_model(str(path), **FP32)
    (path / "value_head.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"value_head\.safetensors: cannot be read"):
        load_value_head_model(str(path), **FP32)


class Runs:
    """An object whose pickle runs code when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_pickle_is_read_for_its_tensors_alone(tmp_path):
    path = save_value_head(tmp_path, pickled=True)
    trap = tmp_path / "trap"
    torch.save(HEAD | {"x": Runs(trap)}, path / "value_head.bin")
    with pytest.raises(ModelError, match=r"value_head\.bin: cannot be read"):
        load_value_head_model(str(path), **FP32)
    assert not trap.exists()


# Language models


def test_a_language_model_adapter_is_merged_into_its_base(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    wanted = logits(plain_adapted(AutoModelForCausalLM, base, adapter))
    merged = load_causal_lm(str(adapter), **FP32)
    assert (logits(merged) - wanted).abs().max() < 1e-5
    assert (logits(load_causal_lm(str(base), **FP32)) - wanted).abs().max() > 0.1
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight


@pytest.mark.parametrize("reward", [False, True])
def test_merged_models_are_as_precise_as_loaded_ones_of_their_type(tmp_path, reward):
    """Rotary frequencies rounded to bfloat16 would be wrong positions."""
    base = save_model(tmp_path / "base", num_labels=1 if reward else None)
    adapter = save_adapter(tmp_path / "adapter", base, reward=reward)
    load = load_classifier if reward else load_causal_lm
    plain, merged = (load(str(path), dtype=torch.bfloat16).base_model for path in (base, adapter))
    for name, buffer in plain.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, merged.get_buffer(name))
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: save_model(p, num_labels=1), "got a sequence classifier; wanted a causal language model"),
        (
            lambda p: change_weights(save_model(p, tied=False), lambda t: t.pop("lm_head.weight")),
            "would be random: lm_head.weight",
        ),
        (lambda p: save_adapter(p / "a", save_model(p / "b"), reward=True), "got a reward adapter"),
        (
            lambda p: change_weights(save_model(p), lambda t: t.update({"model.norm.weight": torch.ones(3)})),
            "model.norm.weight",
        ),
    ],
)
def test_what_is_no_whole_language_model_is_refused(tmp_path, make, message):
    with pytest.raises(ModelError, match=message):
        load_causal_lm(str(make(tmp_path)), **FP32)


def test_an_attention_kernel_whose_package_is_missing_is_named_by_its_key(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "model")

    def from_pretrained(*args, **options):
        raise ImportError("the package for FlashAttention2 doesn't seem to be installed.")

    for auto, load in ((AutoModelForCausalLM, load_causal_lm), (AutoModelForSequenceClassification, load_reward_model)):
        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
        with pytest.raises(ModelError, match=r"^model\.attn_implementation: got flash_attention_2, .*FlashAttention2"):
            load(str(folder), dtype=None, attn_implementation="flash_attention_2")
        with pytest.raises(ModelError, match=rf"^{folder}: the package for FlashAttention2"):
            load(str(folder), dtype=None)  # as code that comes with a model may want packages


def test_unknown_model_types_and_missing_folders_are_model_errors(tmp_path):
    path = save_model(tmp_path / "model")
    edit_json(path / "config.json", lambda config: config.update(model_type="unheard_of"))
    for wrong in (str(path), str(tmp_path / "nothing")):
        with pytest.raises(ModelError, match=wrong):
            load_causal_lm(wrong, **FP32)


# Paths


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_weights_that_were_cut_off_are_told_before_anything_loads(tmp_path, kept):
    model = save_model(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model)
    for path, name in ((adapter, "adapter_model"), (model, "model")):
        file = path / f"{name}.safetensors"
        check_model_path(str(adapter), "value.init")
        file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
        with pytest.raises(ModelError, match=rf"^value\.init: .*{name}\.safetensors is damaged \(.*: copy or download"):
            check_model_path(str(path), "value.init")
        if path == adapter:
            save_adapter(adapter, model)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "t5", "bert", "deberta-v2"])
def test_a_folder_without_a_tokenizer_is_refused_instead_of_read_without_a_vocabulary(tmp_path, kind):
    """For Llama, transformers raises an error. For the others it makes a tokenizer that knows special tokens."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"model: no tokenizer with a vocabulary is there; wanted that of the model"):
        load_tokenizer(str(tmp_path / "model"))


def test_paths_are_checked_before_anything_loads(tmp_path):
    model = save_model(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model)
    for path in (model, adapter):
        check_model_path(str(path), "model.path")
    assert (is_adapter(str(adapter)), is_adapter(str(model))) == (True, False)
    assert own_weights(str(adapter))[0] == str(model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, message in (
        ("missing", "model.path: .*missing does not exist"),
        ("empty", "holds neither config.json nor adapter_config.json"),
        ("file", "is a file"),
    ):
        with pytest.raises(ModelError, match=message):
            check_model_path(str(tmp_path / name), "model.path")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("no_blob")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: it is a link to nothing, or you may not"):
        check_model_path(str(model), "model.path")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"base model of the adapter .*adapter\): .*model holds no weights"):
        check_model_path(str(adapter), "model.path")


def test_hub_ids_are_let_through_unless_offline_and_unknown(monkeypatch):
    with pytest.raises(ModelError, match=r"value.init: there is no folder org/model, and HF_HUB_OFFLINE is set"):
        check_model_path("org/model", "value.init")
    monkeypatch.setattr("tether.models.paths.HF_HUB_OFFLINE", False)
    check_model_path("org/model", "value.init")
    for path in ("./org/model", "/org/model", "a/b/c"):
        with pytest.raises(ModelError, match="does not exist"):
            check_model_path(path, "value.init")


def test_what_is_read_from_the_hub_is_told_once_as_it_may_take_long(tmp_path, monkeypatch, caplog):
    def asked(path, **_):
        raise OSError("no network")

    def told(path):
        caplog.clear()
        with caplog.at_level("INFO", logger="tether"), pytest.raises(ModelError, match="no network"):
            load_config(path)
        return caplog.messages

    monkeypatch.setattr("tether.models.loading.AutoConfig.from_pretrained", asked)
    assert told("org/told") == []  # offline, nothing is waited for
    monkeypatch.setattr("tether.models.paths.HF_HUB_OFFLINE", False)
    assert told("org/told") == ["reading the model org/told from the hub (HF_HUB_OFFLINE=1 reads its cache alone)"]
    assert told("org/told") == []
    assert told(str(save_model(tmp_path / "model"))) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert told("org/told_by_the_first_process") == []


def test_a_missing_checkpoint_of_a_run_on_this_machine_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.models.paths.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "empty").mkdir()
    for path in ("out/checkpoint-9", str(tmp_path / "out" / "checkpoint-9")):
        with pytest.raises(ModelError, match=r"there is no checkpoint-9 in .*; its checkpoints are checkpoint-4$"):
            check_model_path(path, "model")
    with pytest.raises(ModelError, match=r"there is no checkpoint-9 in the folder empty; it holds no checkpoints$"):
        check_model_path("empty/checkpoint-9", "model")
    check_model_path("org/checkpoint-9", "model")


def test_copies_are_the_same_model(tmp_path):
    model = save_model(tmp_path / "model")
    copied = shutil.copytree(model, tmp_path / "copied")
    assert is_same_model(str(model), str(copied)) and is_same_model("org/model", "org/model")
    assert not is_same_model("org/model", "org/other") and not is_same_model(str(model), "org/model")
    change_weights(copied, lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    assert not is_same_model(str(model), str(copied))


# Tokenizers and end tokens


def test_an_adapter_without_tokenizer_takes_its_base_s(tmp_path):
    base = save_model(tmp_path / "base", chat_template=False)
    bare = save_adapter(tmp_path / "bare", base)
    own = save_adapter(tmp_path / "own", base)
    tiny_tokenizer().save_pretrained(own)
    assert load_tokenizer(str(bare)).chat_template is None
    assert load_tokenizer(str(own)).chat_template is not None


@pytest.mark.parametrize(
    ("configured", "wanted"), [(None, {EOS}), (EOS, {EOS}), ([EOS, 9], {EOS, 9}), (9, {EOS, 9}), ([9], {EOS, 9})]
)
def test_every_end_token_ends_an_answer(configured, wanted):
    assert stop_token_ids(tiny_tokenizer(), GenerationConfig(eos_token_id=configured), "eos") == wanted


def test_stop_tokens_of_one_s_own():
    tokenizer = tiny_tokenizer()
    config = GenerationConfig(eos_token_id=EOS)
    assert stop_token_ids(tokenizer, config, None) == frozenset()
    assert stop_token_ids(tokenizer, config, "<user>") == {5}
    assert stop_token_ids(tokenizer, config, "cat") == {tokenizer.convert_tokens_to_ids("cat")}
    for several in ("cat dog", "giraffe", ""):
        with pytest.raises(ConfigError, match=r"sampling.stop_token .* wanted one token"):
            stop_token_ids(tokenizer, config, several)
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match=r"sampling\.stop_token eos: neither"):
        stop_token_ids(endless, GenerationConfig(), "eos")


# Hardware and heads


@pytest.mark.parametrize(
    ("abilities", "intel", "wanted"),
    [
        ({"avx512_bf16": True}, False, True),
        ({"avx512_bf16": True}, True, False),
        ({"avx512_bf16": True, "amx_bf16": True}, True, True),
        ({"avx512_f": True}, False, False),
    ],
)
def test_bf16_on_the_cpu_depends_on_its_instructions_and_maker(monkeypatch, abilities, intel, wanted):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    monkeypatch.setattr(device, "is_intel", lambda: intel)
    assert bf16_supported("cpu") == wanted
    assert not bf16_supported("mps")


@pytest.mark.parametrize("has_it", [True, False])
def test_bf16_on_a_gpu_that_emulates_it_is_none(monkeypatch, has_it):
    emulating = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: has_it or including_emulation)
    monkeypatch.setattr(torch, "cuda", emulating)
    assert bf16_supported("cuda") == has_it


def test_the_type_of_autocast_is_what_the_keys_say_or_the_hardware(monkeypatch):
    def keys(**given):
        return StageTrainConfig(**given)

    for has_it in (True, False):
        monkeypatch.setattr(device, "bf16_supported", lambda device, has_it=has_it: has_it)
        assert half_dtype(keys(), "cpu") == (torch.bfloat16 if has_it else None)
        assert half_dtype(keys(bf16=True), "cpu") == torch.bfloat16
        assert half_dtype(keys(bf16=False), "cpu") is None
        assert half_dtype(keys(fp16=True), "cpu") == half_dtype(keys(fp16=True, bf16=False), "cpu") == torch.float16


def test_a_head_is_float32_under_autocast_and_on_a_bfloat16_trunk():
    head = ScalarHead(64)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = (hidden.double() @ head.weight[0].double()).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = head(hidden)
    assert got.dtype == torch.float32 and got.squeeze(-1).tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def test_offline_a_revision_is_looked_for_in_the_cache(tmp_path, monkeypatch):
    """Who downloads a revision by its name has no other in the cache, and none that is called main."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--org--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "v1.0").write_text(commit)
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr("tether.models.paths.HF_HUB_OFFLINE", True)
    look = partial(try_to_load_from_cache, cache_dir=tmp_path)
    monkeypatch.setattr("tether.models.paths.try_to_load_from_cache", look)
    for revision in ("v1.0", commit):
        check_model_path("org/model", "model.path", revision=revision)
    for revision, named in ((None, "of that name; "), ("v2.0", "of that name at revision v2.0; ")):
        with pytest.raises(ModelError, match=named):
            check_model_path("org/model", "model.path", revision=revision)


class MistralCommonBackend:
    """Stands for the class of that name, which transformers takes where mistral-common is installed."""


def with_mistral_common(monkeypatch, *, can_choose=True):
    load = AutoTokenizer.from_pretrained

    def from_pretrained(place, *, mistral_format=None, **options):
        if can_choose and mistral_format is False:
            return load(place, **options)
        return MistralCommonBackend()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)


def test_mistral_common_is_passed_over_for_what_has_a_chat_template(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(str(save_tiny(tmp_path)))
    with_mistral_common(monkeypatch)
    assert load_tokenizer(str(tmp_path)).get_vocab() == tokenizer.get_vocab()
    assert load_tokenizer(str(tmp_path)).chat_template == tokenizer.chat_template is not None


def test_a_tokenizer_that_only_mistral_common_reads_is_named(tmp_path, monkeypatch):
    save_tiny(tmp_path)
    with_mistral_common(monkeypatch, can_choose=False)
    with pytest.raises(ModelError, match=r"without tekken\.json, uninstall mistral-common, or update transformers"):
        load_tokenizer(str(tmp_path))
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    monkeypatch.undo()
    with_mistral_common(monkeypatch)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer is in tekken\.json, .* wanted tokenizer.json and"):
        load_tokenizer(str(tmp_path))


def test_the_base_of_an_adapter_is_read_at_the_revision_that_it_names(tmp_path, monkeypatch):
    """Its configuration, tokenizer and end tokens, too: weights of one revision go with no other's."""
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    edit_json(
        adapter / "adapter_config.json", lambda c: c.update(base_model_name_or_path="org/base", revision="v1.0")
    )
    assert own_weights(str(adapter)) == ("org/base", "v1.0") and own_weights(str(base), "x") == (str(base), "x")
    asked = []

    def here(load):
        def from_base(path, *args, revision=None, **options):
            asked.append((str(path), revision))
            return load(str(base) if path == "org/base" else path, *args, **options)

        return from_base

    for auto in (AutoTokenizer, AutoConfig, GenerationConfig):
        monkeypatch.setattr(auto, "from_pretrained", here(auto.from_pretrained))
    load_tokenizer(str(adapter))
    load_generation_config(str(adapter))
    assert reads_last_token(empty_classifier(str(adapter)))
    with pytest.raises(ModelError, match=r"no model of that name at revision v1\.0"), monkeypatch.context() as patch:
        patch.setattr("tether.models.paths.HF_HUB_OFFLINE", True)
        check_model_path(str(adapter), "model.path")
    assert {at for path, at in asked if path == "org/base"} == {"v1.0"}
    assert len([path for path, _ in asked if path == "org/base"]) == 3


def test_a_generation_config_that_cannot_be_read_is_not_taken_for_none(tmp_path):
    """The end tokens that it names would be lost."""
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    assert load_generation_config(str(adapter)).eos_token_id == EOS
    file = base / "generation_config.json"
    file.write_text(file.read_text()[:-5])
    for path in (base, adapter):
        with pytest.raises(ModelError, match=rf"{file}: cannot be read, but may name the tokens that end answers"):
            load_generation_config(str(path))
    file.unlink()
    assert load_generation_config(str(base)) is load_generation_config(str(adapter)) is None


def test_an_adapter_on_the_hub_that_brings_no_tokenizer_has_its_bases(tmp_path, monkeypatch):
    base = save_tiny(tmp_path / "base")
    monkeypatch.setattr(tokenizer, "is_adapter", lambda path, revision=None: path == "org/adapter")
    monkeypatch.setattr(tokenizer, "own_weights", lambda path, revision=None: (str(base), None))
    load = AutoTokenizer.from_pretrained

    def offline(path, **options):
        if path == "org/adapter":
            raise OSError("We couldn't connect")
        return load(path, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", offline)
    assert load_tokenizer("org/adapter").get_vocab() == load(base).get_vocab()
    monkeypatch.setattr(tokenizer, "is_adapter", lambda path, revision=None: False)
    with pytest.raises(ModelError, match="We couldn't connect"):
        load_tokenizer("org/adapter")
