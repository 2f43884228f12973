"""Every folder that is written loads strictly in transformers or PEFT, with the start's settings for generating."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from tests.models.build import plain_adapted
from tests.stages.test_reward_stage import stage_config
from tests.tiny import BOS, EOS, PAD
from tests.train.runs import tiny_run
from tether.config.sft_stage import SftStageConfig
from tether.models.saving import merge_adapter
from tether.stages.reward import train_reward_model
from tether.stages.sft import train_sft
from tether.train.run import train_policy

GENERATION = {"eos_token_id": [EOS, 9], "bos_token_id": BOS, "pad_token_id": PAD, "do_sample": True, "top_k": 7}
LM, CLASSIFIER = AutoModelForCausalLM, AutoModelForSequenceClassification


def start_of(config):
    """The start model's folder, with settings for generating that are not the defaults."""
    GenerationConfig(**GENERATION).save_pretrained(config.model.path)
    return config.model.path


def assert_loads_strictly(folder, auto, base, *, tied=None):
    """Asserts of a full model that every weight is there, that none is left over, and that none is written that its
    class lacks; returns it."""
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    start = auto.from_pretrained(base, **({"num_labels": 1} if auto is CLASSIFIER else {}))
    plain = folder.parent / f"{folder.name}-plain"
    start.save_pretrained(plain)
    written, wanted = (load_file(path / "model.safetensors") for path in (folder, plain))
    assert written.keys() == wanted.keys()
    assert type(model) is type(start) and model.config.use_cache == start.config.use_cache
    if tied is not None:
        shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert shared == tied and ("lm_head.weight" in written) != tied
    return model


def assert_adapter_loads(folder, auto, base, *, beside=frozenset()):
    """Asserts of an adapter that PEFT finds every weight and knows no other but those ``beside``; returns it."""
    model = plain_adapted(auto, base, folder, **({"num_labels": 1} if auto is CLASSIFIER else {}))
    assert isinstance(model, PeftModel)
    model.save_pretrained(folder.parent / f"{folder.name}-plain", save_embedding_layers=False)
    plain = folder.parent / f"{folder.name}-plain" / "adapter_model.safetensors"
    written, wanted = load_file(folder / "adapter_model.safetensors"), load_file(plain)
    assert written.keys() == wanted.keys() | beside and all(torch.equal(written[key], wanted[key]) for key in wanted)
    return model


def assert_same_generation(folder):
    """Asserts that the folder has the start's settings for generating, and a tokenizer that loads."""
    settings = json.loads((folder / "generation_config.json").read_text())
    assert {key: settings[key] for key in GENERATION} == GENERATION
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_full_run_its_checkpoint_and_its_critic(tmp_path, kind, tied):
    options = {"train__save_steps": 1, "train__gradient_checkpointing": True, "value__save": True}
    config = tiny_run(tmp_path, kind=kind, tied=tied, train__max_steps=1, train__ema_decay=0.5, **options)
    base = start_of(config)
    out = train_policy(config).output_dir
    for folder in (out, out / "checkpoint-1"):
        assert_loads_strictly(folder, LM, base, tied=tied)
        assert_same_generation(folder)
    assert_loads_strictly(out / "critic", CLASSIFIER, base)


def test_average_is_what_the_folder_holds(tmp_path):
    config = tiny_run(tmp_path, train__max_steps=2, train__ema_decay=0.5, train__save_steps=1)
    base = start_of(config)
    out = train_policy(config).output_dir
    states = [assert_loads_strictly(folder, LM, base, tied=True).state_dict() for folder in (out / "checkpoint-2", out)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    trained = load_file(out / "checkpoint-2" / "tether_state" / "roles.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(states[1][name], next(p for key, p in trained.items() if key == f"policy.{name}"))


@pytest.mark.parametrize("value", ["adapter", "head", "model"])
def test_lora_run_its_checkpoint_its_critic_and_the_merged_model(tmp_path, value):
    options = {"train__save_steps": 1, "train__gradient_checkpointing": True, "value__save": True}
    config = tiny_run(tmp_path, train__max_steps=1, model__lora={"r": 2}, value__kind=value, **options)
    base = start_of(config)
    out = train_policy(config).output_dir
    for folder in (out, out / "checkpoint-1"):
        assert_adapter_loads(folder, LM, base)
        assert_same_generation(folder)
    (assert_loads_strictly if value == "model" else assert_adapter_loads)(out / "critic", CLASSIFIER, base)
    merge_adapter(str(out), tmp_path / "merged")
    assert_loads_strictly(tmp_path / "merged", LM, base, tied=True)
    assert_same_generation(tmp_path / "merged")


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_reward_model_and_what_merging_makes_of_it(tmp_path, lora):
    config = stage_config(tmp_path, lora=lora, num_train_epochs=0.1)
    out = train_reward_model(config).path
    if lora is None:
        assert_loads_strictly(out, CLASSIFIER, config.model.path)
    else:
        assert_adapter_loads(out, CLASSIFIER, config.model.path)
        merge_adapter(str(out), tmp_path / "merged")
        assert_loads_strictly(tmp_path / "merged", CLASSIFIER, config.model.path)


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_sft(tmp_path, lora):
    run = tiny_run(tmp_path)
    base = start_of(run)
    rows = [{"prompt": "the cat", "completion": "is good"}, {"prompt": "a dog", "completion": "is bad"}]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SftStageConfig.model_validate(
        {
            "model": {"path": base} | ({"lora": lora} if lora else {}),
            "data": {"demonstrations": str(tmp_path / "sft.jsonl")},
            "train": {"max_steps": 1, "batch_size": 2, "micro_batch_size": 2, "bf16": False,
                      "gradient_checkpointing": True},
            "output_dir": str(tmp_path / "sft"),
        }
    )  # fmt: skip
    out = train_sft(config).path
    if lora is None:
        assert_loads_strictly(out, LM, base, tied=True)
    else:
        assert_adapter_loads(out, LM, base)
