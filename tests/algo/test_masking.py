"""Masked reductions and whitening against plain Python, and against what padding must not do."""

import math
import statistics

import pytest
import torch
from hypothesis import given

from tests.algo.ragged import answers, column, examples, padded, same, unpadded
from tether.algo import length_mask, masked_mean, masked_sum, masked_var, whiten
from tether.algo.masking import wide

NAN = math.nan
X = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False]])


@examples
@given(answers(1))
def test_reductions_by_their_definitions(rows):
    x, mask = padded(rows)
    numbers = [number for row in column(rows, 0) for number in row]
    assert masked_sum(x, mask).item() == pytest.approx(math.fsum(numbers), abs=1e-12)
    assert masked_sum(x, mask, dim=1).tolist() == pytest.approx([math.fsum(r) for r in column(rows, 0)], abs=1e-12)
    assert masked_mean(x, mask).item() == pytest.approx(statistics.fmean(numbers), abs=1e-12)
    assert masked_var(x, mask).item() == pytest.approx(statistics.pvariance(numbers), abs=1e-12)


@examples
@given(answers(1))
def test_whitening_by_its_definition(rows):
    x, mask = padded(rows)
    numbers = [number for row in column(rows, 0) for number in row]
    mean, std = statistics.fmean(numbers), math.sqrt(statistics.pvariance(numbers) + 1e-8)
    for keep_mean in (False, True):
        wanted = [[(n - mean) / std + keep_mean * mean for n in row] for row in column(rows, 0)]
        assert same(unpadded(whiten(x, mask, keep_mean=keep_mean), rows), wanted, tolerance=1e-9)


def test_length_mask_counts_from_the_left():
    expected = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    assert torch.equal(length_mask(torch.tensor([2, 0, 3]), 3), expected)


def test_reductions_of_the_three_entries_1_2_6():
    assert masked_sum(X, MASK).item() == 9.0
    assert masked_sum(X, MASK, dim=1).tolist() == [3.0, 6.0]
    assert masked_sum(X, MASK, dim=0).tolist() == [7.0, 2.0, 0.0]
    assert masked_mean(X, MASK).item() == 3.0
    assert masked_var(X, MASK).item() == pytest.approx(14 / 3, abs=1e-15)  # (4 + 1 + 9) / 3: divided by n, not n − 1


def test_mean_of_nothing_is_not_a_number():
    assert masked_mean(X, torch.zeros_like(MASK)).isnan()
    assert masked_var(X, torch.zeros_like(MASK)).isnan()


def test_padding_gets_no_gradient():
    x = X.clone().requires_grad_()
    masked_mean(x, MASK).backward()
    assert torch.equal(x.grad, MASK.double() / 3)


def test_whiten_centres_unless_told_to_keep_the_mean():
    scale = 1 / math.sqrt(14 / 3 + 1e-8)
    centred = [[-2 * scale, -1 * scale, 0.0], [3 * scale, 0.0, 0.0]]
    assert torch.allclose(whiten(X, MASK, keep_mean=False), torch.tensor(centred, dtype=torch.float64), atol=1e-14)
    kept = [[3 - 2 * scale, 3 - 1 * scale, 0.0], [3 + 3 * scale, 0.0, 0.0]]
    assert torch.allclose(whiten(X, MASK, keep_mean=True), torch.tensor(kept, dtype=torch.float64), atol=1e-14)


def test_whitened_tokens_have_mean_0_and_variance_1_and_keep_the_mean_if_told_to():
    x = 3 + 5 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = length_mask(torch.tensor([50, 1, 30, 2, 50, 40]), 50)
    for keep_mean, mean in ((False, 0.0), (True, masked_mean(x, mask).item())):
        white = whiten(x, mask, keep_mean=keep_mean)
        assert masked_mean(white, mask).item() == pytest.approx(mean, abs=1e-12)
        assert masked_var(white, mask).item() == pytest.approx(1.0, abs=1e-8)


def test_scale_and_shift_are_lost_in_whitening():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = length_mask(torch.tensor([5, 1, 3]), 5)
    white = whiten(x, mask, keep_mean=False)
    assert torch.allclose(whiten(7 * x - 40, mask, keep_mean=False), white, atol=1e-7, rtol=0)
    assert torch.allclose(whiten(-x, mask, keep_mean=False), -white, atol=1e-14, rtol=0)


def test_whitening_a_constant_gives_zeros():
    assert whiten(torch.full((2, 3), 7.0), MASK, keep_mean=False).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("filler", [NAN, math.inf, 1e6])
def test_fifty_more_pads_of_anything_change_nothing(filler):
    x = torch.cat([X.where(MASK, filler), torch.full((2, 50), filler, dtype=torch.float64)], dim=1)
    mask = torch.nn.functional.pad(MASK, (0, 50))
    assert (masked_sum(x, mask).item(), masked_mean(x, mask).item()) == (9.0, 3.0)
    assert torch.equal(masked_sum(x, mask, dim=1), masked_sum(X, MASK, dim=1))
    assert torch.equal(masked_var(x, mask), masked_var(X, MASK))
    for keep_mean in (False, True):
        white = whiten(x, mask, keep_mean=keep_mean)
        assert torch.equal(white[:, :3], whiten(X, MASK, keep_mean=keep_mean))
        assert white[:, 3:].count_nonzero() == 0


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_wide_is_float32_at_least(dtype, wanted):
    x = wide(torch.tensor([1.5, -2.0], dtype=dtype))
    assert x.dtype == wanted
    assert x.tolist() == [1.5, -2.0]


def test_whitening_half_precision_is_done_in_float32():
    x = torch.tensor([[256.0, 257.0, 0.0], [259.0, 0.0, 0.0]]).bfloat16()
    assert torch.equal(whiten(x, MASK, keep_mean=False), whiten(x.float(), MASK, keep_mean=False))


def test_arguments_are_not_written_to():
    x, mask = X.clone(), MASK.clone()
    masked_sum(x, mask), masked_mean(x, mask), masked_var(x, mask), whiten(x, mask, keep_mean=True)
    assert torch.equal(x.nan_to_num(9.0), X.nan_to_num(9.0))
    assert torch.equal(mask, MASK)
