"""Scores of parts of an answer, one per token or per step, and the token that each of them falls on."""

from __future__ import annotations

import math
import numbers
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from tether.errors import RewardResponseError
from tether.rewards.base import answer_of, checked, finite_number, listed, shown
from tether.types import RewardBatch, RewardOutput


def judged(
    scores: Any, batch: RewardBatch, source: str, *, by_token: bool, rows: Sequence[int] | None = None
) -> RewardOutput:
    """What a source returned, checked: for each answer one number, or the scores of its parts.

    A list of ``[end, score]`` pairs scores an answer's steps: ``end`` counts the characters of the answer up to the end
    of the step, and the score falls on the token that completes them; on the answer's last token if the step ends with
    the answer, as a score of the whole would. A list of numbers scores its tokens.

    Args:
        source: the source's name in messages.
        by_token: whether a list of numbers is accepted, one for each of an answer's tokens.
        rows: answers of the batch that were asked about; all if None.

    Raises:
        RewardResponseError: it is not a list with one finite number for each answer, or for each part of it.
    """
    rows = range(len(batch)) if rows is None else rows
    values = listed(scores)
    if values is None or len(values) != len(rows):
        return RewardOutput(checked(scores if values is None else values, len(rows), source))
    parts = [listed(value) for value in values]
    if all(part is None for part in parts):
        return RewardOutput(checked(values, len(rows), source))
    totals, token_scores = [], []
    for i, (row, value, part) in enumerate(zip(rows, values, parts, strict=True)):
        if part is None:
            tokens = [0.0] * (num_tokens(batch, row) - 1) + [finite_number(value, answer_of(i, len(rows)), source)]
        else:
            tokens = _on_tokens(part, batch, row, answer_of(i, len(rows)), source, by_token=by_token)
        token_scores.append(tokens)
        totals.append(math.fsum(tokens))
    return RewardOutput(checked(totals, len(rows), source), token_scores=token_scores)


def num_tokens(batch: RewardBatch, row: int) -> int:
    """Number of tokens in an answer, at least one; its number of characters if no tokenizer is known."""
    return max(len(batch.responses[row] if batch.decode is None else batch.response_ids[row]), 1)


def on_tokens(output: RewardOutput, batch: RewardBatch, rows: Sequence[int] | None = None) -> list[list[float]]:
    """One number per token of every answer, even if all of its score falls on the last.

    Args:
        rows: answers of the batch that the output is about; all if None.
    """
    if output.token_scores is not None:
        return output.token_scores
    rows = range(len(batch)) if rows is None else rows
    return [[0.0] * (num_tokens(batch, row) - 1) + [score] for row, score in zip(rows, output.scores, strict=True)]


def steps(output: RewardOutput, batch: RewardBatch) -> list[float | list[list[float]]]:
    """The scores as ``judged`` reads them without knowing tokens: numbers, and pairs of answers scored in parts.

    What falls on a token that ends with the answer's text falls on the answer's last token when it is read again.
    """
    if output.token_scores is None:
        return list(output.scores)
    told: list[float | list[list[float]]] = []
    for row, (score, tokens) in enumerate(zip(output.scores, output.token_scores, strict=True)):
        if not any(tokens[:-1]):
            told.append(score)
            continue
        by_end: dict[int, float] = {}
        for token, value in enumerate(tokens):
            if value:
                end = _end(batch, row, token)
                by_end[end] = by_end.get(end, 0.0) + value
        told.append([[end, by_end[end]] for end in sorted(by_end)])
    return told


def with_rest(early: Sequence[float], total: float) -> list[float]:
    """Scores of all tokens but the last, and on the last the rest of the total."""
    return [*early, total - math.fsum(early)]


def check_token_scores(output: RewardOutput, lengths: Sequence[int], source: str) -> None:
    """Raises ``RewardResponseError`` unless token scores, if any, are finite and one for each token.

    Args:
        lengths: number of tokens in each answer.
    """
    if output.token_scores is None:
        return
    if [len(row) for row in output.token_scores] != list(lengths):
        got = [len(row) for row in output.token_scores]
        raise RewardResponseError(
            f"{source} returned token_scores of the lengths {shown(got)} for answers of {shown(list(lengths))} tokens"
        )
    for i, row in enumerate(output.token_scores):
        for token, value in enumerate(row):
            finite_number(value, f"token {token} of {answer_of(i, len(lengths))}", source)


def _on_tokens(
    part: Sequence[Any], batch: RewardBatch, row: int, answer: str, source: str, *, by_token: bool
) -> list[float]:
    """One number per token of an answer, from the list that a source returned for it."""
    count, length = num_tokens(batch, row), len(batch.responses[row])
    pairs = [listed(entry) for entry in part]
    if by_token and len(part) == count and all(pair is None for pair in pairs):
        return [finite_number(entry, f"token {token} of {answer}", source) for token, entry in enumerate(part)]
    tokens, last = [0.0] * count, 0
    for step, pair in enumerate(pairs):
        if pair is None or len(pair) != 2 or not _is_end(pair[0], last, length):
            break
        last = int(pair[0])
        tokens[_token(batch, row, last)] += finite_number(pair[1], f"step {step} of {answer}", source)
    else:
        if part:
            return tokens
    each = f"one for each of its {count} tokens, " if by_token else ""
    raise RewardResponseError(
        f"{source} returned {shown(part)} for {answer}; wanted one finite number, {each}or "
        f"[end, score] for each of its steps, the ends rising to at most {length}, the answer's characters"
    )


def _is_end(end: Any, last: int, length: int) -> bool:
    """Whether ``end`` is a number of characters at which a step can end that begins after ``last`` characters."""
    if isinstance(end, bool) or not isinstance(end, numbers.Integral):
        return False
    return last < end <= length or end == length == 0


def _token(batch: RewardBatch, row: int, end: int) -> int:
    """The token that completes the first ``end`` characters of an answer; the last token if that is all of it."""
    text, final = batch.responses[row], num_tokens(batch, row) - 1
    if end == len(text):
        return final
    if batch.decode is None:
        return end - 1
    return bisect_left(range(final), True, key=lambda token: batch.text_of(row, token + 1).startswith(text[:end]))


def _end(batch: RewardBatch, row: int, token: int) -> int:
    """Number of characters of an answer up to the end of a token."""
    length = len(batch.responses[row])
    if token == num_tokens(batch, row) - 1:
        return length
    if batch.decode is None:
        return token + 1
    return min(max(len(batch.text_of(row, token + 1)), 1), length)
