"""Adapters that were trained on their base with tokens added to it."""

import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM

from tests.models.build import roles_of, run_config, wrapped
from tests.tiny import VOCAB_SIZE, save_tiny, tiny_tokenizer
from tests.train.runs import tiny_run, write_prompts
from tether.errors import ModelError
from tether.models.loading import load_causal_lm
from tether.models.saving import merge_adapter
from tether.models.tokenizer import load_tokenizer
from tether.train.run import train_policy

NEW = ["<think>", "</think>"]
IDS = torch.tensor([[5, 7, VOCAB_SIZE, 8, VOCAB_SIZE + 1, 9]])


def adapter_with_tokens(folder, *, kept=("embed_tokens", "lm_head"), new=NEW, targets=("q_proj",), tied=False):
    base = save_tiny(folder / "base", tied=tied)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": new})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    parts = {"target_modules": list(targets), "modules_to_save": list(kept) or None}
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, ensure_weight_tying=tied, **parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = wrapped(model, lora)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter) * 0.3
    adapted.save_pretrained(folder / "adapter", save_embedding_layers=bool(new) and not kept)
    tokenizer.save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def by_peft(adapter, ids=IDS):
    """What PEFT's own way to open it says."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return AutoPeftModelForCausalLM.from_pretrained(adapter).eval()(ids).logits


def test_they_say_what_peft_s_own_way_to_open_them_says(tmp_path):
    adapter = adapter_with_tokens(tmp_path)
    wanted = by_peft(adapter)
    merge_adapter(adapter, tmp_path / "merged")
    roles = roles_of(run_config(adapter, lora={}))
    with torch.no_grad(), roles.use("policy") as policy:
        torch.testing.assert_close(policy(IDS).logits, wanted)
    for path in (adapter, tmp_path / "merged"):
        with torch.no_grad():
            torch.testing.assert_close(load_causal_lm(str(path), dtype=torch.float32)(IDS).logits, wanted)


@pytest.mark.parametrize(
    ("new", "kept", "targets"),
    [
        (NEW, ["embed_tokens"], ["q_proj"]),
        ([], ["embed_tokens"], ["q_proj"]),
        ([], [], ["q_proj", "embed_tokens"]),
    ],
)
def test_embeddings_that_peft_ties_say_so_too(tmp_path, new, kept, targets):
    adapter = adapter_with_tokens(tmp_path, kept=kept, new=new, targets=targets, tied=True)
    ids = IDS if new else IDS.clamp(max=VOCAB_SIZE - 1)
    wanted = by_peft(adapter, ids)
    merge_adapter(adapter, tmp_path / "merged")
    for path in (adapter, tmp_path / "merged"):
        with torch.no_grad():
            torch.testing.assert_close(load_causal_lm(str(path), dtype=torch.float32)(ids).logits, wanted)


def test_peft_ties_no_second_adapter_which_is_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    adapter = adapter_with_tokens(tmp_path, kept=["embed_tokens"], tied=True)
    config = tiny_run(tmp_path, model__path=adapter, model__lora={})
    monkeypatch.setattr("tether.train.run.open_log", None)
    with pytest.raises(ModelError, match=r"ensure_weight_tying .*tether merge .*adapter -o DIR"):
        train_policy(config)
    with pytest.raises(ModelError, match="ensure_weight_tying"):
        roles_of(run_config(adapter, lora={}))


def test_a_run_goes_on_with_them(tmp_path):
    adapter = adapter_with_tokens(tmp_path)
    prompts = write_prompts(tmp_path / "thought.jsonl", [f"{NEW[0]} the cat {NEW[1]}"])
    options = {"data__prompts": str(prompts), "data__special_tokens": True, "train__max_steps": 1}
    config = tiny_run(tmp_path, model__path=adapter, model__lora={}, **options)
    train_policy(config)
    assert load_tokenizer(str(config.output_dir)).convert_tokens_to_ids(NEW) == [VOCAB_SIZE, VOCAB_SIZE + 1]
    ours = load_causal_lm(str(config.output_dir), dtype=torch.float32)(IDS).logits
    torch.testing.assert_close(ours, by_peft(str(config.output_dir)))


def test_tokens_that_are_no_part_of_the_adapter_are_told_with_a_way_out(tmp_path):
    adapter = adapter_with_tokens(tmp_path, kept=())
    wanted = f"trained with {VOCAB_SIZE + 2} tokens, but its base has {VOCAB_SIZE}, and model.embed_tok.*AutoPeftModel"
    with pytest.raises(ModelError, match=wanted):
        load_causal_lm(adapter, dtype=torch.float32)
