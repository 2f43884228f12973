"""Optimizers: one for each pass of the update, stepped together, each with its learning rate schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import GreedyLR, get_scheduler

from tether.config.schema import RunConfig, TrainConfig
from tether.errors import ConfigError
from tether.models.bitsandbytes import adamw_8bit
from tether.models.roles import POLICY, VALUE, ModelRoles

Schedule = LambdaLR | ReduceLROnPlateau | GreedyLR
"""The schedules of transformers: functions of the number of steps, and the two that follow a metric."""

_COSINE, _WITH_MIN_LR = ("num_cycles",), ("num_cycles", "min_lr", "min_lr_rate")
_FOLLOWING = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": _COSINE,
    "cosine_with_restarts": _COSINE,
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "reduce_lr_on_plateau": _FOLLOWING,
    "cosine_with_min_lr": _WITH_MIN_LR,
    "cosine_warmup_with_min_lr": (*_WITH_MIN_LR, "warmup_lr_rate"),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
    "greedy": (*_FOLLOWING, "warmup", "max_lr", "smooth", "window_size", "reset_start"),
}
"""Schedules of transformers, and the keys that ``train.lr_scheduler_kwargs`` may contain for each."""

_NEEDED = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Options of which the schedule requires exactly one."""
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": ("max", "min"),
    "threshold_mode": ("rel", "abs"),
    "warmup_type": ("linear", "cosine", "1-sqrt"),
    "decay_type": ("linear", "cosine", "1-sqrt"),
    "smooth": (True, False),
}
"""Options that are not numbers, and their possible values."""
STEPS_TO_GROW = 2_000
"""Number of steps without an overflow after which the loss scale is doubled."""
MOMENT_BYTES = {"adamw_torch": 8.0, "adamw_torch_fused": 8.0, "adamw_8bit": 2.0 + 8 / 256}
"""Bytes of both moments per trained parameter, by ``train.optim``; in 8 bits including the scales of blocks of 256."""


@dataclass
class LossScale:
    """Factor of a loss before its backward pass, so that small gradients do not become 0 in float16; the gradients are
    divided by it. It is a power of two, so scaling does not round.

        gradients overflow:   s ← max(s / 2, 1), n ← 0
        a step is taken:      n ← n + 1; at n = 2,000: s ← 2 s, n ← 0

    Sources: Micikevicius et al. 2018, section 3.2, https://arxiv.org/abs/1710.03740; the constants are those of
    ``torch.amp.GradScaler``, which supports only a single process and has no minimum scale.
    """

    scale: float = 2.0**16
    """s; at least 1."""
    num_steps: int = 0
    """n: steps taken since s changed."""

    @property
    def may_overflow(self) -> bool:
        """Whether the scale alone may be the reason for gradients that are not finite."""
        return self.scale > 1

    def overflowed(self) -> None:
        """Halves the scale after gradients that were not finite."""
        self.scale, self.num_steps = max(self.scale / 2, 1.0), 0

    def took_step(self) -> None:
        """Counts a step, and doubles the scale after ``STEPS_TO_GROW`` steps."""
        self.num_steps += 1
        if self.num_steps == STEPS_TO_GROW:
            self.scale, self.num_steps = 2 * self.scale, 0


@dataclass
class PassOptimizer:
    """AdamW over the parameters that one pass trains, with its schedule."""

    name: str
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    scheduler: Schedule
    max_grad_norm: float | None
    loss_scale: LossScale | None = None
    """Loss scale under float16 autocast."""
    value_weight: float = 1.0
    """Weight of the value loss; differs from 1 only if it is added to the policy's loss."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss whose gradient ``unscale`` divides."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of those parameters that have one."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def unscale(self) -> None:
        """Divides the gradients of scaled losses by the scale."""
        for gradient in self.gradients if self.loss_scale is not None else ():
            gradient.div_(self.loss_scale.scale)

    def clip(self) -> float:
        """Scales the gradients down to ``max_grad_norm``; returns their norm before clipping, 0 if there are none."""
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        return float(nn.utils.clip_grad_norm_(self.parameters, limit))

    def step(self) -> None:
        """Applies the gradients, advances the schedule, and clears the gradients.

        Parameters without a gradient are unchanged, and so are their moments.
        """
        self.optimizer.step()
        self.move_on()

    def skip(self) -> None:
        """Advances the schedule and clears the gradients like ``step``, without changing the parameters.

        For skipped steps, so that the schedule ends at the same point as without skipping.
        """
        with warnings.catch_warnings():  # torch assumes that the calls are in the wrong order
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
            self.move_on()

    def move_on(self) -> None:
        """Advances the schedule and clears the gradients."""
        if isinstance(self.scheduler, LambdaLR):
            self.scheduler.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def note(self, metric: float) -> None:
        """Passes the metric of an update to a schedule that follows a metric; other schedules ignore it.

        Args:
            metric: larger is better, unless ``lr_scheduler_kwargs`` has ``mode: min``.
        """
        if not isinstance(self.scheduler, LambdaLR):
            self.scheduler.step(metric)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        """The state that ``load_state_dict`` needs to resume exactly."""
        scale = {} if self.loss_scale is None else {"loss_scale": asdict(self.loss_scale)}
        return {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict(), **scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of ``state_dict``, without keeping its tensors: they may be memory-mapped from a file."""
        self.optimizer.load_state_dict(state["optimizer"])
        for kept in self.optimizer.state.values():
            own = {name: x.clone() for name, x in kept.items() if isinstance(x, Tensor) and x.device.type == "cpu"}
            kept.update(own)
        self.scheduler.load_state_dict(state["scheduler"])
        if self.loss_scale is not None:
            self.loss_scale = LossScale(**state["loss_scale"])


def build_optimizers(config: RunConfig, roles: ModelRoles, num_updates: int) -> list[PassOptimizer]:
    """One AdamW for each pass: policy and critic have one each, or a common one if they share a trunk.

    The schedule of a policy with its own optimizer begins after critic warm-up.
    """
    optimizers = []
    for pass_ in roles.passes:
        rate = config.learning_rate if POLICY in pass_.trains else config.critic_learning_rate
        updates = num_updates if VALUE in pass_.trains else updates_of_policy(config, num_updates)
        optimizer = build_optimizer(config, pass_.name, pass_.parameters(), rate, updates)
        is_shared = POLICY in pass_.trains and VALUE in pass_.trains
        optimizers.append(replace(optimizer, value_weight=config.ppo.vf_coef) if is_shared else optimizer)
    return optimizers


def updates_of_policy(config: RunConfig, num_updates: int) -> int:
    """Number of updates, out of ``num_updates``, in which the policy's optimizer steps: those after critic warm-up, or
    all if policy and critic share an optimizer."""
    return num_updates if config.value_kind == "head" else num_updates - config.value.warmup_steps


def build_optimizer(
    config: RunConfig, name: str, parameters: Sequence[nn.Parameter], rate: float, num_updates: int
) -> PassOptimizer:
    """AdamW over ``parameters`` whose learning rate peaks at ``rate`` and follows the run's schedule.

        m_t = β₁ m_{t−1} + (1 − β₁) g_t
        v_t = β₂ v_{t−1} + (1 − β₂) g_t²
        θ_t = (1 − η_t w) θ_{t−1} − η_t m̂_t / (√v̂_t + ε)      with m̂_t = m_t / (1 − β₁ᵗ), v̂_t = v_t / (1 − β₂ᵗ)

    Source: Loshchilov and Hutter 2019, algorithm 2, https://arxiv.org/abs/1711.05101
    """
    train = config.train
    options = {
        "lr": rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
        "weight_decay": train.weight_decay,
    }
    if train.optim == "adamw_8bit":
        optimizer = adamw_8bit(parameters, **options)
    else:
        # None lets torch take many tensors at a time on accelerators
        optimizer = AdamW(parameters, fused=True if train.optim == "adamw_torch_fused" else None, **options)
    scheduler = schedule(config, optimizer, num_updates)
    return PassOptimizer(name, list(parameters), optimizer, scheduler, train.max_grad_norm, loss_scale(train))


def loss_scale(train: TrainConfig) -> LossScale | None:
    """The initial loss scale of one optimizer; None if forward passes do not run in float16."""
    return LossScale() if train.fp16 else None


def schedule(config: RunConfig, optimizer: Optimizer, num_updates: int) -> Schedule:
    """The learning rate of ``optimizer`` over the optimizer steps of ``num_updates`` updates."""
    return _schedule(config, optimizer, _total_steps(config, num_updates))


def _total_steps(config: RunConfig, num_updates: int) -> int:
    return num_updates * config.ppo.num_ppo_epochs * config.ppo.num_mini_batches


def _warmup_steps(config: RunConfig, total_steps: int) -> int:
    train = config.train
    if train.warmup_steps is not None:
        return _total_steps(config, train.warmup_steps)
    return round(train.warmup_ratio * total_steps)


def _schedule(config: RunConfig, optimizer: Optimizer, total_steps: int) -> Schedule:
    train = config.train
    options = dict(train.lr_scheduler_kwargs)
    if "mode" in _OPTIONS[train.lr_scheduler_type]:
        options.setdefault("mode", "max")
    with warnings.catch_warnings():  # the run's length is always given, and num_stable_steps overrides it
        warnings.filterwarnings("ignore", "Both num_training_steps and num_stable_steps", UserWarning)
        return get_scheduler(
            train.lr_scheduler_type,
            optimizer,
            num_warmup_steps=_warmup_steps(config, total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=options,
        )


def check_schedule(config: RunConfig, num_updates: int) -> None:
    """Checks the schedules of policy and critic over a run of ``num_updates`` updates; needs no model.

    Raises:
        ConfigError: ``train.lr_scheduler_kwargs`` contains options that the schedule does not accept or lacks required
            ones, or the learning rate would leave the range from 0 to its peak.
    """
    train, of_policy = config.train, updates_of_policy(config, num_updates)
    _check_options(train)
    rates = [("train.learning_rate", config.learning_rate, of_policy)]
    if config.value_kind in ("model", "adapter"):
        key = "train.learning_rate" if config.value.learning_rate is None else "value.learning_rate"
        rates.append((key, config.critic_learning_rate, num_updates))
    for key, rate, updates in rates:
        total_steps = _total_steps(config, updates)
        whose = "the run" if updates == num_updates else "the policy after value.warmup_steps"
        _check_stages(config, total_steps, whose)
        _check_rates(config, total_steps, key, rate)


def _check_options(train: TrainConfig) -> None:
    """Raises ``ConfigError`` for an option that is not accepted by the schedule, is missing, or has a bad value."""
    name, given, key = train.lr_scheduler_type, train.lr_scheduler_kwargs, "train.lr_scheduler_kwargs"
    for option, value in given.items():
        if option not in _OPTIONS[name]:
            raise ConfigError(f"{key}: got {option}, wanted {_listed(_OPTIONS[name]) or 'none'} for schedule {name}")
        if (wanted := _unmet(option, value)) is not None:
            raise ConfigError(f"{key}.{option}: got {value!r}, wanted {wanted}")
    needed = _NEEDED.get(name, ())
    chosen = [option for option in needed if option in given]
    if needed and len(chosen) != 1:
        raise ConfigError(f"{key}: got {_listed(chosen) or 'none'}, wanted {' or '.join(needed)} for schedule {name}")


def _unmet(option: str, value: Any) -> str | None:
    """The requirement on an option that ``value`` does not meet, or None."""
    if option in _CHOICES:
        return None if value in _CHOICES[option] else f"one of {_listed(_CHOICES[option])}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if option == "factor":
        return None if is_number and 0 < value < 1 else "a number above 0 and below 1"
    return None if is_number and value >= 0 else "a number of at least 0"


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(str(name).lower() for name in names)


def _check_stages(config: RunConfig, total_steps: int, whose: str) -> None:
    """Raises ``ConfigError`` for a warm-up that the schedule does not have, or stages longer than ``total_steps``.

    Args:
        whose: whose steps they are, for the message.
    """
    train = config.train
    name, options = train.lr_scheduler_type, train.lr_scheduler_kwargs
    if train.warmup_steps is not None and name in _WITHOUT_WARMUP:
        raise ConfigError(
            f"train.warmup_steps: got {train.warmup_steps}, but schedule {name} has no warm-up. Remove it, or choose "
            "another train.lr_scheduler_type"
        )
    if train.warmup_ratio > 0 and name in _WITHOUT_WARMUP:
        raise ConfigError(
            f"train.warmup_ratio: got {train.warmup_ratio}, wanted 0: schedule {name} has no warm-up. Remove it, or "
            "choose another train.lr_scheduler_type"
        )
    warmup = _warmup_steps(config, total_steps)
    stable, decay = options.get("num_stable_steps", 0), options.get("num_decay_steps", 0)
    if stable + decay and warmup + stable + decay > total_steps:
        raise ConfigError(
            f"train.lr_scheduler_kwargs: got {stable} stable and {decay} decay steps after {warmup} of warm-up, wanted "
            f"at most the {total_steps} optimizer steps of {whose}"
        )


def _check_rates(config: RunConfig, total_steps: int, key: str, rate: float) -> None:
    """Raises ``ConfigError`` if the schedule cannot start from ``rate``, or leaves the range from 0 to it."""
    train, warmup = config.train, _warmup_steps(config, total_steps)
    name, options = train.lr_scheduler_type, train.lr_scheduler_kwargs
    settings = f"schedule {name} with options {options} over {total_steps} optimizer steps, {warmup} of them warm-up,"
    try:
        scheduler = _schedule(config, AdamW([nn.Parameter(torch.zeros(1))], lr=rate), total_steps)
        if isinstance(scheduler, LambdaLR):
            reached = min(warmup, total_steps)
            steps = sorted({0, reached, (reached + total_steps) // 2, total_steps - 1})
            factors = [scheduler.lr_lambdas[0](step) for step in steps]
        else:
            scheduler.step(0.0)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"train.lr_scheduler_kwargs: {settings} does not fit {key} {rate}: {error}") from error
    if isinstance(scheduler, LambdaLR):
        for step, factor in zip(steps, factors, strict=True):
            if not 0 <= factor <= 1 + 1e-9:
                raise ConfigError(
                    f"train.lr_scheduler_kwargs: {settings} gives learning rate {factor * rate:g} at step {step}, "
                    f"wanted from 0 to {key} {rate}"
                )
    elif scheduler.min_lrs[0] >= rate and scheduler.min_lrs[0] > 0:
        default = "" if "min_lr" in options else ", the default"
        raise ConfigError(
            f"train.lr_scheduler_kwargs.min_lr: got {scheduler.min_lrs[0]}{default}, wanted below {key} {rate}"
        )


def are_finite(grads: list[Tensor]) -> bool:
    """Whether every element of these gradients is finite."""
    # A finite sum has only finite elements. The converse does not hold: a sum may overflow.
    if not grads or bool(torch.isfinite(torch.stack([g.sum() for g in grads])).all()):
        return True
    return all(bool(torch.isfinite(g).all()) for g in grads)
