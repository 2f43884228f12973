"""The weighted sum of reward sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tether.rewards.base import checked
from tether.types import RewardBatch, RewardOutput, RewardSource


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a sum. Example: ``Part("brevity", 0.2, source)``."""

    name: str
    """Name of the source in metrics and samples."""
    weight: float
    """Factor of its score in the sum."""
    source: RewardSource
    """The source."""


class WeightedSum:
    """Σ weight · score over its parts, each part's own scores kept as a component under its name.

    One part of weight 1 gives that part's scores unchanged. The components of a part are kept as ``name/component``.

    Args:
        parts: at least one, names unique.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        assert parts and len({part.name for part in parts}) == len(parts), "parts need unique names"
        self.parts = tuple(parts)

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Scores every part and adds them up.

        Raises:
            RewardError: a part could not score an answer.
        """
        components: dict[str, list[float]] = {}
        for part in self.parts:
            output = part.source.score(batch)
            components[part.name] = checked(output.scores, len(batch), f"reward {part.name}")
            components |= {f"{part.name}/{name}": list(values) for name, values in output.components.items()}
        weights = [part.weight for part in self.parts]
        columns = zip(*(components[part.name] for part in self.parts), strict=True)
        totals = [sum(weight * score for weight, score in zip(weights, row, strict=True)) for row in columns]
        return RewardOutput(checked(totals, len(batch), "the weighted sum of the rewards"), components)
