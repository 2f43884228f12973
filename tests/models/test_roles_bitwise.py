"""Equal weights give bitwise equal log-probabilities in the scoring, update and reference passes."""

import pytest
import torch

from tests.models.build import micro_batch, roles_of, run_config, save_adapter, save_model
from tests.tiny import KINDS

STARTS = ("full", "merged", "fresh", "loaded", "loaded with lm_head")
PRECISIONS = {
    "fp32": ({"dtype": "float32"}, None),
    "bf16 weights": ({"dtype": "bfloat16"}, None),
    "autocast": ({"dtype": "auto"}, torch.bfloat16),
    "fp16 autocast": ({"dtype": "auto"}, torch.float16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind → (model, adapter, adapter that also trained lm_head)."""
    made = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        model = save_model(root / "model", kind, tied=False)
        plain = save_adapter(root / "plain", model, tokenizer=True)
        whole = save_adapter(root / "whole", model, tokenizer=True, modules_to_save=["lm_head"])
        made[kind] = (model, plain, whole)
    return made


def start(folders, kind, name, precision, **sections):
    model, plain, whole = folders[kind]
    path = {"full": model, "merged": plain, "fresh": model, "loaded": plain, "loaded with lm_head": whole}[name]
    lora = None if name in ("full", "merged") else {"dropout": 0.3}
    settings, autocast_dtype = PRECISIONS[precision]
    config = run_config(path, lora=lora, **{"value": {"kind": "head"}, "model": settings} | sections)
    return roles_of(config, autocast_dtype=autocast_dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_old_new_and_reference_are_bitwise_equal_at_the_start(folders, kind, name, precision):
    roles, batch = start(folders, kind, name, precision), micro_batch()
    old = roles.score_pass(batch, 0.7)
    assert old.logprobs.dtype == torch.float32 and old.logprobs[batch.response_mask].max() < 0
    assert torch.equal(roles.ref_logprobs(batch, 0.7), old.logprobs)
    (pass_,) = roles.passes
    for checkpointing in (False, True):
        roles.gradient_checkpointing(checkpointing)
        with pass_(batch, temperature=0.7) as new:
            assert new.logprobs.requires_grad
            assert torch.equal(new.logprobs, old.logprobs)
            assert torch.equal(new.values, old.values)
            (new.logprobs.sum() + new.values.sum()).backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in pass_.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", ["adapter", "model"])
def test_values_of_a_critic_of_its_own_are_bitwise_equal_too(folders, value, precision):
    roles, batch = start(folders, "llama", "loaded", precision, value={"kind": value}), micro_batch()
    with torch.no_grad():
        roles.role("value").head.weight.normal_(generator=torch.Generator().manual_seed(0))
    old = roles.score_pass(batch, 1.0)
    assert old.values[batch.response_mask].abs().min() > 0
    roles.gradient_checkpointing(True)
    policy, critic = roles.passes
    assert (policy.trains, critic.trains) == (("policy",), ("value",))
    with policy(batch, temperature=1.0) as new:
        assert torch.equal(new.logprobs, old.logprobs) and new.values is None
    with critic(batch, temperature=1.0) as new:
        assert torch.equal(new.values, old.values) and new.logprobs is None and new.entropy is None


@pytest.mark.parametrize("name", ["full", "fresh", "loaded"])
def test_weights_of_policy_and_reference_are_used_in_one_type(folders, name):
    for autocast_dtype, base in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (None, torch.float32)):
        path = folders["llama"][1 if name == "loaded" else 0]
        config = run_config(path, lora=None if name == "full" else {})
        roles = roles_of(config, autocast_dtype=autocast_dtype)
        kinds = {r: {p.dtype for p in roles.role(r).model.parameters()} for r in ("policy", "reference")}
        assert kinds["policy"] == ({torch.float32} if name == "full" else {base, torch.float32})
        assert kinds["reference"] == {base, torch.float32}  # a full one's where autocast uses the policy's in that type
        assert {p.dtype for p in roles.role("policy").trained.values()} == {torch.float32}


@pytest.mark.parametrize(("half", "nearness"), [("autocast", 0.99), ("fp16 autocast", 0.9999)])
@pytest.mark.parametrize("name", ["full", "fresh"])
def test_gradients_under_autocast_are_those_of_float32_up_to_rounding(folders, name, half, nearness):
    gradients = []
    for precision in ("fp32", half):
        roles = start(folders, "llama", name, precision, value={"kind": "head"}, model={"dtype": "float32"})
        (pass_,) = roles.passes
        with pass_(micro_batch(), temperature=1.0) as out:
            (out.logprobs.sum() + out.values.sum()).backward()
        assert {p.grad.dtype for p in pass_.parameters()} == {torch.float32}
        gradients.append(torch.cat([p.grad.flatten() for p in pass_.parameters()]))
    assert nearness < torch.cosine_similarity(*gradients, dim=0) < 1.0


def test_backward_runs_outside_of_autocast(folders):
    roles = start(folders, "llama", "full", "autocast")
    (pass_,) = roles.passes
    with roles.use("policy"):
        assert torch.is_autocast_enabled("cpu")
    with pass_(micro_batch(), temperature=1.0):
        assert not torch.is_autocast_enabled("cpu")
