"""Reward sources put together: what the score of each counts, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tether.rewards.base import checked
from tether.types import RewardBatch, RewardOutput, RewardSource


@dataclass(frozen=True, slots=True)
class Part:
    """One of several sources. Example: ``Part("brevity", 0.2, source)``."""

    name: str
    """Name of the source in metrics and samples."""
    weight: float
    """Factor of its score."""
    source: RewardSource
    """The source."""
    norm: tuple[float, float] | None = None
    """Mean and standard deviation that its score is normalised by."""
    bounds: tuple[float, float] | None = None
    """What its score is clipped to after that."""

    def counted(self, score: float) -> float:
        """What a score of the source counts: weight · clip((score − mean) / std)."""
        if self.norm is not None:
            score = (score - self.norm[0]) / self.norm[1]
        if self.bounds is not None:
            score = min(max(score, self.bounds[0]), self.bounds[1])
        return self.weight * score


class WeightedSum:
    """Σ of what its parts' scores count, each part's own scores kept as a component under its name.

    One part of weight 1 gives that part's scores unchanged. The components of a part are kept as ``name/component``.

    Args:
        parts: at least one, names unique.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        check_parts(parts)
        self.parts = tuple(parts)

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Scores every part and adds them up.

        Raises:
            RewardError: a part could not score an answer.
        """
        rows, components = scored(self.parts, batch)
        totals = [sum(row) for row in rows]
        return RewardOutput(checked(totals, len(batch), "the weighted sum of the rewards"), components)


def check_parts(parts: Sequence[Part]) -> None:
    """Asserts that there are parts and that their names differ."""
    assert parts and len({part.name for part in parts}) == len(parts), "parts need unique names"


def scored(parts: Sequence[Part], batch: RewardBatch) -> tuple[list[tuple[float, ...]], dict[str, list[float]]]:
    """For each answer, what each part's score counts; and the parts' own scores and components by name.

    Raises:
        RewardError: a part could not score an answer.
    """
    components: dict[str, list[float]] = {}
    for part in parts:
        output = part.source.score(batch)
        components[part.name] = checked(output.scores, len(batch), f"reward {part.name}")
        components |= {f"{part.name}/{name}": list(values) for name, values in output.components.items()}
    columns = [[part.counted(score) for score in components[part.name]] for part in parts]
    return list(zip(*columns, strict=True)), components
