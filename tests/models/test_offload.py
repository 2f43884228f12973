"""Frozen models that wait on the CPU: where their weights are, and that nothing else changes."""

import pytest
import torch

from tests.models.build import micro_batch, roles_of, run_config, save_model
from tests.tiny import tiny_causal_lm
from tether.models.offload import Offloaded, has_own_memory

CPU = torch.device("cpu")
"""In place of an accelerator: what is fetched is a copy there too."""


def places(module):
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def test_weights_are_elsewhere_inside_and_the_same_tensors_again_outside():
    model = tiny_causal_lm().eval()
    ids = torch.tensor([[5, 7, 8]])
    with torch.no_grad():
        wanted = model(ids).logits
    kept = Offloaded(model, device=CPU)
    home = places(model)
    with pytest.raises(KeyError), kept.fetched():
        inside = places(model)
        assert not set(inside) & set(home)
        with kept.fetched(), torch.no_grad():  # nested: nothing is copied again
            assert places(model) == inside
            assert torch.equal(model(ids).logits, wanted)
        assert places(model) == inside
        raise KeyError
    assert places(model) == home
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_only_devices_with_a_memory_of_their_own_are_worth_it():
    assert [has_own_memory(torch.device(kind)) for kind in ("cpu", "mps", "cuda", "xpu")] == [False, False, True, True]


@pytest.mark.parametrize(
    ("lora", "value", "waits"), [(None, "model", True), (None, "head", True), ({}, "adapter", False)]
)
def test_the_frozen_copy_of_full_fine_tuning_waits_and_says_the_same(tmp_path, monkeypatch, lora, value, waits):
    model = save_model(tmp_path)
    sections = {"lora": lora, "value": {"kind": value}}
    wanted = roles_of(run_config(model, **sections)).ref_logprobs(micro_batch(), 1.0)
    config = run_config(model, **sections, train={"offload_idle_roles": True})
    at_rest = roles_of(config)
    home = places(at_rest.role("reference").model)
    with at_rest.fetched():  # on the CPU nothing moves
        assert places(at_rest.role("reference").model) == home
    monkeypatch.setattr("tether.models.roles.has_own_memory", lambda device: True)
    roles = roles_of(config)
    reference = roles.role("reference").model
    home = places(reference)
    with roles.use("reference"):
        assert (places(reference) != home) == waits
    with roles.fetched():
        inside = places(reference)
        assert (inside != home) == waits
        assert torch.equal(roles.ref_logprobs(micro_batch(), 1.0), wanted)
        assert places(reference) == inside
    assert places(reference) == home
    trained = places(roles.role("policy").model) + places(roles.role("value").model)
    with roles.use("value"), roles.use("policy"):
        assert places(roles.role("policy").model) + places(roles.role("value").model) == trained
