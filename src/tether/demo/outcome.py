"""How the demo's training changed the held-out answers, from the samples that the run wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Sample = Mapping[str, Any]
"""A row of samples.jsonl."""


@dataclass(frozen=True)
class Change:
    """One number per held-out answer, under the start policy and under the trained one, by prompt."""

    start: tuple[float, ...]
    trained: tuple[float, ...]

    @property
    def means(self) -> tuple[float, float]:
        """Mean before and after."""
        return fmean(self.start), fmean(self.trained)

    @property
    def errors(self) -> tuple[float, float]:
        """Standard errors of both means."""
        return _error(self.start), _error(self.trained)

    @property
    def rise(self) -> float:
        """Mean after − mean before."""
        return self.means[1] - self.means[0]

    @property
    def rise_error(self) -> float:
        """Standard error of ``rise``, from the differences per prompt."""
        return _error([b - a for a, b in zip(self.start, self.trained, strict=True)])

    @property
    def start_std(self) -> float:
        """Standard deviation under the start policy."""
        return stdev(self.start)


@dataclass(frozen=True)
class Outcome:
    """The start policy and the trained one on the same held-out prompts."""

    reward: Change
    """The reward model's own score, including answers that did not end."""
    sentiment: Change
    """The gold judge's score."""
    kl: Change
    """log π(answer) − log π_start(answer), nats."""
    length: Change
    """Number of tokens in the answer."""
    ended: Change
    """1.0 if the answer ended by itself, else 0.0."""
    answers: tuple[tuple[str, str, str], ...]
    """(prompt, answer before, answer after)."""

    @property
    def reward_rise_in_std(self) -> float:
        """Rise of the reward in standard deviations of the start policy's own scores."""
        return self.reward.rise / self.reward.start_std


def outcome(samples: Sequence[Sample], *, reward: str, judge: Callable[[Sequence[str]], list[float]]) -> Outcome:
    """Compares the first evaluation among ``samples`` with the last.

    Args:
        samples: rows of a run's samples.jsonl, with evaluations of the same prompts at two or more steps.
        reward: name of the reward source to compare by.
        judge: the gold judge; returns one score per answer.
    """
    held_out = [sample for sample in samples if sample["split"] == "eval"]
    steps = sorted({sample["step"] for sample in held_out})
    start, trained = (_by_row(held_out, step) for step in (steps[0], steps[-1]))
    assert start.keys() == trained.keys(), "both evaluations answer the same prompts"
    before, after = list(start.values()), [trained[row] for row in start]

    def change(numbers: Callable[[list[Sample]], list[float]]) -> Change:
        return Change(tuple(numbers(before)), tuple(numbers(after)))

    return Outcome(
        reward=change(lambda rows: [row["rewards"][reward] for row in rows]),
        sentiment=change(lambda rows: judge([row["response"] for row in rows])),
        kl=change(lambda rows: [row["kl"] for row in rows]),
        length=change(lambda rows: [float(row["length"]) for row in rows]),
        ended=change(lambda rows: [float(row["finish_reason"] == "stop") for row in rows]),
        answers=tuple((a["prompt"], a["response"], b["response"]) for a, b in zip(before, after, strict=True)),
    )


def result_table(result: Outcome) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the final table; ± is one standard error."""
    header = ["held-out answers", "start policy", "trained policy", "change"]
    reward = _row("reward (reward model)", result.reward, 2)
    reward[-1] += f" = {result.reward_rise_in_std:+.2f} sd of the start policy's scores"
    return header, [
        reward,
        _row("sentiment (VADER, the gold judge: -1 to 1)", result.sentiment, 2),
        _row("KL to the start policy (nats per answer)", result.kl, 2),
        _row("answer length (tokens)", result.length, 1),
        _row("share of answers that end by themselves", result.ended, 2),
    ]


def answer_table(result: Outcome, num_rows: int) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of the first answers, before and after side by side."""
    return ["prompt", "start policy", "trained policy"], [list(row) for row in result.answers[:num_rows]]


def _row(name: str, change: Change, digits: int) -> list[str]:
    before, after = (
        f"{mean:.{digits}f} ± {error:.{digits}f}" for mean, error in zip(change.means, change.errors, strict=True)
    )
    return [name, before, after, f"{change.rise:+.{digits}f} ± {change.rise_error:.{digits}f}"]


def _by_row(samples: Sequence[Sample], step: int) -> dict[int, Sample]:
    return {sample["row"]: sample for sample in samples if sample["step"] == step}


def _error(numbers: Sequence[float]) -> float:
    """Standard error of the mean."""
    return stdev(numbers) / math.sqrt(len(numbers))
