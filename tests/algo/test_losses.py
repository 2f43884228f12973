"""Losses by definition and by hand in float64, every region of the clips, and the gradient at ratio 1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algo.ragged import answers, examples, on_tokens, padded, same
from tether.algo import (
    clipped_sides,
    dual_clipped,
    importance_weights,
    policy_loss,
    ratio,
    value_clipped,
    value_loss,
)

EPS, EPS_HIGH, DUAL = 0.2, 0.28, 3.0
INSIDE, ABOVE, BELOW = 1.1, 1.5, 0.5


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def old_and_new(ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    old = torch.linspace(-3.0, -0.5, len(ratios), dtype=torch.float64)[None]
    return old, old + row(*ratios).log()


@examples
@given(answers(2), st.sampled_from([1.0, 2.0, 1e6]))
def test_importance_weights_by_their_definition(rows, cap):
    trained, rollout, _ = padded(rows)
    weights = importance_weights(trained, rollout, cap=cap)
    wanted = [[min(math.exp(old - drawn), cap) for old, drawn in row] for row in rows]
    assert same(on_tokens(weights, rows), wanted)


@examples
@given(answers(3), st.sampled_from([None, 0.28, 0.05]), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_by_its_definition(rows, high, dual_clip):
    def oracle(new: float, old: float, advantage: float) -> float:
        rho = math.exp(new - old)
        limited = min(max(rho, 1 - EPS), 1 + (EPS if high is None else high))
        gain = min(rho * advantage, limited * advantage)
        return -max(gain, dual_clip * advantage) if dual_clip is not None and advantage < 0 else -gain

    new, old, advantages, _ = padded(rows)
    loss = policy_loss(new, old, advantages, cliprange=EPS, cliprange_high=high, dual_clip=dual_clip)
    assert same(on_tokens(loss, rows), [[oracle(*token) for token in row] for row in rows])


@examples
@given(answers(3))
def test_a_token_moves_the_policy_exactly_where_no_clip_holds(rows):
    new, old, advantages, mask = padded(rows, filler=0.0)
    new.requires_grad_()
    policy_loss(new, old, advantages, cliprange=EPS, cliprange_high=EPS_HIGH, dual_clip=DUAL).sum().backward()
    low, high = clipped_sides(new, old, advantages, cliprange=EPS, cliprange_high=EPS_HIGH)
    dual = dual_clipped(new, old, advantages, dual_clip=DUAL)
    assert (low.int() + high.int() + dual.int()).max() <= 1
    wanted = torch.where(low | high | dual, 0.0, -advantages * (new - old).exp()).detach()
    assert torch.allclose(new.grad, wanted, atol=1e-14, rtol=1e-12)
    assert not (low | high | dual)[~mask].any()


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "region"),
    [
        (INSIDE, 2.0, -2.2, None),
        (INSIDE, -2.0, 2.2, None),
        (1.25, 2.0, -2.5, None),  # above the low side's mirror, below the high side
        (ABOVE, 2.0, -2.56, "high"),  # already likelier than the clip allows: −2 · 1.28
        (ABOVE, -2.0, 3.0, None),  # too likely and bad: pushed back, unclipped
        (0.75, 2.0, -1.5, None),
        (BELOW, 2.0, -1.0, None),  # too unlikely and good: pushed back, unclipped
        (0.75, -2.0, 1.6, "low"),  # the high side does not widen the low one: 2 · 0.8
        (BELOW, -2.0, 1.6, "low"),  # already unlikelier than the clip allows
        (2.9, -2.0, 5.8, None),
        (3.1, -2.0, 6.0, "dual"),  # pushed back no harder than three times the advantage
        (100.0, -1.0, 3.0, "dual"),
        (100.0, 1.0, -1.28, "high"),
        (100.0, 0.0, 0.0, None),
        (0.01, 0.0, 0.0, None),
    ],
)
def test_regions_of_the_policy_clips(rho, advantage, loss, region):
    old, new = old_and_new([rho])
    new.requires_grad_()
    clips = {"cliprange": EPS, "cliprange_high": EPS_HIGH}
    per_token = policy_loss(new, old, row(advantage), dual_clip=DUAL, **clips)
    assert per_token.item() == pytest.approx(loss, abs=1e-12)
    per_token.sum().backward()
    if region is None:
        assert new.grad.item() == pytest.approx(-advantage * rho, abs=1e-12)
    else:
        assert new.grad.item() == 0.0
    low, high = clipped_sides(new, old, row(advantage), **clips)
    dual = dual_clipped(new, old, row(advantage), dual_clip=DUAL)
    assert (low.item(), high.item(), dual.item()) == (region == "low", region == "high", region == "dual")


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "moves"),
    [
        (INSIDE, 2.0, -2.2, True),
        (INSIDE, -2.0, 2.2, True),
        (ABOVE, 2.0, -2.4, False),
        (ABOVE, -2.0, 3.0, True),
        (BELOW, 2.0, -1.0, True),
        (BELOW, -2.0, 1.6, False),
        (100.0, -1.0, 100.0, True),
    ],
)
def test_regions_of_the_symmetric_clip_alone(rho, advantage, loss, moves):
    old, new = old_and_new([rho])
    new.requires_grad_()
    per_token = policy_loss(new, old, row(advantage), cliprange=EPS)
    assert per_token.item() == pytest.approx(loss, abs=1e-12)
    per_token.sum().backward()
    assert new.grad.item() == pytest.approx(-advantage * rho if moves else 0.0, abs=1e-12)
    low, high = clipped_sides(new, old, row(advantage), cliprange=EPS)
    assert (low.item(), high.item()) == (not moves and advantage < 0, not moves and advantage > 0)


def loss_and_gradient(ratios, advantages, **clips):
    old, new = old_and_new(ratios)
    new.requires_grad_()
    loss = policy_loss(new, old, row(*advantages), cliprange=EPS, **clips)
    return loss, torch.autograd.grad(loss.sum(), new)[0]


@pytest.mark.parametrize("clips", [{"cliprange_high": EPS}, {"dual_clip": math.inf}, {"dual_clip": 1e9}])
def test_clips_that_change_nothing(clips):
    case = [0.1, BELOW, INSIDE, ABOVE, 50.0] * 3, [1.5] * 5 + [-1.5] * 5 + [0.0] * 5
    for plain, other in zip(loss_and_gradient(*case), loss_and_gradient(*case, **clips), strict=True):
        assert torch.equal(plain, other)


def test_at_ratio_1_the_gradient_is_that_of_reinforce():
    new = row(-1.0, -2.0, -0.1).requires_grad_()
    advantages = row(1.5, -0.5, 0.0)
    for clips in ({}, {"cliprange_high": EPS_HIGH, "dual_clip": DUAL}):
        loss = policy_loss(new, new.detach(), advantages, cliprange=EPS, **clips)
        assert torch.equal(loss, -advantages)
        assert torch.equal(torch.autograd.grad(loss.sum(), new)[0], -advantages)
    assert not torch.stack(clipped_sides(new, new.detach(), advantages, cliprange=EPS)).any()


def test_expected_surrogate_is_the_new_policys_mean_advantage():
    """Off policy, and with a clip too wide to matter: Σ π_old L = −Σ π_new A, and so are the gradients."""
    old, advantages = row(0.5, 0.3, 0.2), row(1.0, -2.0, 0.4)
    logits = row(0.3, -0.8, 0.9).requires_grad_()
    loss = policy_loss(logits.log_softmax(1), old.log(), advantages, cliprange=1e9)
    gradient = torch.autograd.grad((old * loss).sum(), logits)[0]
    new = [math.exp(z) / sum(map(math.exp, logits[0].tolist())) for z in logits[0].tolist()]
    mean = sum(p * a for p, a in zip(new, advantages[0].tolist(), strict=True))
    assert (old * loss).sum().item() == pytest.approx(-mean, abs=1e-14)
    wanted = [-p * (a - mean) for p, a in zip(new, advantages[0].tolist(), strict=True)]
    assert gradient[0].tolist() == pytest.approx(wanted, abs=1e-14)


def test_expected_ratio_under_the_old_policy_is_1():
    old, new = row(0.5, 0.3, 0.2).log(), row(0.1, 0.2, 0.7).log()
    assert sum(p * r for p, r in zip([0.5, 0.3, 0.2], ratio(new, old)[0].tolist(), strict=True)) == pytest.approx(1.0)


def test_ratio_by_hand():
    assert ratio(row(-1.0, -2.0), row(-2.0, -1.0))[0].tolist() == pytest.approx([math.e, 1 / math.e], abs=1e-15)
    assert ratio(row(-1.25), row(-1.25)).item() == 1.0


@examples
@given(answers(3), st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_by_its_definition(rows, cliprange_value):
    def branches(new: float, old: float, target: float) -> tuple[float, float]:
        if cliprange_value is None:
            return (new - target) ** 2, (new - target) ** 2
        near = min(max(new, old - cliprange_value), old + cliprange_value)
        return (new - target) ** 2, (near - target) ** 2

    new, old, returns, _ = padded(rows)
    wanted = [[branches(*token) for token in row] for row in rows]
    loss = value_loss(new, old, returns, cliprange_value=cliprange_value)
    assert same(on_tokens(loss, rows), [[max(pair) / 2 for pair in row] for row in wanted])
    far = value_clipped(new, old, returns, cliprange_value=cliprange_value)
    assert on_tokens(far, rows) == [[limited > plain for plain, limited in row] for row in wanted]


def test_expected_gradient_of_the_value_loss_leads_to_the_mean_return():
    chances, returns = [0.5, 0.3, 0.2], [1.0, -2.0, 0.4]
    value = torch.full((1, 3), 0.7, dtype=torch.float64, requires_grad=True)
    loss = value_loss(value, value.detach(), row(*returns), cliprange_value=EPS)
    gradient = torch.autograd.grad((row(*chances) * loss).sum(), value)[0].sum().item()
    assert gradient == pytest.approx(0.7 - sum(p * g for p, g in zip(chances, returns, strict=True)), abs=1e-14)


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


def test_a_value_clip_too_wide_to_matter_is_none():
    new, old, returns = row(1.8, -3.0, 0.5), row(1.0, 1.0, 1.0), row(2.0, 2.0, 0.0)
    wide = value_loss(new, old, returns, cliprange_value=1e9)
    assert torch.equal(wide, value_loss(new, old, returns, cliprange_value=None))


def test_zeros_in_padding_cost_nothing():
    zero = row(0.0)
    assert policy_loss(zero, zero, zero, cliprange=EPS).item() == 0.0
    assert value_loss(zero, zero, zero, cliprange_value=EPS).item() == 0.0


def test_half_precision_is_done_in_float32():
    old, new = (x.bfloat16() for x in old_and_new([INSIDE, ABOVE, BELOW, 50.0]))
    advantages = row(0.3, -0.7, 1.1, -0.7).bfloat16()
    wide = [x.float() for x in (new, old, advantages)]
    for clips in ({}, {"cliprange_high": EPS_HIGH, "dual_clip": 3.3}):
        single = policy_loss(*wide, cliprange=EPS, **clips)
        assert torch.equal(policy_loss(new, old, advantages, cliprange=EPS, **clips), single)
    new_row, old_row = row(-0.1, -3.3).bfloat16(), row(-3.3, -0.1).bfloat16()  # their difference has more digits
    assert torch.equal(ratio(new_row, old_row), ratio(new_row.float(), old_row.float()))
    single = value_loss(*wide, cliprange_value=EPS)
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
