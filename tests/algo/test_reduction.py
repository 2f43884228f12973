"""Reductions against loops over answers, and that no split into micro-batches changes the loss of a step."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algo.ragged import Answers, answers, column, examples, padded
from tether.algo import LossReduction, length_mask, normaliser, reduced

REDUCTIONS = get_args(LossReduction)
MAX_LENGTH = 7


def oracle(rows: Answers, how: str) -> float:
    """The loss of a step whose answers are ``rows``; an empty answer does not take part."""
    losses = [row for row in column(rows, 0) if row]
    tokens = [loss for row in losses for loss in row]
    match how:
        case "token_mean":
            return math.fsum(tokens) / len(tokens)
        case "sequence_mean":
            return math.fsum(math.fsum(row) / len(row) for row in losses) / len(losses)
        case "fixed_length":
            return math.fsum(tokens) / (MAX_LENGTH * len(losses))


def step_loss(parts: list[tuple[torch.Tensor, torch.Tensor]], how: str) -> torch.Tensor:
    count = sum(normaliser(mask, how=how, max_length=MAX_LENGTH) for _, mask in parts)
    return sum(reduced(losses, mask, how=how) for losses, mask in parts) / count


@pytest.mark.parametrize("how", REDUCTIONS)
@examples
@given(rows=answers(1, min_length=0).filter(any))
def test_reduction_by_its_definition(how, rows):
    assert step_loss([padded(rows)], how).item() == pytest.approx(oracle(rows, how), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("how", REDUCTIONS)
@examples
@given(rows=answers(1, min_answers=2, max_answers=6, min_length=0).filter(any), data=st.data())
def test_any_split_into_micro_batches_gives_the_same_loss(how, rows, data):
    cuts = data.draw(st.lists(st.integers(1, len(rows) - 1), max_size=3, unique=True).map(sorted))
    parts = [padded(rows[start:end]) for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    assert step_loss(parts, how).item() == pytest.approx(oracle(rows, how), rel=1e-6, abs=1e-9)


def test_by_hand():
    losses = torch.tensor([[1.0, 2.0, math.nan, math.nan], [3.0, 4.0, 5.0, 12.0], [math.nan] * 4], dtype=torch.float64)
    mask = length_mask(torch.tensor([2, 4, 0]), 4)
    numerators = {how: reduced(losses, mask, how=how).item() for how in REDUCTIONS}
    assert numerators == {"token_mean": 27.0, "sequence_mean": 7.5, "fixed_length": 27.0}
    denominators = {how: normaliser(mask, how=how, max_length=10).item() for how in REDUCTIONS}
    assert denominators == {"token_mean": 6.0, "sequence_mean": 2.0, "fixed_length": 20.0}


@pytest.mark.parametrize(
    ("how", "short", "long"),
    [("token_mean", 1 / 10, 1 / 10), ("sequence_mean", 1 / 4, 1 / 16), ("fixed_length", 1 / 14, 1 / 14)],
)
def test_weight_of_a_token_in_an_answer_of_2_and_in_one_of_8(how, short, long):
    losses, mask = torch.ones(2, 9, dtype=torch.float64, requires_grad=True), length_mask(torch.tensor([2, 8]), 9)
    step_loss([(losses, mask)], how).backward()
    wanted = torch.tensor([[short] * 2 + [0.0] * 7, [long] * 8 + [0.0]], dtype=torch.float64)
    assert torch.allclose(losses.grad, wanted, atol=1e-15, rtol=1e-7)


def test_the_three_agree_where_every_answer_has_the_fixed_length():
    losses = torch.randn(4, MAX_LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(4, MAX_LENGTH, dtype=torch.bool)
    first, *others = (step_loss([(losses, mask)], how).item() for how in REDUCTIONS)
    assert others == pytest.approx([first, first], rel=1e-6)


def test_a_mean_of_means_is_another_loss():
    parts = [padded([[(1.0,)]]), padded([[(2.0,), (2.0,), (2.0,)]])]
    naive = sum(step_loss([part], "token_mean").item() for part in parts) / 2
    assert naive == 1.5
    assert step_loss(parts, "token_mean").item() == 7 / 4


@pytest.mark.parametrize("how", REDUCTIONS)
def test_a_micro_batch_of_which_nothing_takes_part_adds_nothing(how):
    losses, mask = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    part = reduced(losses, mask, how=how)
    part.backward()
    assert part.item() == normaliser(mask, how=how, max_length=MAX_LENGTH).item() == 0.0
    assert torch.equal(losses.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("filler", [math.nan, math.inf, 1e6])
def test_fifty_more_pads_of_anything_change_nothing(how, filler):
    clean, mask = padded([[(1.5,), (-2.0,)], [(0.3,)]], filler=0.0)
    dirty = torch.nn.functional.pad(clean.where(mask, filler), (0, 50), value=filler).requires_grad_()
    wider = torch.nn.functional.pad(mask, (0, 50))
    clean.requires_grad_()
    losses = step_loss([(clean, mask)], how), step_loss([(dirty, wider)], how)
    assert torch.equal(*losses)
    sum(losses).backward()
    assert torch.equal(dirty.grad, torch.nn.functional.pad(clean.grad, (0, 50)))


@pytest.mark.parametrize("how", REDUCTIONS)
def test_half_precision_is_summed_in_float32(how):
    losses, mask = torch.full((1, 1000), 1.01).bfloat16(), torch.ones(1, 1000, dtype=torch.bool)
    part = reduced(losses, mask, how=how)
    assert part.dtype == normaliser(mask, how=how, max_length=1000).dtype == torch.float32
    wanted = losses[0, 0].item() * (1 if how == "sequence_mean" else 1000)
    assert part.item() == pytest.approx(wanted, rel=1e-5)
