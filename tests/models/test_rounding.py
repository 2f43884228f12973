"""A frozen copy of the policy, stored as autocast uses it."""

import functools

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.models.build import micro_batch, roles_of, run_config, save_model
from tests.tiny import KINDS, tiny_causal_lm
from tether.models.rounding import frozen_copy

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_alone_are_rounded_and_a_tied_head_is_not(kind, tied):
    model = tiny_causal_lm(kind, tied=tied)
    copied = frozen_copy(model, BF16)
    assert {p.dtype for p in model.parameters()} == {FP32}, "the policy itself is trained in float32"
    for module in copied.modules():
        is_product = isinstance(module, nn.Linear | Conv1D) and not (tied and module is copied.get_output_embeddings())
        assert {p.dtype for p in module.parameters(recurse=False)} <= {BF16 if is_product else FP32}
    assert {p.dtype for p in copied.parameters()} == {BF16, FP32}
    assert (copied.get_input_embeddings().weight is copied.get_output_embeddings().weight) == tied


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_without_autocast_or_float32_nothing_is_rounded(dtype):
    model = tiny_causal_lm().to(dtype)
    copied = frozen_copy(model, None if dtype == FP32 else torch.float16)
    assert {p.dtype for p in copied.parameters()} == {dtype}


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("peeks", [False, True])
def test_a_reference_that_rounded_weights_would_change_is_copied_anew(tmp_path, monkeypatch, peeks, waits):
    plain = LlamaForCausalLM.forward

    @functools.wraps(plain)
    def peeking(self, *args, **kwargs):
        """Also uses a weight outside of a product, where autocast does not round it."""
        out = plain(self, *args, **kwargs)
        out.logits = out.logits + self.model.layers[0].mlp.down_proj.weight[0, :1]
        return out

    if peeks:
        monkeypatch.setattr(LlamaForCausalLM, "forward", peeking)
    monkeypatch.setattr("tether.models.roles.has_own_memory", lambda device: waits)
    config = run_config(save_model(tmp_path), value={"kind": "head"}, train={"offload_idle_roles": waits})
    roles = roles_of(config, autocast_dtype=BF16)
    reference, batch = roles.role("reference").model, micro_batch()
    assert ({p.dtype for p in reference.parameters()} == {FP32}) == peeks
    assert torch.equal(roles.ref_logprobs(batch, 0.7), roles.score_pass(batch, 0.7).logprobs)
    policy = roles.role("policy").model
    assert not {p.data_ptr() for p in reference.parameters()} & {p.data_ptr() for p in policy.parameters()}


def test_without_autocast_there_is_nothing_to_compare(tmp_path, monkeypatch):
    config = run_config(save_model(tmp_path), value={"kind": "head"})
    monkeypatch.setattr("tether.models.roles.few_tokens", lambda model: pytest.fail("a forward pass for nothing"))
    assert roles_of(config).role("reference").copies_policy
