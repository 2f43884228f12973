"""The only padding code: token lists are turned into tensors here and nowhere else.

Padding is id 0 whatever the tokenizer's pad token is, because masks come from lengths and padding is never attended to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.types import MicroBatch


def collate(
    queries: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], rows: Sequence[int] | None = None
) -> MicroBatch:
    """Rollouts as one padded micro-batch: at most T tokens in a query with its response, and R in a response.

    There is no padding before or between them, so that causal attention needs no mask: no token sees what follows it.

    Args:
        queries: M queries as token ids, none empty.
        responses: M responses as token ids, the end token included, none empty.
        rows: positions of these rollouts in the rollout batch. Default: 0 … M − 1.
    """
    rows = tuple(range(len(queries))) if rows is None else tuple(rows)
    assert len(queries) == len(responses) == len(rows) > 0, (len(queries), len(responses), len(rows))
    assert all(len(ids) > 0 for ids in (*queries, *responses)), "an empty query or response"
    token_ids, attention_mask = _padded([(0, [*q, *r]) for q, r in zip(queries, responses, strict=True)])
    _, response_mask = _padded([(0, response) for response in responses])
    return MicroBatch(
        rows=rows,
        token_ids=token_ids,
        attention_mask=attention_mask,
        position_ids=_positions(attention_mask),
        response_mask=response_mask,
    )


def pad_left(
    sequences: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, "M P"], Bool[Tensor, "M P"], Int[Tensor, "M P"]]:
    """Token ids padded on the left, the mask of real tokens, and each real token's position in its own row, from 0."""
    width = max(map(len, sequences), default=0)
    return _placed([(width - len(ids), ids) for ids in sequences])


def pad_around(
    queries: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> tuple[Int[Tensor, "M T"], Bool[Tensor, "M T"], Int[Tensor, "M T"]]:
    """Queries padded on the left and their responses on the right, so that all responses begin in one column; with the
    mask of real tokens and each one's position in its own row, from 0."""
    width = max(map(len, queries), default=0)
    return _placed([(width - len(q), [*q, *r]) for q, r in zip(queries, responses, strict=True)])


def pad_right(
    sequences: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, "M T"], Bool[Tensor, "M T"], Int[Tensor, "M T"]]:
    """Token ids padded on the right, the mask of real tokens, and the position in each column."""
    return _placed([(0, ids) for ids in sequences])


def pad_numbers(
    rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B R"]:
    """One number per response token, and 0 after the last."""
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=dtype)


def plan_micro_batches(
    lengths: Sequence[int], size: int, max_tokens: int | None = None, num_parts: int = 1
) -> list[tuple[int, ...]]:
    """Groups of at most ``size`` rows of similar length, every row in one group.

    Rows are sorted by length, longest first, to minimize padding and so that memory peaks in the first group. Without
    ``max_tokens``, only the last group may be smaller than ``size``. Depends only on the arguments.

    Args:
        lengths: number of tokens in each row, query and response.
        max_tokens: maximum number of tokens in a part of a group, padding included; a longer row forms a part by
            itself.
        num_parts: number of parts that the rows of each group will be dealt out to.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        num_rows = len(groups[-1]) + 1 if groups else 1
        tokens = -(-num_rows // num_parts) * lengths[groups[-1][0] if groups else row]
        is_full = num_rows > size or (max_tokens is not None and tokens > max_tokens)
        if is_full or not groups:
            groups.append([])
        groups[-1].append(row)
    return [tuple(group) for group in groups]


def _placed(
    spans: Sequence[tuple[int, Sequence[int]]],
) -> tuple[Int[Tensor, "M T"], Bool[Tensor, "M T"], Int[Tensor, "M T"]]:
    """``_padded`` rows and their positions."""
    assert all(len(ids) > 0 for _, ids in spans) and len(spans) > 0, "nothing to pad, or an empty sequence"
    token_ids, mask = _padded(spans)
    return token_ids, mask, _positions(mask)


def _padded(spans: Sequence[tuple[int, Sequence[int]]]) -> tuple[Int[Tensor, "M T"], Bool[Tensor, "M T"]]:
    """Ids and mask of rows given as (left padding, token ids), as wide as the longest row."""
    width = max(start + len(ids) for start, ids in spans)
    token_ids = torch.zeros(len(spans), width, dtype=torch.long)
    mask = torch.zeros(len(spans), width, dtype=torch.bool)
    for row, (start, ids) in enumerate(spans):
        token_ids[row, start : start + len(ids)] = torch.tensor(ids, dtype=torch.long)
        mask[row, start : start + len(ids)] = True
    return token_ids, mask


def _positions(mask: Bool[Tensor, "M T"]) -> Int[Tensor, "M T"]:
    """Columns counted from 0 at each row's first real token; 0 on the padding before it."""
    first = mask.long().argmax(dim=1, keepdim=True)
    return (torch.arange(mask.shape[1]) - first).clamp(min=0)
