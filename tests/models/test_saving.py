"""Saved folders load with transformers and PEFT alone and give the live outputs; folders are whole or absent."""

import json
import socket

import peft
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from tests.models.build import (
    edit_json,
    micro_batch,
    plain_adapted,
    roles_of,
    run_config,
    save_adapter,
    save_model,
    wrapped,
)
from tests.rewards.encoders import ENCODERS, save_encoder
from tests.rewards.value_heads import plain_value, save_value_head
from tests.tiny import BOS, EOS, KINDS, PAD, save_tiny
from tether.data.collate import pad_left
from tether.errors import CheckpointError, ConfigError, ModelError
from tether.models import classifiers, loading
from tether.models.classifiers import load_reward_model
from tether.models.loading import load_causal_lm
from tether.models.saving import (
    atomic_folder,
    load_policy,
    merge_adapter,
    save_critic,
    save_policy,
    verify_manifest,
    written_into,
)
from tether.models.tokenizer import end_at, load_tokenizer

ROWS = [[5, 7, 8, 9, EOS], [8, EOS], [5, 11, 12, 13, 14, 6, 7]]


def trained(config, **options):
    """Roles after a step of policy and critic, so that nothing is at its start any more."""
    roles = roles_of(config, **options)
    for _ in range(2):
        for pass_ in roles.passes:
            with pass_(micro_batch(), temperature=1.0) as out:
                sum(x.add(-1).square().sum() for x in (out.logprobs, out.values) if x is not None).backward()
            torch.optim.SGD(pass_.parameters(), lr=0.01).step()
    return roles


def live_logits(roles):
    with roles.use("policy") as model, torch.no_grad():
        return model(input_ids=torch.tensor([[5, 7, 8]]), use_cache=False).logits


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 7, 8]]), use_cache=False).logits


def live_values(roles):
    """Values of the last state of each row, from the critic as the roles run it."""
    ids, mask, positions = pad_left(ROWS)
    with roles.use("value") as model, torch.no_grad():
        hidden = model.base_model(ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state[:, -1]
        return roles.role("value").head(hidden).squeeze(-1)


def keys(file):
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.file_exists", refuse)
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", refuse)


@pytest.mark.parametrize("value", ["head", "model"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_policy_is_a_plain_folder(tmp_path, kind, tied, value, no_network):
    source = save_model(tmp_path / "source", kind, tied=tied)
    roles = trained(run_config(source, value={"kind": value}))
    save_policy(roles, load_tokenizer(str(source)), tmp_path / "saved")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert keys(tmp_path / "saved" / "model.safetensors") == keys(source / "model.safetensors")
    assert (logits(model.eval()) - live_logits(roles)).abs().max() < 1e-6
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert not torch.equal(logits(model), logits(load_causal_lm(str(source), dtype=torch.float32)))


def test_configuration_generation_config_and_chat_template_stay(tmp_path):
    source = save_model(tmp_path / "source")
    GenerationConfig(
        eos_token_id=[EOS, 9], bos_token_id=BOS, pad_token_id=PAD, do_sample=True, top_k=7
    ).save_pretrained(source)
    edit_json(source / "config.json", lambda config: config.update(use_cache=True, attention_dropout=0.3))
    for lora in (None, {}):
        folder = tmp_path / f"saved{lora}"
        roles = trained(run_config(source, lora=lora, value={"kind": "head"}, train={"gradient_checkpointing": True}))
        save_policy(roles, load_tokenizer(str(source)), folder)
        config = GenerationConfig.from_pretrained(folder)
        assert (config.eos_token_id, config.top_k, config.do_sample) == ([EOS, 9], 7, True)
        assert (folder / "chat_template.jinja").read_text() == (source / "chat_template.jinja").read_text()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("the cat")["input_ids"] == load_tokenizer(str(source))("the cat")["input_ids"]
        if lora is None:
            saved, before = (json.loads((f / "config.json").read_text()) for f in (folder, source))
            assert saved == before and saved["attention_dropout"] == 0.3 and saved["use_cache"] is True
        answer = AutoModelForCausalLM.from_pretrained(folder).generate(torch.tensor([[5, 7]]), max_new_tokens=3)
        assert answer.shape[1] > 2


@pytest.mark.parametrize("start", ["fresh", "loaded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_policy_is_an_adapter_folder(tmp_path, kind, start, no_network, monkeypatch):
    base = save_model(tmp_path / "base", kind)
    source = base if start == "fresh" else save_adapter(tmp_path / "source", base, tokenizer=True, r=3)
    monkeypatch.chdir(tmp_path)
    config = run_config(source.name, lora={}, value={"kind": "adapter"})
    roles = trained(config)
    save_policy(roles, load_tokenizer(str(source)), tmp_path / "saved")
    assert {f.name for f in (tmp_path / "saved").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        *(f.name for f in (base if start == "fresh" else source).iterdir() if "token" in f.name or "chat" in f.name),
    }
    settings = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert (settings["task_type"], settings["r"]) == ("CAUSAL_LM", 16 if start == "fresh" else 3)
    saved = keys(tmp_path / "saved" / "adapter_model.safetensors")
    assert saved and all(key.endswith((".lora_A.weight", ".lora_B.weight")) for key in saved)
    monkeypatch.chdir("/")
    assert (
        logits(plain_adapted(AutoModelForCausalLM, base, tmp_path / "saved")) - live_logits(roles)
    ).abs().max() < 1e-6
    through_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert (logits(through_transformers) - live_logits(roles)).abs().max() < 1e-6


def test_whole_modules_of_an_adapter_are_saved_with_it(tmp_path):
    base = save_model(tmp_path / "base", tied=False)
    start = save_adapter(tmp_path / "start", base, tokenizer=True, modules_to_save=["lm_head"])
    roles = trained(run_config(start, lora={}))
    save_policy(roles, load_tokenizer(str(start)), tmp_path / "saved")
    names = keys(tmp_path / "saved" / "adapter_model.safetensors")
    assert names == keys(start / "adapter_model.safetensors")
    assert (
        logits(plain_adapted(AutoModelForCausalLM, base, tmp_path / "saved")) - live_logits(roles)
    ).abs().max() < 1e-6


def test_a_saved_adapter_can_be_the_start_of_a_run_with_kl_0(tmp_path):
    base = save_model(tmp_path / "base")
    first = trained(run_config(base, lora={}, value={"kind": "head"}))
    save_policy(first, load_tokenizer(str(base)), tmp_path / "saved")
    second = roles_of(run_config(tmp_path / "saved", lora={}, value={"kind": "head"}))
    batch = micro_batch()
    assert torch.equal(second.score_pass(batch, 1.0).logprobs, first.score_pass(batch, 1.0).logprobs)
    assert torch.equal(second.ref_logprobs(batch, 1.0), second.score_pass(batch, 1.0).logprobs)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_saved_policy_is_loaded_back_into_roles(tmp_path, lora):
    source = save_model(tmp_path / "source")
    config = run_config(source, lora=lora, value={"kind": "head"})
    roles, other = trained(config), roles_of(config)
    save_policy(roles, load_tokenizer(str(source)), tmp_path / "saved")
    batch = micro_batch()
    reference = other.ref_logprobs(batch, 1.0)
    load_policy(other, tmp_path / "saved")
    assert torch.equal(other.score_pass(batch, 1.0).logprobs, roles.score_pass(batch, 1.0).logprobs)
    assert torch.equal(other.ref_logprobs(batch, 1.0), reference)
    assert all(p.requires_grad for pass_ in other.passes for p in pass_.parameters())
    foreign = save_adapter(tmp_path / "foreign", source) if lora is None else source
    wide = save_model(tmp_path / "wide", hidden=32)
    misfit = wide if lora is None else save_adapter(tmp_path / "misfit", wide)
    for folder, message in ((foreign, r"got an adapter|got a full model"), (misfit, r"size mismatch|has shape")):
        with pytest.raises(ModelError, match=message):
            load_policy(other, folder)


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|no longer tied):UserWarning")
def test_a_tied_model_whose_adapter_trained_lm_head_is_saved_untied_after_merging(tmp_path):
    base = save_model(tmp_path / "base", tied=True)
    adapter = save_adapter(tmp_path / "adapter", base, tokenizer=True, modules_to_save=["lm_head"])
    roles = trained(run_config(adapter, value={"kind": "head"}))
    save_policy(roles, load_tokenizer(str(adapter)), tmp_path / "saved")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (logits(model.eval()) - live_logits(roles)).abs().max() < 1e-6
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


@pytest.mark.parametrize("lora", [None, {}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_model_is_a_sequence_classifier_that_gives_its_values(tmp_path, kind, lora):
    source = save_model(tmp_path / "source", kind)
    roles = trained(run_config(source, lora=lora, value={"kind": "model"}))
    save_critic(roles, tmp_path / "critic")
    wanted = live_values(roles)
    assert wanted.abs().max() > 1e-3
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        got = [model.eval()(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]
    assert got == pytest.approx(wanted.tolist(), abs=1e-5)
    again = roles_of(run_config(source, lora=lora, value={"kind": "model", "init": str(tmp_path / "critic")}))
    batch = micro_batch()
    assert torch.equal(again.score_pass(batch, 1.0).values, roles.score_pass(batch, 1.0).values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_adapter_is_a_reward_adapter_that_gives_its_values(tmp_path, kind):
    base = save_model(tmp_path / "base", kind)
    roles = trained(run_config(base, lora={}))
    save_critic(roles, tmp_path / "critic")
    wanted = live_values(roles)
    assert wanted.abs().max() > 1e-3
    plain = plain_adapted(AutoModelForSequenceClassification, base, tmp_path / "critic", num_labels=1)
    with torch.no_grad():
        got = [plain(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]
    assert got == pytest.approx(wanted.tolist(), abs=1e-5)
    again = roles_of(run_config(base, lora={}, value={"init": str(tmp_path / "critic")}))
    batch = micro_batch()
    assert torch.equal(again.score_pass(batch, 1.0).values, roles.score_pass(batch, 1.0).values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_on_the_policy_is_saved_with_its_trunk(tmp_path, kind):
    roles = trained(run_config(save_model(tmp_path / "source", kind), value={"kind": "head"}))
    save_critic(roles, tmp_path / "critic")
    wanted = live_values(roles)
    assert wanted.abs().max() > 1e-3
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        got = [model.eval()(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]
    assert got == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_on_an_adapted_policy_is_saved_as_a_reward_adapter(tmp_path, kind):
    base = save_model(tmp_path / "base", kind)
    roles = trained(run_config(base, lora={}, value={"kind": "head"}))
    save_critic(roles, tmp_path / "critic")
    wanted = live_values(roles)
    assert wanted.abs().max() > 1e-3
    plain = plain_adapted(AutoModelForSequenceClassification, base, tmp_path / "critic", num_labels=1)
    with torch.no_grad():
        got = [plain(input_ids=torch.tensor([ids])).logits.item() for ids in ROWS]
    assert got == pytest.approx(wanted.tolist(), abs=1e-5)


def test_saving_leaves_the_roles_as_they_were(tmp_path):
    base = save_model(tmp_path / "base")
    roles = trained(run_config(base, lora={}))
    before = roles.score_pass(micro_batch(), 1.0)
    flags = [p.requires_grad for p in roles.policy.parameters()]
    save_policy(roles, load_tokenizer(str(base)), tmp_path / "policy")
    save_critic(roles, tmp_path / "critic")
    after = roles.score_pass(micro_batch(), 1.0)
    assert torch.equal(before.logprobs, after.logprobs) and torch.equal(before.values, after.values)
    assert flags == [p.requires_grad for p in roles.policy.parameters()]
    assert isinstance(roles.policy, PeftModel) and roles.policy.active_adapter == "default"


@pytest.mark.parametrize("reward", [False, True])
def test_merging_an_adapter_makes_a_plain_folder(tmp_path, reward):
    base = save_model(tmp_path / "base", tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, reward=reward)
    merge_adapter(str(adapter), tmp_path / "merged")
    verify_manifest(tmp_path / "merged")
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    plain = plain_adapted(auto, base, adapter, **({"num_labels": 1} if reward else {}))
    merged, info = auto.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (logits(merged.eval()) - logits(plain)).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    with pytest.raises(ConfigError, match="already exists"):
        merge_adapter(str(adapter), tmp_path / "merged")
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/merged"):
        with pytest.raises(ConfigError, match=r"^output folder: .*file is a file; name a folder$"):
            merge_adapter(str(adapter), tmp_path / place)
    with pytest.raises(ModelError, match=r"wanted the folder of a PEFT adapter\. It is a whole model"):
        merge_adapter(str(base), tmp_path / "other")
    with pytest.raises(ModelError, match=r"wanted the folder of a PEFT adapter$"):
        merge_adapter(str(tmp_path), tmp_path / "other")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("kept", [True, False], ids=["with the base's rows", "alone"])
def test_merging_into_one_of_two_tied_embeddings_leaves_the_other(tmp_path, target, kept):
    base = save_model(tmp_path / "base", tied=True)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj", target])
    plain = plain_adapted(AutoModelForCausalLM, base, adapter)
    if kept:  # as PEFT saves it unless it is told otherwise
        plain.save_pretrained(adapter, save_embedding_layers=True)
    merge_adapter(str(adapter), tmp_path / "merged")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (logits(merged.eval()) - logits(plain)).abs().max() < 1e-5
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.1


def test_merging_names_the_base_that_has_moved(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, tokenizer=True)
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=rf"base model of the adapter {adapter}\): {base} does not exist; wanted "):
        merge_adapter(str(adapter), tmp_path / "merged")


def test_embeddings_that_came_with_an_adapter_and_differ_from_the_bases_are_told(tmp_path):
    base = save_model(tmp_path / "base", tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["lm_head"])
    plain = plain_adapted(AutoModelForCausalLM, base, adapter)
    plain.get_output_embeddings().base_layer.weight.data += 1
    plain.save_pretrained(adapter, save_embedding_layers=True)
    with pytest.raises(ModelError, match=r"have no place in LlamaForCausalLM: .*lm_head\.base_layer\.weight"):
        merge_adapter(str(adapter), tmp_path / "merged")


def test_a_merged_model_ends_its_answers_as_the_adapter_was_trained_to(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    GenerationConfig(eos_token_id=[EOS, 9]).save_pretrained(adapter)
    merge_adapter(str(adapter), tmp_path / "merged")
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [EOS, 9]


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("kind", [*ENCODERS, "gpt2", "llama"])
def test_merging_the_adapter_of_any_classifier_makes_a_classifier(tmp_path, kind, num_labels):
    """Also where the base had a head of its own, with another number of labels."""
    if kind in ENCODERS:
        base, targets = save_encoder(tmp_path / "base", kind, num_labels=2), "all-linear"
    else:
        base, targets = save_tiny(tmp_path / "base", kind, pad=None), "all-linear"
        edit_json(base / "config.json", lambda config: config.pop("pad_token_id"))
    auto = AutoModelForSequenceClassification
    options = {"num_labels": num_labels, "ignore_mismatched_sizes": True}
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=targets)
    torch.manual_seed(1)
    adapted = wrapped(auto.from_pretrained(base, **options), settings)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data = torch.randn_like(parameter) * 0.3
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    merged, info = auto.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.tensor([[2, 9, 12, 17, 3]])
    with torch.no_grad():
        wanted, got = (model.eval()(input_ids=ids).logits for model in (adapted, merged))
        assert merged(input_ids=ids.repeat(2, 1)).logits.shape == (2, num_labels)
    assert got.shape == (1, num_labels) and (got - wanted).abs().max() < 1e-5
    AutoTokenizer.from_pretrained(tmp_path / "merged")
    if num_labels == 1:
        with torch.no_grad():
            score = load_reward_model(str(tmp_path / "merged"))(input_ids=ids).logits.item()
        assert score == pytest.approx(wanted.item(), abs=1e-5)


# Folders


def test_others_may_read_what_the_umask_lets_them_read(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch(mode=0o600)
    assert (tmp_path / "out" / "a").stat().st_mode == (tmp_path / "out" / "manifest.json").stat().st_mode


def test_a_folder_appears_whole_with_a_manifest(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("abc")
        assert not (tmp_path / "out").exists()
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest == {"files": {"inner/a": {"bytes": 3, "sha256": digest}}}
    verify_manifest(tmp_path / "out")


def test_a_failure_leaves_what_was_there(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("first")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("second")
            raise KeyboardInterrupt
        assert [f.name for f in tmp_path.iterdir()] == ["out"]
        assert (tmp_path / "out" / "a").read_text() == "first"
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "b").write_text("third")
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["b", "manifest.json"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    for name in (".out.partial", ".out.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out"):
        # The kill came between the two renames: the earlier folder is back in its place.
        assert (tmp_path / "out" / "a").read_text() == ".out.replaced"
        raise ZeroDivisionError
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "a").unlink(), "a is missing"),
        (lambda f: (f / "a").write_text("abcd"), "a has 4 bytes, but its manifest says 3"),
        (lambda f: (f / "a").write_text("abd"), "a is damaged"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text('{"files"'), "manifest.json: cannot be read"),
    ],
)
def test_damage_is_found_and_named(tmp_path, damage, message):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("abc")
    damage(tmp_path / "out")
    with pytest.raises(CheckpointError, match=message):
        verify_manifest(tmp_path / "out")


def test_a_folder_is_written_over_with_its_subfolders(tmp_path):
    for text in ("first", "second"):
        with written_into(tmp_path) as temporary:
            (temporary / "additional_chat_templates").mkdir()
            (temporary / "additional_chat_templates" / "tools.jinja").write_text(text)
            (temporary / "config.json").write_text(text)
        assert (tmp_path / "additional_chat_templates" / "tools.jinja").read_text() == text
        verify_manifest(tmp_path)
    assert not (tmp_path / "final.tmp").exists()


def test_a_generation_config_that_samples_without_saying_so_is_saved(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "model"))
    model.generation_config.temperature, model.generation_config.eos_token_id = 0.6, EOS
    end_at(model, {EOS, 7})
    model.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.temperature, saved.do_sample, saved.eos_token_id) == (0.6, True, sorted([EOS, 7]))


@pytest.mark.parametrize("reward", [False, True])
def test_merging_runs_code_of_a_base_that_is_trusted(tmp_path, monkeypatch, reward):
    adapter = save_adapter(tmp_path / "adapter", save_model(tmp_path / "base", tied=False), reward=reward)
    load, trusted = loading.from_pretrained, []

    def spy(*given, **options):
        trusted.append(options["trust_remote_code"])
        return load(*given, **options)

    for module in (loading, classifiers):
        monkeypatch.setattr(module, "from_pretrained", spy)
    merge_adapter(str(adapter), tmp_path / "merged", trust_remote_code=True)
    merge_adapter(str(adapter), tmp_path / "wary")
    assert set(trusted[: len(trusted) // 2]) == {True} and set(trusted[len(trusted) // 2 :]) == {False}


@pytest.mark.parametrize("pickled", [False, True])
def test_merging_a_reward_adapter_of_llamafactory_keeps_its_head(tmp_path, pickled):
    reward = save_value_head(tmp_path, form="adapter", pickled=pickled)
    merge_adapter(str(reward), tmp_path / "merged")
    verify_manifest(tmp_path / "merged")
    assert plain_value(tmp_path / "merged", [5, 7, 8]) == pytest.approx(plain_value(reward, [5, 7, 8]), abs=1e-5)
