"""GGUF files as the start of a policy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.ggufs import write_gguf
from tests.tiny import CHAT_TEMPLATE, EOS, tiny_bpe_tokenizer
from tests.train.runs import tiny_run
from tether.config.load import load_config as load_run
from tether.errors import ModelError
from tether.inference.evaluate import evaluate_path
from tether.inference.generate import generate_path
from tether.models import gguf
from tether.models.gguf import GgufSource, gguf_source
from tether.models.loading import load_causal_lm, load_config
from tether.models.paths import check_model_path
from tether.models.saving import merge_adapter
from tether.models.tokenizer import load_tokenizer
from tether.train.plan import plan
from tether.train.run import train_policy

IDS = torch.tensor([[5, 8, 12, 17, EOS]])


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_configuration_and_tokenizer_are_those_of_the_file_and_can_be_saved(tmp_path, tied):
    weights = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    model = load_causal_lm(str(tmp_path / "tiny.gguf"), dtype=torch.float32)
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(own[name].detach().numpy(), weight, err_msg=name)
    assert not model.training and not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"))
    tokenizer.save_pretrained(tmp_path / "saved")
    saved, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(saved), logits(model))
    wanted, text = tiny_bpe_tokenizer(), "the cat sees a red sun"
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert each(text)["input_ids"] == wanted(text)["input_ids"]
        assert (each.eos_token_id, each.chat_template) == (EOS, CHAT_TEMPLATE)
        assert each.get_vocab() == wanted.get_vocab()


def test_half_precision_and_the_configuration_alone(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    model = load_causal_lm(str(tmp_path), dtype=torch.bfloat16)  # a folder that holds one
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    config = load_config(str(tmp_path))
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 2, 32)
    assert not hasattr(config, "quantization_config")


def test_what_counts_as_a_gguf_model(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert gguf_source(str(tmp_path)) == GgufSource(str(tmp_path), "a.gguf")
    assert gguf_source(str(tmp_path / "a.gguf")) == GgufSource(str(tmp_path), "a.gguf")
    assert gguf_source("org/model-GGUF/model.Q4_K_M.gguf") == GgufSource("org/model-GGUF", "model.Q4_K_M.gguf")
    assert gguf_source("org/model") is None and gguf_source(str(tmp_path / "none")) is None
    (tmp_path / "config.json").write_text("{}")
    assert gguf_source(str(tmp_path)) is None


def test_mistakes_are_told_before_a_model_loads(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match=r"model\.path: .*a\.gguf is not a GGUF file despite its name"):
        check_model_path(str(file), "model.path", takes_gguf=True)
    with pytest.raises(ModelError, match=r"rewards\.0\.path: .*a\.gguf is a file; wanted the folder"):
        check_model_path(str(file), "rewards.0.path")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        check_model_path(str(tmp_path), "model.path", takes_gguf=True)
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'b\.gguf needs the package gguf.*: pip install "tether\[gguf\]"'):
        check_model_path(str(tmp_path / "b.gguf"), "model.path", takes_gguf=True)


@pytest.fixture
def run(tmp_path):
    """A run from the file, with all weights or with LoRA."""
    write_gguf(tmp_path / "tiny.gguf")

    def of(lora, **changes):
        model = {"path": str(tmp_path / "tiny.gguf")} | ({"lora": {"r": 4}} if lora else {})
        changes = {"train__max_steps": 1, "train__learning_rate": 1e-2} | changes
        return tiny_run(tmp_path, model=model, data__eval_prompts=str(tmp_path / "prompts.jsonl"), **changes)

    return of


def test_full_fine_tuning_saves_a_plain_model(tmp_path, run):
    config = run(lora=False)
    train_policy(config)
    out = config.output_dir
    saved = AutoModelForCausalLM.from_pretrained(out)
    start = load_causal_lm(config.model.path, dtype=torch.float32)
    assert 1e-3 < (logits(saved) - logits(start)).abs().max() < 10
    assert AutoTokenizer.from_pretrained(out).chat_template == CHAT_TEMPLATE
    assert not (out / "base").exists()
    assert Path(load_run(out / "config.yaml").model.path) == tmp_path / "tiny.gguf"


def test_lora_saves_an_adapter_on_a_base_that_plain_peft_loads(tmp_path, run):
    config = run(lora=True)
    result = train_policy(config)
    out = config.output_dir
    settings = json.loads((out / "adapter_config.json").read_text())
    assert Path(settings["base_model_name_or_path"]) == out / "base"
    base, start = AutoModelForCausalLM.from_pretrained(out / "base"), load_causal_lm(config.model.path, dtype=None)
    assert torch.equal(logits(base), logits(start))
    adapted = AutoPeftModelForCausalLM.from_pretrained(out)
    assert (logits(adapted) - logits(base)).abs().max() > 1e-3
    merge_adapter(str(out), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    exactly = [logits(model.double()) for model in (merged, adapted)]  # what is left is the rounding of merged weights
    assert (exactly[0] - exactly[1]).abs().max() < 1e-5
    expected = {name: value for name, value in result.evaluations[-1].items() if name != "step"}
    assert evaluate_path(out).metrics == pytest.approx(expected, abs=1e-5)
    train_policy(run(lora=True, resume=False, overwrite_output_dir=True))
    assert (out / "base" / "manifest.json").is_file()


def test_a_run_folder_that_moved_still_holds_the_base_of_its_adapters(tmp_path, run):
    config = run(lora=True, train__save_steps=1)
    train_policy(config)
    before = evaluate_path(config.output_dir).metrics
    place = config.output_dir.rename(tmp_path / "elsewhere")
    assert evaluate_path(place).metrics == before == evaluate_path(place / "checkpoint-1").metrics
    merge_adapter(str(place), tmp_path / "merged")
    again = run(lora=True, train__save_steps=1, train__max_steps=2, output_dir=str(place), resume=True)
    assert [row["step"] for row in train_policy(again).updates] == [2]


def test_a_start_from_a_file_is_the_start_from_its_folder(tmp_path, run):
    """KL 0 at the first step, and the same metrics as from the de-quantized folder."""
    model = load_causal_lm(str(tmp_path / "tiny.gguf"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "folder")
    load_tokenizer(str(tmp_path / "tiny.gguf")).save_pretrained(tmp_path / "folder")
    from_file = train_policy(run(lora=True, output_dir=str(tmp_path / "one")))
    folder = run(lora=True, output_dir=str(tmp_path / "other"), **{"model__path": str(tmp_path / "folder")})
    from_folder = train_policy(folder)
    assert from_file.updates[0]["objective/kl"] == 0.0
    timeless = [
        {
            name: value
            for name, value in result.updates[0].items()
            if not name.startswith(("time/", "speed/", "memory/", "eps"))
        }
        for result in (from_file, from_folder)
    ]
    assert timeless[0] == timeless[1]


def test_other_commands_read_the_file_too(tmp_path, run):
    config = run(lora=True)
    assert sum(role.parameters for role in plan(config).roles) > 0
    rows = generate_path(config.model.path, config.data.prompts, response_length=4)
    assert len(rows) == 5 and all(set(row) >= {"prompt", "response"} for row in rows)
