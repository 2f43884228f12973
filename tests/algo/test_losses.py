"""Losses by hand in float64, the four regions of the clip, and the gradient at ratio 1."""

import math

import pytest
import torch

from tether.algo import clipped, policy_loss, ratio, value_clipped, value_loss

EPS = 0.2
INSIDE, ABOVE, BELOW = 1.1, 1.5, 0.5


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def old_and_new(ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    old = torch.linspace(-3.0, -0.5, len(ratios), dtype=torch.float64)[None]
    return old, old + row(*ratios).log()


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "moves"),
    [
        (INSIDE, 2.0, -2.2, True),
        (INSIDE, -2.0, 2.2, True),
        (ABOVE, 2.0, -2.4, False),  # already likelier than the clip allows: −2 · 1.2
        (ABOVE, -2.0, 3.0, True),  # too likely and bad: pushed back, unclipped
        (BELOW, 2.0, -1.0, True),  # too unlikely and good: pushed back, unclipped
        (BELOW, -2.0, 1.6, False),  # already unlikelier than the clip allows: 2 · 0.8
    ],
)
def test_regions_of_the_policy_clip(rho, advantage, loss, moves):
    old, new = old_and_new([rho])
    new.requires_grad_()
    per_token = policy_loss(new, old, row(advantage), cliprange=EPS)
    assert per_token.item() == pytest.approx(loss, abs=1e-12)
    per_token.sum().backward()
    assert new.grad.item() == pytest.approx(-advantage * rho if moves else 0.0, abs=1e-12)
    assert clipped(new, old, row(advantage), cliprange=EPS).item() is not moves


def test_at_ratio_1_the_gradient_is_that_of_reinforce():
    new = row(-1.0, -2.0, -0.1).requires_grad_()
    advantages = row(1.5, -0.5, 0.0)
    loss = policy_loss(new, new.detach(), advantages, cliprange=EPS)
    assert torch.equal(loss, -advantages)
    loss.sum().backward()
    assert torch.equal(new.grad, -advantages)
    assert not clipped(new, new.detach(), advantages, cliprange=EPS).any()


def test_no_advantage_is_never_clipped():
    old, new = old_and_new([ABOVE, BELOW])
    assert not clipped(new, old, row(0.0, 0.0), cliprange=EPS).any()


def test_expected_ratio_under_the_old_policy_is_1():
    old, new = row(0.5, 0.3, 0.2).log(), row(0.1, 0.2, 0.7).log()
    assert sum(p * r for p, r in zip([0.5, 0.3, 0.2], ratio(new, old)[0].tolist(), strict=True)) == pytest.approx(1.0)


def test_ratio_by_hand():
    assert ratio(row(-1.0, -2.0), row(-2.0, -1.0))[0].tolist() == pytest.approx([math.e, 1 / math.e], abs=1e-15)
    assert ratio(row(-1.25), row(-1.25)).item() == 1.0


@pytest.mark.parametrize(
    ("new", "old", "target", "loss", "gradient", "is_clipped"),
    [
        (1.1, 1.0, 2.0, 0.405, -0.9, False),  # within the range: ½ · .9²
        (1.8, 1.0, 2.0, 0.320, 0.0, True),  # ran ahead: ½ · (1.2 − 2)², no further
        (0.5, 1.0, 2.0, 1.125, -1.5, False),  # ran the wrong way: ½ · 1.5², pulled back
        (0.2, 1.0, 0.0, 0.320, 0.0, True),  # ran ahead downwards: ½ · .8²
        (1.8, 1.0, 0.0, 1.620, 1.8, False),  # the wrong way upwards
    ],
)
def test_regions_of_the_value_clip(new, old, target, loss, gradient, is_clipped):
    value = row(new).requires_grad_()
    per_token = value_loss(value, row(old), row(target), cliprange_value=EPS)
    assert per_token.item() == pytest.approx(loss, abs=1e-12)
    per_token.sum().backward()
    assert value.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert value_clipped(value, row(old), row(target), cliprange_value=EPS).item() is is_clipped


def test_without_a_value_clip_it_is_half_the_squared_error():
    value = row(1.8, -3.0).requires_grad_()
    loss = value_loss(value, row(1.0, 1.0), row(2.0, 2.0), cliprange_value=None)
    assert loss[0].tolist() == pytest.approx([0.02, 12.5], abs=1e-12)
    loss.sum().backward()
    assert value.grad[0].tolist() == pytest.approx([-0.2, -5.0], abs=1e-12)
    assert not value_clipped(value, row(1.0, 1.0), row(2.0, 2.0), cliprange_value=None).any()


def test_zeros_in_padding_cost_nothing():
    zero = row(0.0)
    assert policy_loss(zero, zero, zero, cliprange=EPS).item() == 0.0
    assert value_loss(zero, zero, zero, cliprange_value=EPS).item() == 0.0


def test_half_precision_is_done_in_float32():
    old, new = (x.bfloat16() for x in old_and_new([INSIDE, ABOVE, BELOW]))
    advantages = row(0.3, -0.7, 1.1).bfloat16()
    single = policy_loss(new.float(), old.float(), advantages.float(), cliprange=EPS)
    assert torch.equal(policy_loss(new, old, advantages, cliprange=EPS), single)
    single = value_loss(new.float(), old.float(), advantages.float(), cliprange_value=EPS)
    assert torch.equal(value_loss(new, old, advantages, cliprange_value=EPS), single)


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_a_ratio_beyond_all_measure_stays_finite(gap, advantage):
    old = torch.zeros(1, 1)
    new = (old + gap).requires_grad_()
    loss = policy_loss(new, old, torch.full((1, 1), advantage), cliprange=EPS)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(new.grad).all()
    assert ratio(new, old).item() == pytest.approx(math.exp(math.copysign(20, gap)), rel=1e-5)
