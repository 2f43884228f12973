"""Runs passes that do not fit into memory in parts."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import torch

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def in_fitting_parts(
    batches: Iterable[Sequence[int]], run: Callable[[Sequence[int]], Result], what: str
) -> Iterator[tuple[Sequence[int], Result]]:
    """Yields (rows, result of ``run``) for every batch; a batch that does not fit into memory is split in half.

    Args:
        run: a pass whose results for a row do not depend on the other rows of its batch.
        what: name of the pass in the log, which reports each size that did not fit once.

    Raises:
        torch.OutOfMemoryError: a single row does not fit.
    """
    waiting = deque(batches)
    while waiting:
        rows = waiting.popleft()
        try:
            result = run(rows)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
            _tell(what, len(rows))
        else:
            yield rows, result
            continue
        middle = (len(rows) + 1) // 2
        waiting.extendleft((rows[middle:], rows[:middle]))


@lru_cache
def _tell(what: str, count: int) -> None:
    logger.warning("out of memory in %s of %d answers at a time: retrying in halves", what, count)
