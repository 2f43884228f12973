"""Masked reductions and whitening against plain Python, and against what padding must not do."""

import math

import pytest
import torch

from tether.algo import length_mask, masked_mean, masked_sum, masked_var, whiten

NAN = math.nan
X = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_length_mask_counts_from_the_left():
    expected = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    assert torch.equal(length_mask(torch.tensor([2, 0, 3]), 3), expected)


def test_reductions_of_the_three_entries_1_2_6():
    assert masked_sum(X, MASK).item() == 9.0
    assert masked_sum(X, MASK, dim=1).tolist() == [3.0, 6.0]
    assert masked_mean(X, MASK).item() == 3.0
    assert masked_var(X, MASK).item() == pytest.approx(14 / 3, abs=1e-15)  # (4 + 1 + 9) / 3: divided by n, not n − 1


def test_mean_of_nothing_is_not_a_number():
    assert masked_mean(X, torch.zeros_like(MASK)).isnan()


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


def test_whitening_parts_by_the_moments_of_all_equals_whitening_all():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = length_mask(torch.tensor([5, 1, 3, 2, 5, 4]), 5)
    moments = {"mean": masked_mean(x, mask), "var": masked_var(x, mask)}
    parts = [whiten(x[rows], mask[rows], keep_mean=False, **moments) for rows in (slice(0, 2), slice(2, 6))]
    assert torch.allclose(torch.cat(parts), whiten(x, mask, keep_mean=False), atol=1e-14)


def test_whitening_a_constant_gives_zeros():
    assert whiten(torch.full((2, 3), 7.0), MASK, keep_mean=False).tolist() == [[0.0] * 3] * 2


def test_whitening_half_precision_is_done_in_float32():
    x = torch.tensor([[256.0, 257.0, 0.0], [259.0, 0.0, 0.0]]).bfloat16()
    assert torch.equal(whiten(x, MASK, keep_mean=False), whiten(x.float(), MASK, keep_mean=False))
