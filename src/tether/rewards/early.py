"""Reward sources that wait for somebody else are asked about answers while others are still being written.

Any source scores a whole batch. One that can be asked earlier has ``begin`` as well: it is told of answers as they are
there, and says in the end what ``score`` would have said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol, TypeVar, runtime_checkable

from tether.errors import RewardResponseError
from tether.rewards.tokens import on_tokens
from tether.types import RewardBatch, RewardOutput, RewardSource

T = TypeVar("T")
Asked = Sequence[tuple[Sequence[int], Future[T]]]
"""Groups of answers that a source was asked about, by their rows in the batch, and what will be said of each."""


@runtime_checkable
class Begun(Protocol):
    """A batch that a source is being asked about."""

    def finished(self, rows: Sequence[int]) -> None:
        """Tells that these answers of the batch are there; each is told of once."""
        ...

    def output(self) -> RewardOutput:
        """What ``score`` gives and raises; every answer is there."""
        ...

    def give_up(self) -> None:
        """Ends what is under way: no scores are wanted any more."""
        ...


@runtime_checkable
class EarlySource(Protocol):
    """A source that need not wait for the whole batch."""

    def begin(self, batch: RewardBatch) -> Begun:
        """Asks about the answers of a batch as they come.

        Args:
            batch: an answer's entries are right from when it is told of as finished.
        """
        ...


def begun(source: RewardSource, batch: RewardBatch) -> Begun:
    """The batch as the source is asked about it: early where it can be, otherwise all at once."""
    return source.begin(batch) if isinstance(source, EarlySource) else AtOnce(source, batch)


def whole(asked: Begun, batch: RewardBatch) -> RewardOutput:
    """The scores of a batch whose answers are all there."""
    asked.finished(range(len(batch)))
    return asked.output()


class AtOnce:
    """A batch that its source is asked about when all answers are there."""

    def __init__(self, source: RewardSource, batch: RewardBatch) -> None:
        self._source, self._batch = source, batch

    def finished(self, rows: Sequence[int]) -> None:
        """Waits for the others."""

    def output(self) -> RewardOutput:
        """The source's scores."""
        return self._source.score(self._batch)

    def give_up(self) -> None:
        """Nothing is under way."""


class InGroups:
    """A batch that a source is asked about in groups of answers, each as soon as it is full.

    After a failure nothing more is asked; it is raised when the scores are wanted.

    Args:
        size: answers of a group.
        ask: starts to ask about the answers in these rows.
        join: makes the scores of the batch of what was said of its groups, whose rows rise within each.
        close: frees what the questions needed.
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
        """Asks about the rest and waits for all; the first failure is raised and the other questions given up."""
        try:
            while self._waiting:
                self._ask_next()
            wait([future for _, future in self._asked], return_when=FIRST_EXCEPTION)
            return self._join(sorted(self._asked, key=lambda asked: not _has_failed(asked[1])))
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Gives up every question that has no answer yet."""
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
    """What was said of groups of answers as one output, in the order of the batch.

    Args:
        source: how messages name who said it.

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
    """How messages name answers by their rows, which rise."""
    is_run = len(rows) == rows[-1] - rows[0] + 1
    return f"answers {rows[0]} to {rows[-1]}" if is_run else f"answers {', '.join(map(str, rows))}"


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None
