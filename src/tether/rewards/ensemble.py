"""Several sources that judge the same thing, as one source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, pvariance

from tether.config.rewards import EnsembleReward
from tether.rewards.base import checked
from tether.rewards.combine import BegunParts, Counted, Part, check_parts
from tether.rewards.early import Begun, whole
from tether.types import RewardBatch, RewardOutput

Reduction = Callable[[Sequence[float]], float]
"""Reduces the members' counted scores of one answer to one number."""


class Ensemble:
    """Reduces its members' scores of an answer to one number; each member's own scores are kept as a component under
    its name.

    Args:
        members: at least one, names unique.
        reduce: makes one number from the members' counted scores of an answer.
        name: its name in messages.
    """

    def __init__(self, members: Sequence[Part], reduce: Reduction, name: str) -> None:
        check_parts(members)
        self.members = tuple(members)
        self.reduce = reduce
        self.name = name

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Asks every member and reduces their scores.

        Raises:
            RewardError: a member could not score an answer.
        """
        return whole(self.begin(batch), batch)

    def begin(self, batch: RewardBatch) -> Begun:
        """Asks every member as early as possible."""
        return BegunParts(self.members, batch, self._reduced)

    def _reduced(self, counted: Counted) -> RewardOutput:
        scores = checked([self.reduce(row) for row in counted.rows], len(counted.rows), f"reward {self.name}")
        return RewardOutput(scores, counted.components, counted.tokens(scores, self._shares))

    def _shares(self, row: Sequence[float]) -> list[float]:
        """Weight of each member in an answer's token scores: all on the lowest member if the lowest counts, otherwise
        equal."""
        if self.reduce is min:
            return [float(i == row.index(min(row))) for i in range(len(row))]
        return [1 / len(row)] * len(row)


def reduction(config: EnsembleReward) -> Reduction:
    """The reduction that the configuration names."""
    match config.reduce:
        case "mean":
            return fmean
        case "min":
            return min
        case "uwo":
            return partial(uncertainty_weighted, coef=config.coef)


def uncertainty_weighted(scores: Sequence[float], *, coef: float) -> float:
    """mean − coef · variance, with the biased variance over the members (divided by their number).

    Source: Coste et al. 2023, https://arxiv.org/abs/2310.02743, "uncertainty-weighted optimization".
    """
    return fmean(scores) - coef * pvariance(scores)
