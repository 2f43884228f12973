"""Policies that commands load: with the weights that they were trained to."""

import torch
from transformers import AutoModelForCausalLM

from tests.models.build import save_adapter, save_model
from tether.inference.saved import load_saved_policy
from tether.models.loading import load_causal_lm
from tether.models.tokenizer import load_tokenizer


def test_an_adapter_on_a_bfloat16_base_is_not_rounded_back_to_it(tmp_path):
    base = save_model(tmp_path / "base")
    half = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    half.save_pretrained(base)
    adapter = save_adapter(tmp_path / "adapter", base, tokenizer=True, lora_alpha=0.002)  # a change below their step
    tokenizer = load_tokenizer(str(adapter))
    policy = load_saved_policy(str(adapter), tokenizer, None, response_length=4, temperature=None)
    exact = dict(load_causal_lm(str(adapter), dtype=torch.float32).named_parameters())
    before = dict(half.named_parameters())
    moved = [name for name, weight in exact.items() if not torch.equal(weight, before[name].float())]
    back = torch.cat([(exact[name].bfloat16() == before[name]).flatten() for name in moved])
    assert back.float().mean() > 0.5
    for name, weight in policy.model.named_parameters():
        assert weight.dtype == torch.float32 and torch.equal(weight, exact[name]), name
    start = load_saved_policy(str(base), tokenizer, None, response_length=4, temperature=None).model
    assert start.dtype == torch.bfloat16
