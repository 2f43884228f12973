"""KL estimators by exact expectation over a vocabulary, and the controller by hand."""

import math

import pytest
import torch
from hypothesis import given

from tests.algo.ragged import answers, examples, on_tokens, padded, same
from tether.algo import adaptive_kl_coef, approx_kl, kl_estimate, kl_loss

PI = [0.5, 0.3, 0.15, 0.05]
REF = [0.1, 0.2, 0.3, 0.4]
NEW = [0.25, 0.25, 0.4, 0.1]
KL = sum(p * math.log(p / q) for p, q in zip(PI, REF, strict=True))
REVERSE_KL = sum(q * math.log(q / p) for p, q in zip(PI, REF, strict=True))


def logs(probs: list[float]) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float64).log()


def expectation(estimate: torch.Tensor, probs: list[float]) -> float:
    return sum(p * x for p, x in zip(probs, estimate[0].tolist(), strict=True))


def test_the_two_directions_differ():
    assert abs(KL - REVERSE_KL) > 0.05  # or the tests below could not tell them apart


DEFINITIONS = {
    "k1": lambda pi, ref: math.log(pi / ref),
    "k2": lambda pi, ref: math.log(pi / ref) ** 2 / 2,
    "k3": lambda pi, ref: ref / pi - 1 - math.log(ref / pi),
}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@examples
@given(answers(2))
def test_estimates_by_their_definitions(estimator, rows):
    policy, ref, _ = padded(rows)
    wanted = [[DEFINITIONS[estimator](math.exp(p), math.exp(q)) for p, q in row] for row in rows]
    assert same(on_tokens(kl_estimate(policy, ref, estimator), rows), wanted, tolerance=1e-10)
    if estimator == "k3":
        assert same(on_tokens(approx_kl(ref, policy), rows), wanted, tolerance=1e-10)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_under_the_policy_is_the_kl_to_the_reference(estimator):
    assert expectation(kl_estimate(logs(PI), logs(REF), estimator), PI) == pytest.approx(KL, abs=1e-14)


def test_expectation_of_k2_is_half_the_second_moment_of_the_log_ratio():
    wanted = sum(p * math.log(p / q) ** 2 for p, q in zip(PI, REF, strict=True)) / 2
    assert expectation(kl_estimate(logs(PI), logs(REF), "k2"), PI) == pytest.approx(wanted, abs=1e-14)


def test_estimates_by_hand():
    policy, ref = torch.tensor([[-1.0, -2.0]], dtype=torch.float64), torch.tensor([[-2.0, -1.5]], dtype=torch.float64)
    assert kl_estimate(policy, ref, "k1").tolist() == [[1.0, -0.5]]
    assert kl_estimate(policy, ref, "k2").tolist() == [[0.5, 0.125]]
    wanted = [math.exp(-1) - 1 + 1, math.exp(0.5) - 1 - 0.5]
    assert kl_estimate(policy, ref, "k3")[0].tolist() == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_are_at_distance_exactly_0(estimator):
    assert kl_estimate(logs(PI), logs(PI), estimator).tolist() == [[0.0] * 4]


def test_k3_of_a_tiny_step_keeps_its_digits():
    step = torch.tensor([[1e-3]])
    assert kl_estimate(torch.zeros_like(step), step, "k3").item() == pytest.approx(5e-7 + 1e-9 / 6, rel=1e-3)


def test_approx_kl_is_the_kl_from_the_old_policy_to_the_new():
    drift = approx_kl(logs(REF), logs(PI))  # π_old = PI, π_new = REF
    assert expectation(drift, PI) == pytest.approx(KL, abs=1e-14)
    assert drift.min() >= 0


def test_approx_kl_by_hand():
    old, new = torch.tensor([[-1.0, -2.0]], dtype=torch.float64), torch.tensor([[-2.0, -1.5]], dtype=torch.float64)
    wanted = [math.exp(-1) - 1 + 1, math.exp(0.5) - 1 - 0.5]
    assert approx_kl(new, old)[0].tolist() == pytest.approx(wanted, abs=1e-15)
    assert approx_kl(new, new).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@examples
@given(answers(3))
def test_kl_loss_by_its_definition(estimator, rows):
    wanted = [
        [math.exp(new - old) * DEFINITIONS[estimator](math.exp(new), math.exp(ref)) for new, old, ref in row]
        for row in rows
    ]
    new, old, ref, _ = padded(rows)
    assert same(on_tokens(kl_loss(new, old, ref, estimator), rows), wanted, tolerance=1e-9)


def expected_kl_loss(estimator: str, old: list[float], new: list[float]) -> tuple[float, list[float]]:
    """Value of the loss and its gradient in the logits of π_new, each action weighted by π_old."""
    logits = (logs(new) + 0.7).requires_grad_()
    losses = kl_loss(logits.log_softmax(1), logs(old), logs(REF), estimator)
    mean = (torch.tensor([old], dtype=torch.float64) * losses).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0][0].tolist()


def kl_and_gradient(new: list[float]) -> tuple[float, list[float]]:
    """KL(π_new ‖ ref) and its gradient π_a (log(π_a / ref_a) − KL) in the logits."""
    gaps = [math.log(p / q) for p, q in zip(new, REF, strict=True)]
    kl = sum(p * gap for p, gap in zip(new, gaps, strict=True))
    return kl, [p * (gap - kl) for p, gap in zip(new, gaps, strict=True)]


@pytest.mark.parametrize("old", [PI, NEW], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradient_of_the_kl_loss_is_that_of_the_kl(estimator, old):
    kl, wanted = kl_and_gradient(NEW)
    value, gradient = expected_kl_loss(estimator, old, NEW)
    assert gradient == pytest.approx(wanted, abs=1e-14)
    assert max(map(abs, wanted)) > 0.05
    if estimator == "k2":
        assert value == pytest.approx(sum(p * math.log(p / q) ** 2 / 2 for p, q in zip(NEW, REF, strict=True)))
        assert abs(value - kl) > 0.01
    else:
        assert value == pytest.approx(kl, abs=1e-14)


def test_gradient_on_tokens_in_the_kl_loss():
    new, old, ref = (row.log() for row in torch.tensor([[NEW], [PI], [REF]], dtype=torch.float64))
    gaps = [math.log(a / b) for a, b in zip(NEW, REF, strict=True)]
    rho = [a / b for a, b in zip(NEW, PI, strict=True)]
    wanted = {
        "k1": [r * (gap + 1) for r, gap in zip(rho, gaps, strict=True)],
        "k2": [r * gap for r, gap in zip(rho, gaps, strict=True)],
        "k3": [r * gap for r, gap in zip(rho, gaps, strict=True)],
    }
    for estimator, row in wanted.items():
        leaf = new.clone().requires_grad_()
        kl_loss(leaf, old, ref, estimator).sum().backward()
        assert leaf.grad[0].tolist() == pytest.approx(row, abs=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_of_a_policy_that_has_not_moved_is_the_estimate(estimator):
    assert torch.equal(kl_loss(logs(PI), logs(PI), logs(REF), estimator), kl_estimate(logs(PI), logs(REF), estimator))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_at_the_reference_no_token_has_a_gradient(estimator):
    new = logs(REF).requires_grad_()
    kl_loss(new, logs(PI), logs(REF), estimator).sum().backward()
    assert new.grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("sequence_kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 0.0064),  # error within the clip
        (12.0, 1 + 0.2 * 0.0064),
        (0.0, 1 - 0.2 * 0.0064),
        (-3.0, 1 - 0.2 * 0.0064),
    ],
)
def test_adaptive_coefficient_by_hand(sequence_kl, factor):
    new = adaptive_kl_coef(0.05, sequence_kl, target=6.0, horizon=10_000, num_episodes=64)
    assert new == pytest.approx(0.05 * factor, rel=1e-12)


def test_adaptive_coefficient_settles_at_the_target():
    """In a world whose KL is 3 / β the coefficient ends where the KL is the target, from above and from below."""
    for kl_coef in (0.05, 5.0):
        for _ in range(2000):
            kl_coef = adaptive_kl_coef(kl_coef, 3 / kl_coef, target=6.0, horizon=1000, num_episodes=64)
        assert kl_coef == pytest.approx(0.5, rel=1e-6)


def test_adaptive_coefficient_refuses_what_would_turn_it_negative():
    with pytest.raises(AssertionError):
        adaptive_kl_coef(0.05, 0.0, target=6.0, horizon=10, num_episodes=64)
    with pytest.raises(AssertionError):
        adaptive_kl_coef(0.05, math.nan, target=6.0, horizon=10_000, num_episodes=64)


def test_half_precision_is_done_in_float32():
    policy, ref = logs(PI).bfloat16(), logs(REF).bfloat16()
    for estimator in ("k1", "k2", "k3"):
        single = kl_estimate(policy.float(), ref.float(), estimator)
        assert torch.equal(kl_estimate(policy, ref, estimator), single)
        new = logs(NEW).bfloat16()
        single = kl_loss(new.float(), policy.float(), ref.float(), estimator)
        assert torch.equal(kl_loss(new, policy, ref, estimator), single)
