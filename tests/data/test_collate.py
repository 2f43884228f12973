"""Padding, masks and positions against values written by hand."""

import itertools
from dataclasses import replace

import pytest
import torch

from tether.data.collate import collate, pad_around, pad_left, pad_right, plan_micro_batches


def test_collate_by_hand():
    batch = collate([[5], [6, 7, 8]], [[9, 2], [4]], rows=[3, 1])
    assert batch.rows == (3, 1)
    assert batch.token_ids.tolist() == [[5, 9, 2, 0], [6, 7, 8, 4]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.response_mask.tolist() == [[True, True], [True, False]]
    assert batch.response_columns.int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]
    assert batch.lengths.tolist() == [2, 1] and batch.num_response_tokens == 3
    for same in (batch, batch.to("cpu")):
        assert same.response_index.tolist() == [1, 2, 7] and same.response_places.tolist() == [0, 1, 2]
        assert same.sampled_columns.tolist() == [0, 1, 2] and not same.has_padding_before


def test_another_micro_batch_has_indices_of_its_own():
    batch = collate([[5], [6, 7, 8]], [[9, 2], [4]]).to("cpu")
    names = ("token_ids", "attention_mask", "position_ids", "response_mask")
    second = replace(batch, rows=(1,), **{name: getattr(batch, name)[1:] for name in names})
    assert second.response_index.tolist() == [3] and second.response_places.tolist() == [0]
    assert second.sampled_columns.tolist() == [2]
    padded = replace(batch, attention_mask=batch.attention_mask.roll(1, dims=1))
    assert padded.has_padding_before and not batch.has_padding_before


def test_masks_come_from_lengths_not_from_ids():
    padding_id = 0
    batch = collate([[padding_id, padding_id]], [[7, padding_id]])
    assert batch.attention_mask.all() and batch.response_mask.tolist() == [[True, True]]
    assert batch.rows == (0,)


@pytest.mark.parametrize(
    ("queries", "responses"), [([[1]], []), ([], []), ([[1], []], [[1], [1]]), ([[1]], [[]]), ([[1]], [[2], [3]])]
)
def test_collate_refuses_what_only_a_bug_can_give_it(queries, responses):
    with pytest.raises(AssertionError):
        collate(queries, responses)


def test_pad_right_by_hand():
    ids, mask, positions = pad_right([(7, 8, 9), [4]])
    assert ids.tolist() == [[7, 8, 9], [4, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert positions.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_pad_left_by_hand():
    ids, mask, positions = pad_left([(7, 8, 9), [4]])
    assert ids.tolist() == [[7, 8, 9], [0, 0, 4]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert ids.dtype == positions.dtype == torch.long


def test_pad_around_by_hand():
    ids, mask, positions = pad_around([[5], [6, 7, 8]], [[9, 2], [4]])
    assert ids.tolist() == [[0, 0, 5, 9, 2], [6, 7, 8, 4, 0]]
    assert mask.int().tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("rows", "size"), list(itertools.product([1, 7, 8, 64], [1, 4, 8, 64])))
def test_plan_holds_every_row_once_in_full_groups(rows, size):
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(2, 100, (rows,), generator=generator).tolist()
    plan = plan_micro_batches(lengths, size)
    assert sorted(row for group in plan for row in group) == list(range(rows))
    assert {len(group) for group in plan[:-1]} <= {size}
    assert len(plan[-1]) == (rows % size or size)
    assert plan == plan_micro_batches(lengths, size)


@pytest.mark.parametrize(
    ("size", "max_tokens", "num_parts", "plan"),
    [
        (8, 10, 1, [(2,), (0, 1), (3,)]),  # 1 · 10, 2 · 5: just as many as there may be, 1 · 3
        (8, 9, 1, [(2,), (0,), (1, 3)]),  # a row may have more by itself
        (8, 4, 1, [(2,), (0,), (1,), (3,)]),
        (2, 100, 1, [(2, 0), (1, 3)]),
        (8, 10, 2, [(2, 0), (1, 3)]),  # a part has 1 · 10, and would have 2 · 10 of three rows
        (8, None, 1, [(2, 0, 1, 3)]),  # the longest first
    ],
)
def test_plan_keeps_to_size_and_budget_by_hand(size, max_tokens, num_parts, plan):
    assert plan_micro_batches([5, 4, 10, 3], size, max_tokens, num_parts) == plan


def test_plan_pads_less_than_the_order_of_the_rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 454, (64,), generator=generator).tolist()

    def padded(plan):
        return sum(len(group) * max(lengths[i] for i in group) for group in plan)

    in_order = [tuple(range(start, start + 8)) for start in range(0, 64, 8)]
    assert sum(lengths) < padded(plan_micro_batches(lengths, 8)) < 1.1 * sum(lengths) < 0.8 * padded(in_order)
