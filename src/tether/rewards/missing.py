"""The score of answers to which a source gives none: a value set by the user, reported once and counted, or an
error."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tether.errors import RewardResponseError
from tether.report.read import MISSING
from tether.rewards.base import answer_of, checked, listed
from tether.types import RewardOutput

logger = logging.getLogger(__name__)


def way_out_of(section: str | None) -> str:
    """What gives answers without a score one, as the end of a sentence.

    Args:
        section: configuration key of their source, if it has one.
    """
    key = "the reward's `missing`" if section is None else f"{section}.missing"
    return f"set {key} to the score of such answers"


class Missing:
    """The score of answers to which a source gives none.

    Args:
        score: the value in the source's section. None: such an answer is an error.
        name: name of the source in metrics.
        section: configuration key of the source, if it has one.
    """

    def __init__(self, score: float | None, name: str, section: str | None = None) -> None:
        self.score, self.name, self.section = score, name, section
        self._is_told = False

    @property
    def way_out(self) -> str:
        """What gives such answers a score, as the end of a sentence."""
        return way_out_of(self.section)

    def tell(self, why: str) -> None:
        """Warns once that an answer gets this score; further ones show in the metric."""
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%s. Its score is set to %g, the reward's `missing`; rewards/%s/%s is the share of such answers",
                why, self.score, self.name, MISSING,
            )  # fmt: skip

    def filled(self, scores: Any, source: str) -> Any:
        """What a source returned, with the score in place of each None.

        Args:
            source: the source's name in messages.

        Raises:
            RewardResponseError: it holds None, and that is an error.
        """
        values = listed(scores)
        row = None if values is None else next((row for row, value in enumerate(values) if value is None), None)
        if row is None:
            return scores
        why = f"{source} returned None for {answer_of(row, len(values))}, which is not a score"
        if self.score is None:
            raise RewardResponseError(f"{why}; wanted a number, or {self.way_out}")
        self.tell(why)
        return [self.score if value is None else value for value in values]

    def output(self, scores: Sequence[float | None], source: str) -> RewardOutput:
        """The output of a source that gives each answer one number.

        Args:
            scores: that number; None if it gives none.
            source: the source's name in messages.
        """
        return self.marked(RewardOutput(checked(self.filled(scores, source), len(scores), source)), scores)

    def marked(self, output: RewardOutput, scores: Sequence[Any]) -> RewardOutput:
        """The output with the component that counts such answers, unless they are an error.

        Args:
            scores: the source's score of each answer; None if it gave none.
        """
        if self.score is None:
            return output
        return replace(output, components={**output.components, MISSING: [float(s is None) for s in scores]})
