"""Combines reward sources: what each score contributes, and their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tether.rewards.base import checked
from tether.rewards.early import Begun, begun, whole
from tether.rewards.tokens import on_tokens, with_rest
from tether.types import RewardBatch, RewardOutput, RewardSource

Shares = Callable[[Sequence[float]], Sequence[float]]
"""Maps the parts' counted scores of one answer to each part's weight for token scores."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Part:
    """One of several sources. Example: ``Part("brevity", 0.2, source)``."""

    name: str
    """Name of the source in metrics and samples."""
    weight: float
    """Factor of its score."""
    source: RewardSource
    """The source."""
    norm: tuple[float, float] | Literal["auto"] | None = None
    """Mean and standard deviation by which its score is normalized; ``auto`` until measured."""
    bounds: tuple[float, float] | None = None
    """Range to which its score is clipped after that."""

    def counted(self, score: float) -> float:
        """The contribution of a score of the source: weight · clip((score − mean) / std)."""
        assert self.norm != AUTO, f"the norm of {self.name} is not measured yet"
        if self.norm is not None:
            score = (score - self.norm[0]) / self.norm[1]
        if self.bounds is not None:
            score = min(max(score, self.bounds[0]), self.bounds[1])
        return self.weight * score

    def counted_tokens(self, token_scores: Sequence[float], score: float) -> list[float]:
        """The contributions of an answer's token scores: weight / std each, and on the last token the rest of the whole
        answer's contribution, including its share of mean and clip."""
        factor = self.weight if self.norm is None else self.weight / self.norm[1]
        return with_rest([factor * value for value in token_scores[:-1]], self.counted(score))


class WeightedSum:
    """The sum of its parts' contributions; each part's own scores are kept as a component under its name.

    A single part of weight 1 gives its scores unchanged. The components of a part are kept as ``name/component``. Token
    scores add up token by token.

    Args:
        parts: at least one, names unique.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        check_parts(parts)
        self.parts = tuple(parts)

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Scores every part and adds up the contributions.

        Raises:
            RewardError: a part could not score an answer.
        """
        return whole(self.begin(batch), batch)

    def begin(self, batch: RewardBatch) -> Begun:
        """Asks every part as early as possible."""
        return BegunParts(self.parts, batch, self._sum)

    def _sum(self, counted: Counted) -> RewardOutput:
        totals = checked([sum(row) for row in counted.rows], len(counted.rows), "the weighted sum of the rewards")
        return RewardOutput(totals, counted.components, counted.tokens(totals, lambda row: [1.0] * len(row)))


def check_parts(parts: Sequence[Part]) -> None:
    """Asserts that there are parts and that their names differ."""
    assert parts and len({part.name for part in parts}) == len(parts), "parts need unique names"


@dataclass(frozen=True)
class Counted:
    """The contributions of several parts' scores."""

    rows: list[tuple[float, ...]]
    """For each answer, the contribution of each part's score."""
    components: dict[str, list[float]]
    """The parts' own scores and components by name."""
    token_rows: list[tuple[list[float], ...]] | None
    """For each answer, the contributions of each part's token scores; None if all of them fall on the last token."""

    def tokens(self, totals: Sequence[float], shares: Shares) -> list[list[float]] | None:
        """Token scores of each answer: sums of the parts' contributions, and on the last token the rest of the total.

        Args:
            shares: weights of the parts in the sums.
        """
        if self.token_rows is None:
            return None
        return [
            with_rest(
                [
                    math.fsum(share * value for share, value in zip(shares(row), values, strict=True))
                    for values in list(zip(*tokens, strict=True))[:-1]
                ],
                total,
            )
            for row, tokens, total in zip(self.rows, self.token_rows, totals, strict=True)
        ]


class BegunParts:
    """A batch that several parts are being asked about.

    Args:
        combine: makes one output from the parts' contributions.
    """

    def __init__(self, parts: Sequence[Part], batch: RewardBatch, combine: Callable[[Counted], RewardOutput]) -> None:
        self._parts, self._batch, self._combine = parts, batch, combine
        self._begun = [begun(part.source, batch) for part in parts]

    def finished(self, rows: Sequence[int]) -> None:
        """Tells every part."""
        for each in self._begun:
            each.finished(rows)

    def output(self) -> RewardOutput:
        """The parts' outputs, combined; once one part fails, the others are given up."""
        try:
            outputs = [each.output() for each in self._begun]
        except BaseException:
            self.give_up()
            raise
        return self._combine(counted(self._parts, outputs, self._batch))

    def give_up(self) -> None:
        """Gives up every part."""
        for each in self._begun:
            each.give_up()


def counted(parts: Sequence[Part], outputs: Sequence[RewardOutput], batch: RewardBatch) -> Counted:
    """The contributions of the scores that each part gave the batch.

    Raises:
        RewardResponseError: a part did not score every answer.
    """
    components: dict[str, list[float]] = {}
    columns = []
    for part, output in zip(parts, outputs, strict=True):
        scores = checked(output.scores, len(batch), f"reward {part.name}")
        columns.append([part.counted(score) for score in scores])
        own = {part.name: scores} | {f"{part.name}/{name}": list(values) for name, values in output.components.items()}
        assert own.keys().isdisjoint(components), "names of sources have no /, which joins them to their components"
        components |= own
    token_rows = None
    if any(output.token_scores is not None for output in outputs):
        token_columns = [
            [part.counted_tokens(*row) for row in zip(on_tokens(output, batch), output.scores, strict=True)]
            for part, output in zip(parts, outputs, strict=True)
        ]
        token_rows = list(zip(*token_columns, strict=True))
    return Counted(list(zip(*columns, strict=True)), components, token_rows)
