"""KL estimators by exact expectation over a vocabulary, and the controller by hand."""

import math

import pytest
import torch

from tether.algo import adaptive_kl_coef, approx_kl, kl_estimate

PI = [0.5, 0.3, 0.15, 0.05]
REF = [0.1, 0.2, 0.3, 0.4]
KL = sum(p * math.log(p / q) for p, q in zip(PI, REF, strict=True))
REVERSE_KL = sum(q * math.log(q / p) for p, q in zip(PI, REF, strict=True))


def logs(probs: list[float]) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float64).log()


def expectation(estimate: torch.Tensor, probs: list[float]) -> float:
    return sum(p * x for p, x in zip(probs, estimate[0].tolist(), strict=True))


def test_the_two_directions_differ():
    assert abs(KL - REVERSE_KL) > 0.05  # or the tests below could not tell them apart


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


def test_adaptive_coefficient_refuses_what_would_turn_it_negative():
    with pytest.raises(AssertionError):
        adaptive_kl_coef(0.05, 0.0, target=6.0, horizon=10, num_episodes=64)
    with pytest.raises(AssertionError):
        adaptive_kl_coef(0.05, math.nan, target=6.0, horizon=10_000, num_episodes=64)


def test_half_precision_is_done_in_float32():
    policy, ref = logs(PI).bfloat16(), logs(REF).bfloat16()
    assert torch.equal(kl_estimate(policy, ref, "k3"), kl_estimate(policy.float(), ref.float(), "k3"))
