"""What every reward source needs: the check of its scores, and scoring token sequences in batches."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tether.config.keys import counted
from tether.data.collate import pad_right, plan_micro_batches
from tether.errors import ConfigError, RewardResponseError
from tether.models.memory import in_fitting_parts
from tether.models.roles import Host, directly
from tether.types import RewardBatch, RewardOutput

ScoreBatch = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(ids [M T], mask [M T], position_ids [M T]) → scores [M]."""


LARGEST = 1e15
"""Largest magnitude of a score: beyond it the value loss, a square, approaches the limit of float32."""


class NotAScore(RewardResponseError):
    """What a source returned has not the form of scores, whatever the answers."""


@runtime_checkable
class InForwards(Protocol):
    """A source that scores by forwards of a model: ``score`` in two steps, of which the second alone needs weights."""

    def read(self, batch: RewardBatch) -> Any:
        """What the model reads for each answer, as input of ``scored``; raises if it cannot read something."""
        ...

    def scored(self, read: Any) -> RewardOutput:
        """Scores of what was read; the number of forwards depends only on the number of answers."""
        ...


def check_source(source: Any) -> None:
    """Raises ``ConfigError`` if a caller's own ``rewards`` is no object that can score answers."""
    is_one = callable(getattr(source, "score", None)) and not isinstance(source, type | nn.Module)
    if not is_one:
        got = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
        raise ConfigError(
            f"rewards: got {got}, wanted an object with a method score(batch) that returns a tether.RewardOutput. A "
            "function f(prompts, completions) is named in the configuration (rewards, type: function), and so is a "
            "reward model (type: model)"
        )


def checked_output(output: Any) -> RewardOutput:
    """What a caller's own source returned.

    Raises:
        RewardResponseError: it is no ``RewardOutput``.
    """
    if not isinstance(output, RewardOutput):
        raise RewardResponseError(
            f"the rewards returned {shown(output)}; wanted a tether.RewardOutput: RewardOutput(scores) with one number "
            "per answer"
        )
    return output


def checked(scores: Any, n: int, source: str) -> list[float]:
    """The scores as ``n`` finite floats, in their order.

    Booleans, integers, NumPy numbers and zero-dimensional tensors count as numbers; a one-dimensional array or tensor
    counts as a list.

    Args:
        scores: what a source returned, of any type.
        source: the source's name in messages.

    Raises:
        RewardResponseError: it is not a list, has the wrong length, or holds something other than finite numbers of
            usable magnitude; a missing score is never taken for 0. ``NotAScore`` if no answer can cause that.
    """
    values = listed(scores)
    if values is None:  # a single number may be what is left of a list of one
        is_single = isinstance(scores, numbers.Real) or getattr(scores, "ndim", None) == 0
        kind = RewardResponseError if is_single and n == 1 else NotAScore
        raise kind(f"{source} returned {shown(scores)}; wanted a list of {n} numbers, one per answer")
    if len(values) != n:
        got = f"{counted(len(values), 'score')} for {counted(n, 'answer')}"
        raise (NotAScore if n > 1 else RewardResponseError)(f"{source} returned {got}; wanted one per answer")
    return [finite_number(value, answer_of(row, n), source) for row, value in enumerate(values)]


def score_sequences(
    sequences: Sequence[Sequence[int]],
    score_batch: ScoreBatch,
    *,
    batch_size: int,
    device: torch.device | str,
    through: Host = directly,
) -> list[float]:
    """Scores of token sequences in their order, computed in batches of similar lengths.

    Args:
        sequences: token ids without padding, at least one in each.
        score_batch: scores one right-padded batch on ``device``.
        through: runs each batch.
    """

    def run(rows: Sequence[int]) -> list[float]:
        ids, mask, position_ids = (tensor.to(device) for tensor in pad_right([sequences[row] for row in rows]))
        return score_batch(ids, mask, position_ids).tolist()

    return scores_in_batches([len(ids) for ids in sequences], run, batch_size=batch_size, through=through)


@torch.no_grad()
def scores_in_batches(
    lengths: Sequence[int],
    run: Callable[[Sequence[int]], list[float]],
    *,
    batch_size: int,
    through: Host = directly,
) -> list[float]:
    """Scores in the order of the rows, computed in batches of similar lengths; a batch that does not fit into memory is
    halved.

    Args:
        lengths: number of tokens in each row.
        run: returns the scores of some rows, in one forward.
        through: runs each batch.
    """
    scores = [math.nan] * len(lengths)
    plan = plan_micro_batches(lengths, batch_size)
    for rows, found in in_fitting_parts(plan, lambda rows: through(lambda: run(rows)), "scoring"):
        for row, score in zip(rows, found, strict=True):
            scores[row] = score
    return scores


def listed(scores: Any) -> list[Any] | None:
    """``scores`` as a list, or None if it is not a series of values."""
    if isinstance(scores, str | bytes | Mapping | Set):
        return None
    try:
        values = scores.tolist() if hasattr(scores, "tolist") else scores
    except RuntimeError:  # a sparse tensor, or one without numbers
        return None
    return list(values) if isinstance(values, Iterable) else None


def finite_number(value: Any, what: str, source: str) -> float:
    """``value`` as a finite float.

    Args:
        what: name in messages of what it scores.
        source: name in messages of who returned it.

    Raises:
        RewardResponseError: it is not a number, not finite, or larger than ``LARGEST``.
    """
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(plain, numbers.Real):
        try:
            number = float(plain)
        except OverflowError:
            number = math.inf
        if abs(number) <= LARGEST:
            return number
        if math.isfinite(number):
            raise RewardResponseError(
                f"{source} returned {number:g} for {what}; wanted a number between -{LARGEST:g} and {LARGEST:g}, "
                "as its square must fit into float32"
            )
    kind = RewardResponseError if value is None or isinstance(plain, numbers.Real) else NotAScore
    raise kind(f"{source} returned {shown(value)} for {what}; wanted one finite number")


def answer_of(row: int, n: int) -> str:
    """The name of an answer in messages."""
    return f"answer {row} of {n} (counted from 0)"


def shown(value: Any) -> str:
    """The value and its type, short enough for a message."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
