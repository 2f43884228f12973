"""Runs of several processes, and what they may differ by from a run of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.train.runs import tiny_run
from tether.train.optim import PassOptimizer
from tether.train.run import open_trainer
from tether.train.trainer import PPOTrainer

NOT_COMPARED = ("time/", "speed/", "memory/", "eps")
"""Of the machine, not of the algorithm."""
MOST_PARAMETER_ERROR = 1e-6
MOST_METRIC_ERROR = 1e-5
"""Relative, or of numbers below 1 absolute."""


@dataclass(frozen=True)
class Trained:
    """What a process knows at the end of a run."""

    engine: str
    num_processes: int
    start: Mapping[str, Tensor]
    """Trained weights of policy and critic before the first update, put together; in the main process at least."""
    weights: Mapping[str, Tensor]
    """The same at the end."""
    average: Mapping[str, Tensor]
    """The policy's under their moving average, if one was kept."""
    updates: Sequence[Mapping[str, float]]
    evaluations: Sequence[Mapping[str, float]]


def trained(folder: Path, changes: Mapping[str, Any]) -> Trained:
    """A tiny run, to be started in each process."""
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        return fitted(trainer)


def fitted(trainer: PPOTrainer) -> Trained:
    """Trains to the end."""
    full, average = trainer.engine.full, trainer.average

    def weights() -> dict[str, Tensor]:
        return {name: x.detach().cpu().clone() for name, x in full(trainer.roles.trained).items()}

    start = weights()
    trainer.fit()
    averaged = {} if average is None else full(average.parameters, average.state_dict())
    return Trained(
        engine=trainer.engine.name,
        num_processes=trainer.dist.num_processes,
        start=start,
        weights=weights(),
        average={name: x.clone() for name, x in averaged.items()},
        updates=trainer.log.updates,
        evaluations=trainer.log.evaluations,
    )


def overflowing(folder: Path, changes: Mapping[str, Any]) -> tuple[list[dict[str, float]], list[float], bool]:
    """A run in float16 in which the gradients of the last process are not finite at the first step of each optimizer:
    its updates, the scales of its losses at the end, and whether all weights are finite."""
    with open_trainer(tiny_run(folder, **changes, train__fp16=True)) as trainer:
        engine, dist, seen = trainer.engine, trainer.dist, set()
        are_finite = engine.are_finite

        def bad_at_first(optimizer: PassOptimizer) -> bool:
            if optimizer.name not in seen and dist.rank == dist.num_processes - 1:
                for gradient in optimizer.gradients:
                    getattr(gradient, "to_local", lambda g=gradient: g)().fill_(math.inf)
            seen.add(optimizer.name)
            return are_finite(optimizer)

        engine.are_finite = bad_at_first
        for optimizer in trainer.optimizers:
            optimizer.loss_scale.scale = 2.0**6  # a tiny model's gradients are large
        trainer.fit()
        weights = [engine.part(p) for p in trainer.roles.trained.values()]
        scales = [optimizer.loss_scale.scale for optimizer in trainer.optimizers]
        return trainer.log.updates, scales, all(bool(x.isfinite().all()) for x in weights)


def assert_both_left_out(found: Sequence[tuple[list[dict[str, float]], list[float], bool]]) -> None:
    """Asserts that two processes left out the first step of both optimizers, of which there were two an update."""
    (updates, scales, is_finite), (theirs, other_scales, theirs_are) = found
    assert metric_errors(updates, theirs, most=0) == []
    assert scales == other_scales == [32, 32] and is_finite and theirs_are
    first, second = updates
    assert (first["policy/num_overflows"], first["value/num_overflows"]) == (1, 1)
    assert (first["update/num_steps"], first["update/num_bad"]) == (1, 0)
    assert (second["policy/num_overflows"], second["update/num_steps"], second["val/first_ratio_error"]) == (0, 2, 0)


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest difference of a number."""
    assert ours.keys() == theirs.keys()
    return max(float((x - theirs[name]).abs().max()) for name, x in ours.items())


def metric_errors(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], most: float = MOST_METRIC_ERROR
) -> list[str]:
    """Metrics that differ, of runs with the same steps."""
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    wrong = []
    for one, other in zip(ours, theirs, strict=True):
        for name in sorted(one.keys() | other.keys()):
            a, b = one.get(name, math.nan), other.get(name, math.nan)
            if not name.startswith(NOT_COMPARED) and not abs(a - b) <= most * max(1.0, abs(b)):
                wrong.append(f"step {one['step']}: {name} {a!r}, not {b!r}")
    return wrong


def assert_same_run(run: Trained, one: Trained, *, most: float = MOST_PARAMETER_ERROR) -> None:
    """Asserts that a run of several processes is that of one, within rounding."""
    assert one.num_processes == 1 < run.num_processes
    assert distance(run.start, one.start) == 0
    assert distance(one.weights, one.start) > 100 * most, "nothing moved far enough for the bound to mean anything"
    assert metric_errors(run.updates, one.updates) == []
    assert metric_errors(run.evaluations, one.evaluations) == []
    assert distance(run.weights, one.weights) <= most
    if one.average:
        assert distance(run.average, one.average) <= most
