"""The optimizer's step, its clipping, and every schedule of the learning rate, against values worked out by hand."""

from __future__ import annotations

import importlib.util
import inspect
import io
import math
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import GreedyLR, SchedulerType
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from tests.train.runs import tiny_run
from tether import train_policy
from tether.config.schema import RunConfig, TrainConfig, ValueConfig
from tether.data.collate import collate
from tether.errors import ConfigError
from tether.models.build import build_roles
from tether.models.tokenizer import load_tokenizer
from tether.train.optim import MOMENT_BYTES, are_finite, build_optimizer, build_optimizers, check_schedule

RATE = 0.01


def run_config(*, ppo=None, **train):
    """A run of 10 optimizer steps where it has 5 updates."""
    return RunConfig.model_validate({
        "model": {"path": "policy"},
        "rewards": [{"type": "function", "path": "rewards.py", "name": "score"}],
        "data": {"prompts": "prompts.jsonl"},
        "ppo": {"num_ppo_epochs": 2} | (ppo or {}),
        "train": {"max_steps": 5, "learning_rate": RATE} | train,
        "output_dir": "out",
    })  # fmt: skip


def scheduled(name, options=None, **train):
    return run_config(lr_scheduler_type=name, lr_scheduler_kwargs=options or {}, **train)


def optimizer_of(config, *values, num_updates=5):
    parameters = [nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in values or ([1.0],)]
    return build_optimizer(config, "policy", parameters, config.learning_rate, num_updates), parameters


def take_step(optimizer, *gradients):
    for parameter, gradient in zip(optimizer.parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()


# The step


def test_first_step_in_closed_form():
    """m̂ = g and v̂ = g², so θ moves by η g / (|g| + ε): by half of η where |g| = ε, and by all of it where |g| ≫ ε."""
    optimizer, (p,) = optimizer_of(run_config(lr_scheduler_type="constant"), [1.0, -2.0, 3.0])
    take_step(optimizer, [1e-5, -1e-5, 7.0])
    wanted = [1.0 - RATE / 2, -2.0 + RATE / 2, 3.0 - RATE * 7.0 / (7.0 + 1e-5)]
    torch.testing.assert_close(p.detach(), torch.tensor(wanted, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_several_steps_with_weight_decay_follow_the_recurrence(optim):
    config = run_config(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, weight_decay=0.1, optim=optim)
    assert RunConfig.model_validate(config.model_dump()).train.optim == optim
    optimizer, (p,) = optimizer_of(config, [1.5])
    theta, m, v = 1.5, 0.0, 0.0
    for t, g in enumerate([0.3, -0.2, 0.05], start=1):
        take_step(optimizer, [g])
        m, v, eta = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g, RATE * (1 - (t - 1) / 10)
        theta *= 1 - eta * 0.1
        theta -= eta * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-3)
        assert p.item() == pytest.approx(theta, abs=1e-12)


def test_parameters_without_a_gradient_stay_with_their_moments():
    optimizer, (p, q) = optimizer_of(run_config(lr_scheduler_type="constant", weight_decay=0.5), [1.0], [1.0])
    take_step(optimizer, [2.0], None)
    assert q.item() == 1.0 and q not in optimizer.optimizer.state
    take_step(optimizer, None, [2.0])
    first = 1.0 * (1 - RATE * 0.5) - RATE * 2.0 / (2.0 + 1e-5)
    assert p.item() == pytest.approx(first, abs=1e-12)
    assert q.item() == pytest.approx(first, abs=1e-12), "its own first step, whenever it comes"


def test_gradients_are_cleared_by_a_step_and_by_a_skipped_one():
    optimizer, (p,) = optimizer_of(run_config())
    for finish in (optimizer.skip, optimizer.step):
        p.grad = torch.ones_like(p)
        finish()
        assert p.grad is None


# The gradient's norm


def test_clip_norm_by_hand():
    optimizer, (p, q, r) = optimizer_of(run_config(max_grad_norm=2.0), [0.0, 0.0], [0.0], [0.0])
    p.grad, q.grad = torch.tensor([3.0, -4.0], dtype=torch.float64), torch.tensor([12.0], dtype=torch.float64)
    assert optimizer.clip() == pytest.approx(13.0, abs=1e-12)
    torch.testing.assert_close(p.grad, torch.tensor([6 / 13, -8 / 13], dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(q.grad, torch.tensor([24 / 13], dtype=torch.float64), atol=1e-6, rtol=0)
    assert r.grad is None


@pytest.mark.parametrize("limit", [None, 13.1])
def test_gradients_within_the_limit_or_without_one_are_left_alone(limit):
    optimizer, (p,) = optimizer_of(run_config(max_grad_norm=limit), [0.0, 0.0])
    p.grad = torch.tensor([5.0, 12.0], dtype=torch.float64)
    assert optimizer.clip() == 13.0
    assert p.grad.tolist() == [5.0, 12.0]


def test_norm_of_no_gradients_is_zero():
    optimizer, _ = optimizer_of(run_config())
    assert optimizer.clip() == 0.0


def test_are_finite_looks_at_every_gradient():
    optimizer, (p, q) = optimizer_of(run_config(), [0.0], [0.0])
    p.grad = torch.ones_like(p)
    assert are_finite(optimizer.gradients)
    q.grad = torch.full_like(q, float("nan"))
    assert not are_finite(optimizer.gradients)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_is_found_and_sums_that_overflow_are_not_taken_for_one(bad):
    parameters = [nn.Parameter(torch.zeros(50, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = build_optimizer(run_config(), "policy", parameters, RATE, 5)
    for p in parameters:
        p.grad = torch.full_like(p, 3e38)
        assert not torch.isfinite(p.grad.sum())
    assert are_finite(optimizer.gradients)
    parameters[1].grad[7] = bad
    assert not are_finite(optimizer.gradients)
    parameters[0].grad, parameters[1].grad = torch.zeros(50), torch.zeros(50, dtype=torch.bfloat16)
    parameters[0].grad[:2] = torch.tensor([bad, -bad])
    assert not are_finite(optimizer.gradients)


# Kinds


def test_the_kernel_is_that_of_the_configuration():
    for optim, fused in (("adamw_torch", None), ("adamw_torch_fused", True)):
        optimizer, _ = optimizer_of(run_config(optim=optim))
        (group,) = optimizer.optimizer.param_groups
        assert (group["fused"], group["foreach"]) == (fused, None)  # None: torch's choice for the device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_moves_weights_as_one_tensor_after_another_does(dtype):
    moved = []
    for optim in ("adamw_torch", "adamw_torch_fused"):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n, 40, generator=generator).to(dtype)) for n in (3, 50)]
        parameters[1].data = parameters[1].data.t()  # not in the order of memory
        optimizer = build_optimizer(run_config(optim=optim, weight_decay=0.1), "policy", parameters, RATE, 5)
        for _ in range(5):
            for p in parameters:  # gradients that come in another order of memory than the weights have
                (p * torch.randn(p.t().shape, generator=generator).to(dtype).t()).sum().backward()
            optimizer.step()
        moved.append([p.detach().clone() for p in parameters])
    for one, other in zip(*moved, strict=True):
        bounds = {"atol": 1e-6, "rtol": 0.0} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(one, other, **bounds)


def test_moments_in_8_bits_are_asked_of_bitsandbytes(monkeypatch):
    asked = {}

    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, parameters, **options):
            asked.update(options)
            super().__init__(parameters, **options)

    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=AdamW8bit))
    config = run_config(optim="adamw_8bit", adam_beta2=0.9, adam_epsilon=1e-3, weight_decay=0.1)
    optimizer, (p,) = optimizer_of(config, [1.0, 2.0])
    assert isinstance(optimizer.optimizer, AdamW8bit) and optimizer.parameters == [p]
    assert asked == {"lr": RATE, "betas": (0.9, 0.9), "eps": 1e-3, "weight_decay": 0.1}


def test_moments_in_8_bits_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("tether.models.bitsandbytes.version", missing)
    with pytest.raises(ConfigError, match=r"train\.optim adamw_8bit needs .* pip install 'tether\[quant\]'"):
        train_policy(tiny_run(tmp_path, train__optim="adamw_8bit"))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_moments_in_8_bits_take_a_quarter_and_move_weights_nearly_as_far():
    moved, sizes = [], []
    for optim in ("adamw_torch", "adamw_8bit"):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.zeros(64, 256))]
        optimizer = build_optimizer(run_config(optim=optim), "policy", parameters, RATE, 5)
        for _ in range(5):
            parameters[0].grad = torch.randn(64, 256, generator=generator)
            optimizer.step()
        moved.append(parameters[0].detach().clone())
        state = optimizer.optimizer.state[parameters[0]]
        sizes.append(sum(x.nbytes for x in state.values() if torch.is_tensor(x) and x.numel() >= 64))
    assert sizes[0] == 8 * 64 * 256 and sizes[1] < 1.2 * MOMENT_BYTES["adamw_8bit"] * 64 * 256
    assert torch.nn.functional.cosine_similarity(*(x.flatten() for x in moved), dim=0) > 0.97


@pytest.mark.parametrize(
    "changes",
    [
        {"model__freeze_layers": 1, "value__kind": "head"},
        {"model__freeze_layers": 1, "value__kind": "model"},
        {"model__lora": {"r": 2}},
        {"model__lora": {"r": 2}, "value__kind": "model"},
    ],
)
def test_what_is_frozen_has_neither_moments_nor_gradients(tmp_path, changes):
    config = tiny_run(tmp_path, **changes)
    roles = build_roles(config, load_tokenizer(config.model.path), device="cpu", autocast_dtype=None)
    optimizers = build_optimizers(config, roles, 1)
    batch = collate([[8, 9], [10]], [[11, 12], [13, 14, 15]])
    with torch.no_grad():
        roles.score_pass(batch, 1.0)
        roles.ref_logprobs(batch, 1.0)
    for pass_ in roles.passes:
        with pass_(batch, temperature=1.0) as out:
            sum(x.pow(2).sum() for x in (out.logprobs, out.values) if x is not None).backward()
    models = {role.model for role in roles.all} | {roles.policy}
    heads = {role.head for role in roles.all if role.head is not None}
    everything = {parameter for module in models | heads for parameter in module.parameters()}
    trained = {parameter for role in roles.all for parameter in role.trained.values()}
    assert {parameter for parameter in everything if parameter.grad is not None} == trained
    for optimizer in optimizers:
        optimizer.step()
    with_moments = [parameter for optimizer in optimizers for parameter in optimizer.optimizer.state]
    assert set(with_moments) == trained and len(with_moments) == len(trained) < len(everything)


# Schedules over the steps

VALUES = {
    "linear": ("linear", {}, {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.75, 9: 0.125, 10: 0.0}),
    "cosine": ("cosine", {}, {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.85355339059, 6: 0.5, 10: 0.0}),
    "a whole cosine": ("cosine", {"num_cycles": 1}, {1: 0.5, 2: 1.0, 4: 0.5, 6: 0.0, 10: 1.0}),
    "restarts": ("cosine_with_restarts", {"num_cycles": 2}, {0: 0.0, 2: 1.0, 4: 0.5, 6: 1.0, 8: 0.5, 10: 0.0}),
    "polynomial": ("polynomial", {"power": 2, "lr_end": 0.2 * RATE}, {1: 0.5, 2: 1.0, 6: 0.4, 8: 0.25, 10: 0.2}),
    "constant": ("constant", {}, {0: 1.0, 1: 1.0, 10: 1.0}),
    "constant with warm-up": ("constant_with_warmup", {}, {0: 0.0, 1: 0.5, 2: 1.0, 10: 1.0}),
    "inverse root": ("inverse_sqrt", {}, {0: 0.0, 1: 0.5, 2: 1.0, 8: 0.5}),
    "slow inverse root": ("inverse_sqrt", {"timescale": 4}, {1: 0.5, 2: 1.0, 7: 2 / 3}),
    "cosine to a share": ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {0: 0.0, 1: 0.5, 2: 1.0, 6: 0.6, 10: 0.2}),
    "cosine to a rate": ("cosine_with_min_lr", {"min_lr": 0.2 * RATE}, {1: 0.5, 2: 1.0, 6: 0.6, 10: 0.2}),
    "warm-up from a step": ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}, {0: 0.5, 1: 1.0, 5: 0.6, 9: 0.2}),
    "warm-up from a share": (
        "cosine_warmup_with_min_lr", {"min_lr": 0.2 * RATE, "warmup_lr_rate": 0.4}, {0: 0.4, 1: 1.0, 5: 0.6, 9: 0.2},
    ),
    "stable, then decay": (
        "warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.1},
        {0: 0.1, 1: 0.55, 2: 1.0, 5: 1.0, 6: 1.0, 8: 0.55, 10: 0.1},
    ),
    "a short stable phase": (
        "warmup_stable_decay", {"num_stable_steps": 1, "num_decay_steps": 4}, {1: 0.5, 2: 1.0, 3: 1.0, 5: 0.5, 7: 0.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_schedule_by_hand(case):
    """Ten steps, the first two of them warm-up where the schedule has one."""
    name, options, factors = VALUES[case]
    config = scheduled(name, options, warmup_ratio=0.0 if name == "constant" else 0.2)
    check_schedule(config, 5)
    optimizer, (p,) = optimizer_of(config)
    used = []
    for _ in range(10):
        used.append(optimizer.learning_rate)
        take_step(optimizer, [1.0])
    used.append(optimizer.learning_rate)
    assert {step: used[step] for step in factors} == pytest.approx({k: RATE * v for k, v in factors.items()}, abs=1e-12)
    assert p.item() == pytest.approx(1.0 - sum(used[:10]) / (1 + 1e-5), abs=1e-9), "Adam steps by the rate it names"


def test_total_steps_are_updates_times_epochs_times_mini_batches():
    config = run_config(ppo={"num_ppo_epochs": 3, "num_mini_batches": 4}, warmup_ratio=0.25)
    optimizer, _ = optimizer_of(config, num_updates=2)
    rates = []
    for _ in range(24):
        rates.append(optimizer.learning_rate / RATE)
        take_step(optimizer, [1.0])
    assert rates[3] == pytest.approx(0.5) and rates[6] == 1.0 and rates[15] == pytest.approx(0.5)
    assert optimizer.learning_rate == 0.0


@pytest.mark.parametrize(("updates", "peak"), [(1, 12), (2, 24), (8, None)])
def test_warm_up_is_over_as_many_updates_as_were_said(updates, peak):
    """One that is longer than the run never reaches its peak, as in transformers."""
    config = run_config(ppo={"num_ppo_epochs": 3, "num_mini_batches": 4}, warmup_steps=updates)
    check_schedule(config, 4)
    optimizer, _ = optimizer_of(config, num_updates=4)
    rates = []
    for _ in range(48):
        rates.append(optimizer.learning_rate / RATE)
        take_step(optimizer, [1.0])
    assert rates[6] == pytest.approx(6 / (12 * updates)) and (rates.index(1.0) if peak else None) == peak
    assert max(rates) == pytest.approx(1.0 if peak else 47 / 96)


def test_every_name_of_transformers_is_known_and_tested():
    names = {each.value for each in SchedulerType}
    assert set(get_args(TrainConfig.model_fields["lr_scheduler_type"].annotation)) == names
    assert {name for name, _, _ in VALUES.values()} | set(NEEDS_METRIC) == names


# Schedules that follow a metric

NEEDS_METRIC = {
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
    "greedy": {"patience": 1, "factor": 0.5, "min_lr": 0.1 * RATE, "max_lr": 3 * RATE},
}


def rates_after(config, metrics):
    check_schedule(config, 5)
    optimizer, _ = optimizer_of(config)
    rates = []
    for metric in metrics:
        optimizer.note(metric)
        rates.append(optimizer.learning_rate / RATE)
    return rates


def test_plateau_lowers_the_rate_where_the_metric_stops_growing():
    """With patience 1, the second update in a row without a new best halves the rate, and the count starts anew."""
    config = scheduled("reduce_lr_on_plateau", NEEDS_METRIC["reduce_lr_on_plateau"])
    assert rates_after(config, [1, 2, 3, 3, 2, 2, 1, 9, 1, 1]) == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]
    config = scheduled("reduce_lr_on_plateau", {"patience": 1, "factor": 0.5, "mode": "min"})
    assert rates_after(config, [3, 2, 1, 1, 2]) == [1, 1, 1, 1, 0.5]
    assert rates_after(config, [1, 2, 3]) == [1, 1, 0.5]


def test_greedy_also_raises_it_where_the_metric_grows():
    config = scheduled("greedy", NEEDS_METRIC["greedy"])
    assert rates_after(config, [1, 2, 3, 4, 4, 4, 0, 0, 0, 0, 0, 0]) == [
        1, 2, 2, 3, 3, 1.5, 1.5, 0.75, 0.75, 0.375, 0.375, 0.1875,
    ]  # fmt: skip


@pytest.mark.parametrize("name", NEEDS_METRIC)
def test_steps_do_not_move_a_schedule_that_follows_a_metric(name):
    optimizer, (p,) = optimizer_of(scheduled(name, NEEDS_METRIC[name]))
    for _ in range(6):
        take_step(optimizer, [1.0])
        optimizer.skip()
    assert optimizer.learning_rate == RATE
    assert p.item() == pytest.approx(1.0 - 6 * RATE / (1 + 1e-5), abs=1e-9)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in VALUES.values()}))
def test_other_schedules_do_not_heed_a_metric(name):
    options = next(options for other, options, _ in VALUES.values() if other == name)
    noted, plain = (optimizer_of(scheduled(name, options))[0] for _ in range(2))
    for _ in range(10):
        noted.note(-1.0)
        assert noted.learning_rate == plain.learning_rate
        take_step(noted, [1.0])
        take_step(plain, [1.0])


# Steps that are left out


def test_skipped_steps_move_the_schedule_alone():
    optimizer, (p,) = optimizer_of(run_config())
    optimizer.skip()  # the very first call: torch would warn, which pytest makes an error
    assert optimizer.learning_rate == pytest.approx(0.9 * RATE)
    assert p.item() == 1.0 and not optimizer.optimizer.state
    take_step(optimizer, [5.0])
    assert p.item() == pytest.approx(1.0 - 0.9 * RATE * 5.0 / (5.0 + 1e-5), abs=1e-12), "the first step of Adam"
    for _ in range(4):
        optimizer.skip()
        take_step(optimizer, [5.0])
    assert optimizer.learning_rate == 0.0


# Saving


SAVED = VALUES | {name: (name, options, {}) for name, options in NEEDS_METRIC.items()}
SAVED |= {"smoothed": ("greedy", NEEDS_METRIC["greedy"] | {"smooth": True, "window_size": 3}, {})}


def play(optimizer, rounds):
    """Steps, left-out steps, and a metric that only falls."""
    for i in rounds:
        take_step(optimizer, [math.sin(i), math.cos(i)])
        optimizer.skip()
        optimizer.note(-float(i))


@pytest.mark.parametrize("case", SAVED)
def test_state_goes_on_bitwise(case):
    """Saved in the warm-up, where there is one; the metric's schedules are saved half-way through their patience."""
    name, options, _ = SAVED[case]
    config = scheduled(name, options, warmup_ratio=0.0 if name in ("constant", *NEEDS_METRIC) else 0.5)
    straight, (p,) = optimizer_of(config, [1.0, 2.0], num_updates=10)
    play(straight, range(7))
    first, (q,) = optimizer_of(config, [1.0, 2.0], num_updates=10)
    play(first, range(4))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second, (r,) = optimizer_of(config, q.tolist(), num_updates=10)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.learning_rate == first.learning_rate
    play(second, range(4, 7))
    assert second.learning_rate == straight.learning_rate
    assert name == "constant" or straight.learning_rate != first.learning_rate, "the rate moved after the save too"
    assert torch.equal(p, r)


# Mistakes


def parameters_of(name):
    """What the schedule's own function takes besides what the run gives it."""
    function = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}.get(name)
    function = function or TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    own = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "verbose"}
    return set(inspect.signature(function).parameters) - own


@pytest.mark.parametrize("name", [each.value for each in SchedulerType])
def test_options_are_those_of_the_schedule(name):
    with pytest.raises(ConfigError, match=r"^train\.lr_scheduler_kwargs: got zebra, wanted (.*) for schedule") as error:
        check_schedule(scheduled(name, {"zebra": 1}), 5)
    wanted = str(error.value).removeprefix("train.lr_scheduler_kwargs: got zebra, wanted ").split(" for schedule ")[0]
    assert set(wanted.split(", ")) == (parameters_of(name) or {"none"})


MISTAKES = {
    "misspelt": (scheduled("cosine", {"num_cycle": 2}), r"got num_cycle, wanted num_cycles for schedule cosine"),
    "no options": (scheduled("linear", {"power": 2}), r"kwargs: got power, wanted none for schedule linear"),
    "printing": (scheduled("greedy", {"verbose": True}), r"kwargs: got verbose, wanted mode, factor"),
    "no lowest rate": (scheduled("cosine_with_min_lr"), r"got none, wanted min_lr or min_lr_rate for schedule"),
    "two lowest rates": (
        scheduled("cosine_warmup_with_min_lr", {"min_lr": 0.0, "min_lr_rate": 0.1}),
        r"got min_lr, min_lr_rate, wanted min_lr or min_lr_rate for schedule cosine_warmup",
    ),
    "no decay": (scheduled("warmup_stable_decay"), r"got none, wanted num_decay_steps for schedule"),
    "text": (scheduled("polynomial", {"power": "two"}), r"kwargs\.power: got 'two', wanted a number of at least 0"),
    "true": (scheduled("cosine", {"num_cycles": True}), r"kwargs\.num_cycles: got True, wanted a number"),
    "negative": (scheduled("polynomial", {"power": -1}), r"kwargs\.power: got -1, wanted a number of at least 0"),
    "endless": (scheduled("cosine", {"num_cycles": math.inf}), r"kwargs\.num_cycles: got inf, wanted a number"),
    "no such mode": (scheduled("reduce_lr_on_plateau", {"mode": "up"}), r"\.mode: got 'up', wanted one of max, min"),
    "no such smoothing": (scheduled("greedy", {"smooth": "no"}), r"\.smooth: got 'no', wanted one of true, false"),
    "factor": (scheduled("reduce_lr_on_plateau", {"factor": 0}), r"factor: got 0, wanted a number above 0 and below 1"),
    "too long": (
        scheduled("warmup_stable_decay", {"num_decay_steps": 9}, warmup_ratio=0.2),
        r"got 0 stable and 9 decay steps after 2 of warm-up, wanted at most the 10 optimizer steps of the run",
    ),
    "too long together": (
        scheduled("warmup_stable_decay", {"num_decay_steps": 6, "num_stable_steps": 5}),
        r"got 5 stable and 6 decay steps after 0 of warm-up",
    ),
    "warm-up that is not there": (
        scheduled("constant", warmup_ratio=0.1), r"^train\.warmup_ratio: got 0\.1, wanted 0: schedule constant has no"
    ),
    "steps without warm-up": (
        scheduled("constant", warmup_steps=3), r"^train\.warmup_steps: got 3, but schedule constant has no warm-up"
    ),
    "warm-up on a plateau": (scheduled("reduce_lr_on_plateau", warmup_ratio=0.1), r"^train\.warmup_ratio: got 0\.1"),
    "above the peak": (
        scheduled("cosine_with_min_lr", {"min_lr": 0.02}),
        r"gives learning rate 0\.015 at step 5, wanted from 0 to train\.learning_rate 0\.01",
    ),
    "warm-up from above": (
        scheduled("cosine_warmup_with_min_lr", {"min_lr": 0.0, "warmup_lr_rate": 2}, warmup_ratio=0.2),
        r"gives learning rate 0\.02 at step 0",
    ),
    "an end above the start": (
        scheduled("polynomial", learning_rate=1e-8),
        r"schedule polynomial with options \{\} .* does not fit train\.learning_rate 1e-08: lr_end \(1e-07\) must be",
    ),
    "all of it warm-up": (
        scheduled("polynomial", warmup_ratio=1.0),
        r"over 10 optimizer steps, 10 of them warm-up, does not fit .*: .*division by zero",
    ),
    "no time": (scheduled("inverse_sqrt", {"timescale": 0}), r"'timescale': 0\} .* does not fit .*division by zero"),
    "greedy from below": (
        scheduled("greedy", learning_rate=1e-4),
        r"kwargs\.min_lr: got 0\.001, the default, wanted below train\.learning_rate 0\.0001$",
    ),
    "a plateau from below": (
        scheduled("reduce_lr_on_plateau", {"min_lr": 0.01}), r"kwargs\.min_lr: got 0\.01, wanted below train\.learning"
    ),
    "no window": (scheduled("greedy", {"smooth": True, "window_size": 0}), r"does not fit .*: .*division by zero"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_told_by_key(case):
    config, message = MISTAKES[case]
    with pytest.raises(ConfigError, match=message) as error:
        check_schedule(config, 5)
    assert str(error.value).startswith(("train.lr_scheduler_kwargs", "train.warmup_ratio", "train.warmup_steps"))


def test_a_rate_of_0_is_a_rate_and_not_the_default():
    for name in ("linear", "cosine", "constant", "reduce_lr_on_plateau"):
        config = scheduled(name, learning_rate=0.0)
        assert config.learning_rate == config.critic_learning_rate == 0
        check_schedule(config, 5)
    critic = run_config().model_copy(update={"value": ValueConfig(learning_rate=0.0)})
    assert (critic.learning_rate, critic.critic_learning_rate) == (RATE, 0)
    check_schedule(critic, 5)


def test_critics_learning_rate_is_checked_too():
    config = scheduled("polynomial", {"lr_end": 0.001})
    check_schedule(config, 5)
    slow = config.model_copy(update={"value": config.value.model_copy(update={"learning_rate": 1e-4})})
    with pytest.raises(ConfigError, match=r"does not fit value\.learning_rate 0\.0001: lr_end \(0\.001\) must be"):
        check_schedule(slow, 5)


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("warmup_stable_decay", {"num_decay_steps": 8}, r"8 decay steps after 0 .* the 6 optimizer steps of the pol"),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, None),
        ("polynomial", {"warmup_ratio": 0.92}, r"over 6 optimizer steps, 6 of them warm-up, does not fit"),
    ],
)
def test_the_policys_schedule_is_checked_over_the_updates_that_it_trains(kind, name, options, told):
    """Which are fewer than the run's while a critic of its own warms up."""
    options = dict(options)
    config = scheduled(name, options, warmup_ratio=options.pop("warmup_ratio", 0.0))
    later = config.model_copy(update={"value": ValueConfig(kind=kind, warmup_steps=2)})
    check_schedule(config, 5)
    if told is None or kind == "head":
        check_schedule(later, 5)
    else:
        with pytest.raises(ConfigError, match=told):
            check_schedule(later, 5)


# What is built for a run


@pytest.mark.parametrize(("kind", "rate"), [("model", 5e-3), ("model", 0.0), ("head", None)])
def test_one_optimizer_a_pass(tmp_path, kind, rate):
    own = {"value__learning_rate": rate} if kind == "model" else {}
    config = tiny_run(tmp_path, value__kind=kind, **own)
    tokenizer = load_tokenizer(config.model.path)
    roles = build_roles(config, tokenizer, device="cpu", autocast_dtype=None)
    optimizers = build_optimizers(config, roles, num_updates=2)
    policy, critic = (list(roles.role(name).trained.values()) for name in ("policy", "value"))
    held = [(o.name, o.learning_rate, [*map(id, o.parameters)]) for o in optimizers]
    if kind == "model":
        assert held == [("policy", 1e-3, [*map(id, policy)]), ("value", rate, [*map(id, critic)])]
    else:
        assert held == [("policy", 1e-3, [*map(id, [*policy, *critic])])]
    for optimizer in optimizers:
        (group,) = optimizer.optimizer.param_groups
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-5, 0.0)
        assert [*map(id, group["params"])] == [*map(id, optimizer.parameters)]
