"""float16 passes: losses are scaled, gradients are not, and a step whose scaled gradients overflow is left out."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from tests.faults.test_bad_numbers import ANSWERS
from tests.train.runs import tiny_run
from tests.train.trainers import move, noted_gradients, trainer_of
from tether.config.source import SourceConfig
from tether.errors import TrainingError
from tether.generation.fake import FakeGenerator
from tether.inference import judges
from tether.metrics.writers import read_jsonl
from tether.rewards.fake import FakeRewards
from tether.train import costs, optim
from tether.train.optim import LossScale
from tether.train.run import open_trainer
from tether.train.update import Update

SHARINGS = {
    "critic model, demonstrations": {"value__kind": "model", "ppo__ptx_coef": 0.3},
    "head": {"value__kind": "head"},
    "LoRA, four roles": {"model__lora": {"r": 4}, "value__kind": "adapter"},
}
ONE_OPTIMIZER = {"value__kind": "head", "ppo__num_ppo_epochs": 2, "ppo__num_mini_batches": 1}
LARGEST = torch.finfo(torch.float16).max


def trainer(folder, *, scale=None, answers=ANSWERS, **changes):
    """A trainer whose policy and critic have left their start, with answers known beforehand."""
    if "ppo__ptx_coef" in changes:
        (folder / "ptx.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": "sees you"}), encoding="utf-8")
        changes["data__ptx"] = str(folder / "ptx.jsonl")
    config = tiny_run(folder, **{"train__fp16": True, "output_dir": str(folder / "out")} | changes)
    rewards = FakeRewards(lambda query, response: len(response) / 10)
    made = trainer_of(config, rewards, FakeGenerator(answers), prepare=move, stop_ids={2})
    for optimizer in made.optimizers if scale is not None else ():
        optimizer.loss_scale.scale = scale
    return made


def weights_of(made):
    return {name: p.clone() for name, p in made.roles.state_dict().items()}


# The scale


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_is_that_of_torch(monkeypatch, seed):
    monkeypatch.setattr(optim, "STEPS_TO_GROW", 3)
    p = nn.Parameter(torch.zeros(1))
    theirs, ours, sgd = GradScaler("cpu", growth_interval=3), LossScale(), torch.optim.SGD([p])
    seen = set()
    for is_bad in (torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.2).tolist():
        theirs.scale(p.sum() * (math.inf if is_bad else 1.0)).backward()
        theirs.step(sgd)
        theirs.update()
        sgd.zero_grad()
        if is_bad:
            ours.overflowed()
        else:
            ours.took_step()
        assert ours.scale == theirs.get_scale()
        seen.add(ours.scale)
    assert min(seen) >= 1 and len(seen) > 3


def test_the_scale_starts_grows_and_falls_as_the_docs_say():
    scale = LossScale()
    assert scale.scale == 65536 and optim.STEPS_TO_GROW == 2000
    for _ in range(20):
        scale.overflowed()
    assert scale.scale == 1 and not scale.may_overflow
    for _ in range(1999):
        scale.took_step()
    assert scale.scale == 1
    scale.took_step()
    assert scale.scale == 2 and scale.may_overflow


# Where forwards run in float16


def test_a_run_and_its_judges_say_in_which_type_they_compute(tmp_path, monkeypatch):
    with open_trainer(tiny_run(tmp_path, train__fp16=True, model__lora={"r": 4})) as made:
        roles, tokenizer = made.roles, made.parts.tokenizer
    assert roles.autocast_dtype == torch.float16
    assert roles.policy.get_input_embeddings().weight.dtype == torch.float16
    assert {p.dtype for p in roles.trained.values()} == {torch.float32}
    monkeypatch.setattr(costs, "matrix_rate", lambda device, dtype: {torch.float16: 1.0}[dtype])
    assert costs.product_rate(roles) == 1.0
    adapter = [{"type": "adapter", "path": "judge"}]
    source = SourceConfig(rewards=adapter, model={"path": str(tmp_path / "llama-tied")}, fp16=True)
    assert judges._roles(source, tokenizer, "cpu").autocast_dtype == torch.float16


def test_all_roles_multiply_in_float16(tmp_path):
    made = trainer(tmp_path, value__kind="model")
    for role in ("policy", "reference", "value"):
        with made.roles.use(role) as model:
            layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
            assert layer(torch.ones(1, layer.in_features)).dtype == torch.float16


# Gradients


@pytest.mark.parametrize("sharing", SHARINGS)
def test_gradients_are_those_of_the_loss_whatever_its_scale(tmp_path, monkeypatch, sharing):
    """A power of two changes no digit but where numbers are so small that float16 has fewer digits for them."""
    found = []
    for scale in (2.0**5, 2.0**9):
        with monkeypatch.context() as patch:
            seen = noted_gradients(patch)
            row = trainer(tmp_path, scale=scale, ppo__num_ppo_epochs=1, **SHARINGS[sharing]).step()
        assert [name for name in row if name.endswith("num_overflows") and row[name]] == []
        found.append((seen, row))
    (small, one), (large, other) = found
    for (name, x), (again, y) in zip(small, large, strict=True):
        assert name == again and x.abs().max() > 1e-3
        torch.testing.assert_close(x, y, rtol=0, atol=2**-11 * float(y.abs().max()))
        assert one[f"{name}/grad_norm"] == pytest.approx(other[f"{name}/grad_norm"], rel=1e-4)
        assert float(x.norm()) == pytest.approx(one[f"{name}/grad_norm"], rel=1e-4), "logged before it is divided"


@pytest.mark.parametrize("sharing", SHARINGS)
def test_an_update_is_that_of_float32_up_to_rounding(tmp_path, sharing):
    """Steps far below the learning rate at which Adam's are of the sign alone, so that sizes of gradients show."""
    changes = SHARINGS[sharing] | {"train__adam_epsilon": 1e-2, "train__max_grad_norm": None}
    moved = []
    for fp16 in (False, True):
        made = trainer(tmp_path, scale=2.0**8 if fp16 else None, train__fp16=fp16, **changes)
        before = weights_of(made)
        assert made.step()["update/num_steps"] == 2
        moved.append(torch.cat([(p - before[name]).flatten() for name, p in made.roles.state_dict().items()]))
    full, half = moved
    assert full.abs().max() > 1e-4
    assert 0 < (half - full).norm() < 0.02 * full.norm()


# Overflows


@pytest.fixture
def small_losses(monkeypatch):
    """Losses so small that a tiny model's gradients fit into float16 at the scale that runs start with."""
    losses = Update.losses

    def small(self, *arguments, **options):
        return {name: x * 2.0**-10 for name, x in losses(self, *arguments, **options).items()}

    monkeypatch.setattr(Update, "losses", small)


def plant_overflow(tmp_path, made, number=0, **changes):
    """Has a parameter's largest gradient in the first mini-batch overflow float16 at scale 65,536, but not at 32,768.

    Args:
        number: of the optimizer whose first parameter it is.
    """

    def first(trainer):
        return next(p for p in trainer.optimizers[number].parameters if p.dim() == 2)

    probe, sizes = trainer(tmp_path, scale=1.0, **changes), []
    first(probe).register_hook(lambda g: sizes.append(float(g.abs().max())))
    probe.step()
    unit = 1.2 * LARGEST / 2**16 / max(sizes[:2])  # of two micro-batches
    first(made).register_hook(lambda g: (g * unit).half().float() / unit)


def test_a_step_that_overflows_is_left_out_and_the_next_one_taken(tmp_path, small_losses, monkeypatch):
    made, seen = trainer(tmp_path, **ONE_OPTIMIZER), []
    plant_overflow(tmp_path, made, **ONE_OPTIMIZER)
    (optimizer,) = made.optimizers
    add_gradients = Update.add_gradients

    def noted(self, *arguments):
        gradients = add_gradients(self, *arguments)
        seen.append((gradients.name, optimizer.loss_scale.scale, optimizer.learning_rate, weights_of(made)))
        return gradients

    monkeypatch.setattr(Update, "add_gradients", noted)
    before = weights_of(made)
    row = made.step()
    (first, full, rate, at_first), (second, half, later, at_second) = seen
    assert (first, full, second, half) == ("OVERFLOWED", 65536, "FIT", 32768)
    assert all(torch.equal(before[name], at_first[name]) for name in before)
    assert all(torch.equal(before[name], at_second[name]) for name in before), "the step was taken"
    assert later < rate, "the schedule stands still"
    after = weights_of(made)
    assert all(x.isfinite().all() for x in after.values())
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-4
    assert (row["policy/num_overflows"], row["policy/loss_scale"]) == (1, 32768)
    assert (row["update/num_steps"], row["update/num_bad"]) == (1, 0) and made.guard.in_a_row == 0
    assert not (made.config.output_dir / "bad_batches.jsonl").exists()
    assert all(math.isfinite(value) for value in row.values())


@pytest.mark.parametrize("whose", ["policy", "value"])
def test_an_overflow_keeps_its_own_optimizer_from_stepping_alone(tmp_path, small_losses, whose):
    changes = {"value__kind": "model", "ppo__num_ppo_epochs": 1}
    made, number = trainer(tmp_path, **changes), ["policy", "value"].index(whose)
    plant_overflow(tmp_path, made, number, **changes)
    before, row = weights_of(made), made.step()
    still = {name for name, p in made.roles.state_dict().items() if torch.equal(p, before[name])}
    assert still == {name for name in before if name.startswith(whose)}
    scales = [optimizer.loss_scale.scale for optimizer in made.optimizers]
    assert scales[number] == 32768 and scales[1 - number] == 65536
    assert (row["policy/num_overflows"], row["value/num_overflows"]) == (1 - number, number)
    assert row["policy/loss_scale"] == row["value/loss_scale"] == 65536  # what they were multiplied by
    assert (row["update/num_steps"], row["update/num_bad"]) == (0, 0)


def test_the_scale_grows_after_the_steps_that_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "STEPS_TO_GROW", 3)
    made = trainer(tmp_path, scale=2.0**4, **ONE_OPTIMIZER)
    scales = []
    for _ in range(3):
        scales.append(made.step()["policy/loss_scale"])
        made.state.step += 1
    assert scales == [16, 32, 32] and made.optimizers[0].loss_scale == LossScale(64.0, 0)


def test_what_is_not_finite_at_scale_1_is_a_bad_batch(tmp_path):
    made = trainer(tmp_path, scale=2.0, train__max_bad_batches=1, **ONE_OPTIMIZER)
    made.optimizers[0].parameters[0].register_hook(lambda g: g * math.nan)
    before, row = weights_of(made), made.step()
    assert (row["policy/num_overflows"], row["update/num_bad"], row["update/num_steps"]) == (1, 1, 0)
    assert made.optimizers[0].loss_scale.scale == 1
    (line,) = read_jsonl(made.config.output_dir / "bad_batches.jsonl")
    assert line["what"] == "gradient is not finite"
    assert all(torch.equal(p, before[name]) for name, p in made.roles.state_dict().items())
    with pytest.raises(TrainingError, match="after 1 skipped in a row"):
        made.step()


def test_a_loss_that_is_not_finite_is_a_bad_batch_at_every_scale(tmp_path, monkeypatch):
    losses = Update.losses
    nan = lambda self, *a, **k: {name: x * math.nan for name, x in losses(self, *a, **k).items()}  # noqa: E731
    monkeypatch.setattr(Update, "losses", nan)
    made = trainer(tmp_path, **ONE_OPTIMIZER)
    row = made.step()
    assert (row["update/num_bad"], row["update/num_steps"]) == (2, 0) and "policy/num_overflows" not in row
    assert made.optimizers[0].loss_scale.scale == 65536


def test_a_dry_step_leaves_the_scale_as_it_is(tmp_path, monkeypatch):
    made = trainer(tmp_path, answers=[[10, 11, 12, 13, 14, 15]], **ONE_OPTIMIZER)
    monkeypatch.setattr(made.engine, "are_finite", lambda optimizer: False)
    made.dry_step()
    assert made.optimizers[0].loss_scale == LossScale()
