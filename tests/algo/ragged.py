"""Answers of unequal length, as rows of plain floats for the oracles and as padded tensors for what they judge."""

from __future__ import annotations

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

examples = settings(max_examples=50, deadline=None, derandomize=True)
"""How many cases hypothesis tries, the same ones every time."""

Answers = list[list[tuple[float, ...]]]
"""One list an answer, one tuple a token."""


def answers(columns: int, *, min_answers: int = 1, max_answers: int = 4, min_length: int = 1) -> st.SearchStrategy:
    """Answers of at most five tokens, each with ``columns`` numbers."""
    token = st.tuples(*[st.floats(-3, 3, allow_subnormal=False)] * columns)
    return st.lists(st.lists(token, min_size=min_length, max_size=5), min_size=min_answers, max_size=max_answers)


def padded(rows: Answers, *, filler: float = math.nan) -> tuple[torch.Tensor, ...]:
    """A float64 tensor for each column, at least two entries of ``filler`` behind each answer, and the mask.

    Answers without a single token are taken for answers of one column.
    """
    columns, width = max((len(token) for row in rows for token in row), default=1), max(map(len, rows)) + 2
    tensors = [torch.full((len(rows), width), filler, dtype=torch.float64) for _ in range(columns)]
    for b, row in enumerate(rows):
        for t, token in enumerate(row):
            for tensor, number in zip(tensors, token, strict=True):
                tensor[b, t] = number
    lengths = torch.tensor([len(row) for row in rows])
    return *tensors, torch.arange(width) < lengths[:, None]


def column(rows: Answers, index: int) -> list[list[float]]:
    return [[token[index] for token in row] for row in rows]


def on_tokens(x: torch.Tensor, rows: Answers) -> list[list[float]]:
    """The numbers of ``x`` that belong to tokens."""
    return [x[b, : len(row)].tolist() for b, row in enumerate(rows)]


def unpadded(x: torch.Tensor, rows: Answers) -> list[list[float]]:
    """The same; those that belong to none must be exactly 0."""
    for b, row in enumerate(rows):
        assert x[b, len(row) :].tolist() == [0.0] * (x.shape[1] - len(row))
    return on_tokens(x, rows)


def same(got: list[list[float]], wanted: list[list[float]], tolerance: float = 1e-12) -> bool:
    return [len(row) for row in got] == [len(row) for row in wanted] and all(
        math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
        for row, other in zip(got, wanted, strict=True)
        for a, b in zip(row, other, strict=True)
    )
