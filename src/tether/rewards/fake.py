"""A reward source for tests: a rule in place of a judge."""

from __future__ import annotations

from collections.abc import Callable

from tether.rewards.base import checked
from tether.types import RewardBatch, RewardOutput


class FakeRewards:
    """Scores each answer by a rule and keeps the batches that it was given.

    Args:
        rule: (query text, answer text) → score.

    Example: ``FakeRewards(lambda query, response: -float(len(response)))``
    """

    def __init__(self, rule: Callable[[str, str], float]) -> None:
        self.rule = rule
        self.batches: list[RewardBatch] = []

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Scores by the rule, in the order of the batch."""
        self.batches.append(batch)
        scores = [self.rule(query, response) for query, response in zip(batch.queries, batch.responses, strict=True)]
        return RewardOutput(checked(scores, len(batch), "the fake reward"))
