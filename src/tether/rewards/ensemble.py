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
"""What the members' scores of one answer count together."""


class Ensemble:
    """One number of what its members say of an answer, each member's own scores kept as a component under its name.

    Args:
        members: at least one, names unique.
        reduce: makes one number of what the members' scores of an answer count.
        name: how messages name it.
    """

    def __init__(self, members: Sequence[Part], reduce: Reduction, name: str) -> None:
        check_parts(members)
        self.members = tuple(members)
        self.reduce = reduce
        self.name = name

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Asks every member and reduces what they say.

        Raises:
            RewardError: a member could not score an answer.
        """
        return whole(self.begin(batch), batch)

    def begin(self, batch: RewardBatch) -> Begun:
        """Asks every member as early as it can be asked."""
        return BegunParts(self.members, batch, self._reduced)

    def _reduced(self, counted: Counted) -> RewardOutput:
        scores = checked([self.reduce(row) for row in counted.rows], len(counted.rows), f"reward {self.name}")
        return RewardOutput(scores, counted.components, counted.tokens(scores, self._shares))

    def _shares(self, row: Sequence[float]) -> list[float]:
        """What each member has of the scores of an answer's tokens: the lowest everything, otherwise all the same."""
        if self.reduce is min:
            return [float(i == row.index(min(row))) for i in range(len(row))]
        return [1 / len(row)] * len(row)


def reduction(config: EnsembleReward) -> Reduction:
    """The reduction that the configuration asks for."""
    match config.reduce:
        case "mean":
            return fmean
        case "min":
            return min
        case "uwo":
            return partial(uncertainty_weighted, coef=config.coef)


def uncertainty_weighted(scores: Sequence[float], *, coef: float) -> float:
    """mean − coef · variance, the variance over the members themselves (divided by their number).

    Source: Coste et al. 2023, https://arxiv.org/abs/2310.02743, "uncertainty-weighted optimization".
    """
    return fmean(scores) - coef * pvariance(scores)
