"""A role in use changes which adapter answers, and leaves no trace."""

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.models.build import micro_batch, roles_of, run_config, save_adapter, save_model
from tether.data.collate import pad_left
from tether.errors import ModelError
from tether.models.forward import response_outputs

ROLES = ("policy", "reference", "value", "reward/a", "reward/b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("switching")
    model = save_model(root / "model", tied=False)
    start = save_adapter(root / "start", model, tokenizer=True, modules_to_save=["lm_head"])
    rewards = [save_adapter(root / name, model, reward=True, seed=seed) for seed, name in enumerate("ab", start=7)]
    return model, start, rewards


@pytest.fixture(params=["fresh", "loaded"])
def roles(request, folders):
    model, start, rewards = folders
    roles = roles_of(run_config(start if request.param == "loaded" else model, lora={}))
    for name, path in zip("ab", rewards, strict=True):
        roles.add_reward_adapter(name, str(path))
    return roles


def snapshot(roles):
    adapted = roles.policy
    layer = next(module for module in adapted.modules() if isinstance(module, BaseTunerLayer))
    return (
        adapted.active_adapter,
        tuple(adapted.active_adapters),
        layer.disable_adapters,
        [(name, p.requires_grad) for name, p in adapted.named_parameters()],
        [(name, m.training) for name, m in adapted.named_modules()],
        [(name, tuple(vars(m))) for name, m in adapted.named_modules()],
    )


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 7, 8]]), use_cache=False).logits


def test_at_rest_the_policy_is_active_in_eval_mode_and_only_what_trains_requires_gradients(roles):
    active, _, off, flags, modes, _ = snapshot(roles)
    assert active == "default" and not off
    assert not any(mode for _, mode in modes)
    trained = {name for name, flag in flags if flag}
    assert trained and all(".default." in name or ".value." in name for name in trained)
    assert {".default." in name for name in trained} == {True, False}
    assert not any(flag for name, flag in flags if ".reference." in name or ".reward" in name)


def test_use_restores_everything_also_after_an_exception(roles):
    before, was = snapshot(roles), logits(roles.role("policy").model)
    for role in ROLES:
        with roles.use(role):
            pass
        assert snapshot(roles) == before, role
        with pytest.raises(ZeroDivisionError), roles.use(role) as model:
            model.train()
            for parameter in model.parameters():
                parameter.requires_grad_(not parameter.requires_grad)
            raise ZeroDivisionError
        assert snapshot(roles) == before, role
        assert torch.equal(logits(roles.role("policy").model), was)


def test_uses_nest(roles):
    before = snapshot(roles)
    for outer in ROLES:
        with roles.use(outer) as model:
            state, was = snapshot(roles), logits(model)
            for inner in ROLES:
                with roles.use(inner):
                    pass
                assert snapshot(roles) == state, (outer, inner)
                assert torch.equal(logits(model), was)
        assert snapshot(roles) == before


def switches(monkeypatch):
    """A list that fills with every change of a layer's adapter."""
    seen = []
    for name in ("set_adapter", "enable_adapters"):
        wrapped = getattr(BaseTunerLayer, name)

        def noted(self, *args, wrapped=wrapped, **kwargs):
            seen.append(wrapped.__name__)
            return wrapped(self, *args, **kwargs)

        monkeypatch.setattr(BaseTunerLayer, name, noted)
    return seen


def test_a_role_that_was_switched_to_is_used_without_a_switch(roles, monkeypatch):
    before, seen = snapshot(roles), switches(monkeypatch)
    for role in ROLES:
        with roles.use(role) as model:
            wanted, inside = logits(model), snapshot(roles)
        with roles.switched_to(role):
            num_switches = len(seen)
            for _ in range(2):
                with roles.use(role) as model:
                    assert torch.equal(logits(model), wanted) and snapshot(roles) == inside
            assert len(seen) == num_switches, role
            with roles.use("value"):
                pass
            with roles.use(role) as model:
                assert torch.equal(logits(model), wanted), role
        assert snapshot(roles) == before, role
    assert seen


def test_flags_are_the_same_inside_every_role(roles):
    flags = snapshot(roles)[3]
    for role in ROLES:
        with roles.use(role):
            assert snapshot(roles)[3] == flags


def test_a_frozen_policy_stays_frozen(roles):
    for parameter in roles.role("policy").trained.values():
        parameter.requires_grad_(False)
    for role in ROLES:
        with roles.use(role):
            pass
    assert not any(p.requires_grad for p in roles.role("policy").trained.values())


def test_training_mode_from_before_comes_back(roles):
    roles.policy.train()
    before = snapshot(roles)
    with roles.use("policy") as model:
        assert not any(module.training for module in model.modules())
    assert snapshot(roles) == before and roles.policy.training


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_restores_everything_also_after_an_exception(roles, checkpointing):
    roles.gradient_checkpointing(checkpointing)
    before = snapshot(roles)
    for pass_ in roles.passes:
        with pass_(micro_batch(), temperature=1.0) as out:
            next(x for x in out if x is not None).sum().backward()
        assert snapshot(roles) == before
        with pytest.raises(ZeroDivisionError), pass_(micro_batch(), temperature=1.0):
            raise ZeroDivisionError
        assert snapshot(roles) == before


def test_roles_differ(roles, folders):
    ids, mask, positions = pad_left([[5, 7, 8], [9, 10]])
    outputs = {}
    for role in ROLES:
        with roles.use(role) as model, torch.no_grad():
            outputs[role] = model.base_model(input_ids=ids[:1], use_cache=False).last_hidden_state
    same = {(a, b) for a in ROLES for b in ROLES if a < b and torch.equal(outputs[a], outputs[b])}
    starts_from_base = roles.role("policy").source == str(folders[0])
    alike = {("policy", "reference")}
    assert same == (alike | {("policy", "value"), ("reference", "value")} if starts_from_base else alike)
    scores = {name: roles.reward_scores(name, ids, mask, positions) for name in "ab"}
    assert not torch.equal(scores["a"], scores["b"])


def test_reference_and_rewards_are_bitwise_unchanged_by_training(roles):
    ids, mask, positions = pad_left([[5, 7, 8], [9, 10]])
    batch = micro_batch()

    def frozen():
        scores = [roles.reward_scores(name, ids, mask, positions) for name in "ab"]
        return [roles.ref_logprobs(batch, 1.0), *scores]

    before, old = frozen(), roles.score_pass(batch, 1.0)
    optimizer = torch.optim.SGD([p for pass_ in roles.passes for p in pass_.parameters()], lr=0.05)
    for _ in range(3):
        for pass_ in roles.passes:
            with pass_(batch, temperature=1.0) as out:
                next(x for x in out if x is not None).add(-1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for was, now in zip(before, frozen(), strict=True):
        assert torch.equal(was, now)
    new = roles.score_pass(batch, 1.0)
    assert not torch.equal(new.logprobs, old.logprobs) and not torch.equal(new.values, old.values)


def test_policy_steps_leave_values_and_value_steps_leave_the_policy(roles):
    batch = micro_batch()
    for trained, index in (("policy", 0), ("value", 1)):
        before = roles.score_pass(batch, 1.0)
        pass_ = roles.passes[index]
        for _ in range(2):  # a head at zero passes no gradient to its trunk at first
            optimizer = torch.optim.SGD(pass_.parameters(), lr=0.05)
            with pass_(batch, temperature=1.0) as out:
                next(x for x in out if x is not None).add(-1).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = roles.score_pass(batch, 1.0)
        assert torch.equal(after.values, before.values) == (trained == "policy")
        assert torch.equal(after.logprobs, before.logprobs) == (trained == "value")


def test_without_kl_there_is_no_reference(folders):
    model, start, _ = folders
    for path, lora in ((model, None), (model, {}), (start, {})):
        roles = roles_of(run_config(path, lora=lora, ppo={"kl_coef": 0.0}, value={"kind": "head"}))
        assert not roles.has_reference
        assert [row.role for row in roles.table()] == ["policy", "value"]
        with pytest.raises(AssertionError, match="no role reference"):
            roles.ref_logprobs(micro_batch(), 1.0)
    assert "reference" not in roles.policy.peft_config


def test_a_full_reference_is_a_copy_that_training_does_not_reach(folders):
    roles = roles_of(run_config(folders[0], value={"kind": "head"}))
    batch = micro_batch()
    before = roles.ref_logprobs(batch, 1.0)
    (pass_,) = roles.passes
    with pass_(batch, temperature=1.0) as out:
        out.logprobs.sum().backward()
    torch.optim.SGD(pass_.parameters(), lr=0.01).step()
    assert torch.equal(roles.ref_logprobs(batch, 1.0), before)
    assert not torch.equal(roles.score_pass(batch, 1.0).logprobs, before)


def test_the_reference_of_a_loaded_start_is_not_the_bare_base(folders):
    model, start, _ = folders
    loaded, bare = roles_of(run_config(start, lora={})), roles_of(run_config(model, lora={}))
    batch = micro_batch()
    gap = (loaded.ref_logprobs(batch, 1.0) - bare.ref_logprobs(batch, 1.0)).abs().sum()
    assert gap > 1.0


def test_table_says_what_is_shared_and_what_each_role_adds(folders):
    model, start, rewards = folders
    roles = roles_of(run_config(model, lora={"r": 4}))
    roles.add_reward_adapter("a", str(rewards[0]))
    rows = {row.role: row for row in roles.table()}
    assert list(rows) == ["policy", "reference", "value", "reward/a"]
    base = rows["reference"].parameters
    adapter = rows["policy"].trainable
    assert rows["policy"].parameters == base + adapter and rows["policy"].bytes == 4 * (base + adapter)
    assert (rows["reference"].trainable, rows["reference"].bytes) == (0, 0)
    assert rows["value"].trainable == adapter + 16 and rows["value"].bytes == 4 * (adapter + 16)
    assert rows["reward/a"].trainable == 0 and rows["reward/a"].bytes == 4 * (adapter + 16)
    full = {row.role: row for row in roles_of(run_config(model)).table()}
    size = full["policy"].parameters
    assert full["policy"].trainable == size and full["reference"].bytes == 4 * size
    assert full["value"].trainable == size - 40 * 16 + 16  # no lm_head, but a head
    mixed = {row.role: row for row in roles_of(run_config(start, lora={}), autocast_dtype=torch.bfloat16).table()}
    assert mixed["policy"].dtype == "bfloat16 + float32" or mixed["policy"].dtype == "float32 + bfloat16"


def test_gradient_checkpointing_of_a_model_without_layers_is_refused(folders, monkeypatch):
    monkeypatch.setattr("tether.models.layers.GradientCheckpointingLayer", torch.nn.Bilinear)
    with pytest.raises(ModelError, match=r"train.gradient_checkpointing: LlamaForCausalLM does not support it"):
        roles_of(run_config(folders[0], train={"max_steps": 1, "gradient_checkpointing": True}))


def test_forward_of_the_policy_in_use_is_that_of_a_pass(roles):
    batch = micro_batch()
    with roles.use("policy") as model, torch.no_grad():
        assert torch.equal(
            response_outputs(model, batch, temperature=1.0).logprobs, roles.score_pass(batch, 1.0).logprobs
        )
