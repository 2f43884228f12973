"""Reward sources that wait for something external are asked about answers while others are still being generated.

Any source scores a whole batch. One that can be asked earlier also has ``begin``: it receives answers as they finish,
and finally returns what ``score`` would have returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol, TypeVar, runtime_checkable

from tether.errors import RewardResponseError
from tether.rewards.base import checked_output
from tether.rewards.tokens import on_tokens
from tether.types import RewardBatch, RewardOutput, RewardSource

T = TypeVar("T")
Asked = Sequence[tuple[Sequence[int], Future[T]]]
"""Groups of answers that a source was asked about, by their rows in the batch, with a future of the result of each."""


@runtime_checkable
class Begun(Protocol):
    """A batch that a source is being asked about."""

    def finished(self, rows: Sequence[int]) -> None:
        """Reports that these answers of the batch are finished; called once per answer."""
        ...

    def output(self) -> RewardOutput:
        """Returns and raises what ``score`` does; every answer must be finished."""
        ...

    def give_up(self) -> None:
        """Cancels pending requests: no scores are needed any more."""
        ...


@runtime_checkable
class EarlySource(Protocol):
    """A source that does not have to wait for the whole batch."""

    def begin(self, batch: RewardBatch) -> Begun:
        """Asks about the answers of a batch as they finish.

        Args:
            batch: the batch; an answer's entries are valid once it is reported as finished.
        """
        ...


def begun(source: RewardSource, batch: RewardBatch) -> Begun:
    """Begins to score a batch: early if the source supports it, otherwise all at once."""
    return source.begin(batch) if isinstance(source, EarlySource) else AtOnce(source, batch)


def whole(asked: Begun, batch: RewardBatch) -> RewardOutput:
    """The scores of a batch whose answers are all finished."""
    asked.finished(range(len(batch)))
    return asked.output()


class AtOnce:
    """A batch that is scored at once when all answers are finished."""

    def __init__(self, source: RewardSource, batch: RewardBatch) -> None:
        self._source, self._batch = source, batch

    def finished(self, rows: Sequence[int]) -> None:
        """Waits for the others."""

    def output(self) -> RewardOutput:
        """The source's scores."""
        return checked_output(self._source.score(self._batch))

    def give_up(self) -> None:
        """Nothing is pending."""


class InGroups:
    """A batch that a source is asked about in groups of answers, each as soon as it is full.

    After a failure nothing more is asked; the failure is raised when the scores are requested.

    Args:
        size: number of answers in a group.
        ask: starts to ask about the answers in these rows.
        join: makes the scores of the batch from the results of its groups, whose rows are ascending.
        close: frees the resources of the requests.
    """

    def __init__(
        self,
        size: int,
        ask: Callable[[Sequence[int]], Future[Any]],
        join: Callable[[Asked[Any]], RewardOutput],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._size, self._ask, self._join, self._close = size, ask, join, close
        self._waiting: list[int] = []
        self._asked: list[tuple[Sequence[int], Future[Any]]] = []

    def finished(self, rows: Sequence[int]) -> None:
        """Asks about the groups that these answers fill."""
        self._waiting += rows
        while len(self._waiting) >= self._size:
            self._ask_next()

    def output(self) -> RewardOutput:
        """Asks about the rest and waits for all; raises the first failure and gives up the other requests."""
        try:
            while self._waiting:
                self._ask_next()
            wait([future for _, future in self._asked], return_when=FIRST_EXCEPTION)
            return self._join(sorted(self._asked, key=lambda asked: not _has_failed(asked[1])))
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Gives up every pending request."""
        for _, future in self._asked:
            future.cancel()
        self._close()

    def _ask_next(self) -> None:
        rows, self._waiting = sorted(self._waiting[: self._size]), self._waiting[self._size :]
        if not any(_has_failed(future) for _, future in self._asked):
            self._asked.append((rows, self._ask(rows)))


def joined(
    groups: Sequence[tuple[Sequence[int], RewardOutput]], batch: RewardBatch, source: str = "a reward source"
) -> RewardOutput:
    """The results for groups of answers as one output, in the order of the batch.

    Args:
        source: the source's name in messages.

    Raises:
        RewardResponseError: not all groups have the same components.
    """
    by_row = {row: (output, i) for rows, output in groups for i, row in enumerate(rows)}
    ordered = [by_row[row] for row in range(len(batch))]
    names = groups[0][1].components
    for rows, output in groups:
        if output.components.keys() != names.keys():
            raise RewardResponseError(
                f"{source} returned the components {', '.join(output.components) or 'none'} for {named(sorted(rows))} "
                f"and {', '.join(names) or 'none'} for {named(sorted(groups[0][0]))}; wanted the same for all"
            )
    tokens = None
    if any(output.token_scores is not None for _, output in groups):
        of_row = {
            row: scores
            for rows, output in groups
            for row, scores in zip(rows, on_tokens(output, batch, rows), strict=True)
        }
        tokens = [of_row[row] for row in range(len(batch))]
    components = {name: [output.components[name][i] for output, i in ordered] for name in names}
    return RewardOutput([output.scores[i] for output, i in ordered], components, tokens)


def named(rows: Sequence[int]) -> str:
    """The name of answers in messages, by their ascending rows."""
    is_run = len(rows) == rows[-1] - rows[0] + 1
    return f"answers {rows[0]} to {rows[-1]}" if is_run else f"answers {', '.join(map(str, rows))}"


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None
