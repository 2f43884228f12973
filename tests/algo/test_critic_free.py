"""Advantages without a critic: by definition in plain floats, and their expected gradient over every group of a bandit.

The bandit has a softmax over a few actions, one token each. Its gradient, ∂E[r]/∂z_a = π_a (r_a − E[r]), is known.
"""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algo.ragged import answers, column, examples, padded, same, unpadded
from tether.algo import equal_groups, gae, grpo, length_mask, policy_loss, reinforce_pp, rloo

NAN = math.nan
POLICY = [0.5, 0.2, 0.3]
GRADED, BINARY = [1.0, -2.0, 0.4], [0.0, 1.0, 0.0]


def groups(max_size: int = 3, *, columns: int = 1) -> st.SearchStrategy:
    """A group size and the answers to one or two prompts, with so many numbers a token."""
    sizes = st.integers(2, max_size)
    return sizes.flatmap(
        lambda n: st.integers(1, 2).flatmap(
            lambda prompts: st.tuples(
                st.just(n), answers(columns, min_answers=prompts * n, max_answers=prompts * n)
            )
        )
    )


def by_group(rows, n, of_group):
    """What ``of_group`` makes of the returns of each group, spread over the tokens."""
    returns = [math.fsum(row) for row in column(rows, 0)]
    advantages = [a for start in range(0, len(rows), n) for a in of_group(returns[start : start + n])]
    return [[a] * len(row) for a, row in zip(advantages, rows, strict=True)]


@examples
@given(groups())
def test_rloo_by_its_definition(case):
    n, rows = case

    def less_the_mean_of_the_others(returns):
        return [r - statistics.fmean(returns[:i] + returns[i + 1 :]) for i, r in enumerate(returns)]

    got = unpadded(rloo(*padded(rows), num_generations=n), rows)
    assert same(got, by_group(rows, n, less_the_mean_of_the_others))


@examples
@given(groups())
def test_grpo_by_its_definition(case):
    n, rows = case

    def in_standard_deviations(returns):
        return [(r - statistics.fmean(returns)) / (statistics.stdev(returns) + 1e-4) for r in returns]

    got = unpadded(grpo(*padded(rows), num_generations=n), rows)
    assert same(got, by_group(rows, n, in_standard_deviations), tolerance=1e-9)


@examples
@given(groups(columns=2))
def test_grpo_adds_penalties_less_their_mean_by_its_definition(case):
    n, rows = case
    wanted = []
    for start in range(0, len(rows), n):
        scores, penalties = ([math.fsum(row) for row in column(rows, i)[start : start + n]] for i in (0, 1))
        std = statistics.stdev(scores) + 1e-4
        for score, penalty in zip(scores, penalties, strict=True):
            wanted.append((score - statistics.fmean(scores)) / std + penalty - statistics.fmean(penalties))
    rewards, penalties, mask = padded(rows)
    got = unpadded(grpo(rewards, mask, num_generations=n, penalties=penalties), rows)
    assert same(got, [[a] * len(row) for a, row in zip(wanted, rows, strict=True)], tolerance=1e-9)


@pytest.mark.parametrize("coef", [1.0, 0.1, 1e-6])
def test_answers_that_score_the_same_differ_by_no_more_than_their_penalties(coef):
    """However small those are: over the spread of the returns they would weigh as much as any score."""
    kl = torch.tensor([[0.125, 0.375], [0.2, 0.0], [0.6, 0.2]], dtype=torch.float64)
    mask, rewards = torch.ones(3, 2, dtype=torch.bool), torch.tensor([[0.0, 2.0]] * 3, dtype=torch.float64)
    advantages = grpo(rewards, mask, num_generations=3, penalties=-coef * kl)
    wanted = torch.tensor([[0.0] * 2, [-0.3] * 2, [0.3] * 2], dtype=torch.float64)
    assert torch.allclose(advantages, -coef * wanted, rtol=1e-9, atol=1e-15)


def test_groups_whose_scores_are_all_equal():
    scores = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 0.0, 3.0, 3.0])
    assert equal_groups(scores, num_generations=3).tolist() == [True, False, False]


@examples
@given(answers(1), st.sampled_from([1.0, 0.9, 0.0]))
def test_reinforce_pp_by_its_definition(rows, gamma):
    wanted = [
        [math.fsum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]
        for row in column(rows, 0)
    ]
    assert same(unpadded(reinforce_pp(*padded(rows), gamma=gamma), rows), wanted)


def expected_gradient(estimator, rewards, n):
    """−gradient of the policy loss, averaged over a group and over every group of n actions, at ratio 1."""
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    picks = torch.tensor(list(itertools.product(range(3), repeat=n)))
    new = logits.log_softmax(0)[picks]
    returns = torch.tensor(rewards, dtype=torch.float64)[picks.reshape(-1, 1)]
    advantages = estimator(returns, torch.ones_like(returns, dtype=torch.bool)).reshape(-1, n)
    losses = policy_loss(new, new.detach(), advantages, cliprange=0.2).sum(1) / n
    return -torch.autograd.grad((new.detach().sum(1).exp() * losses).sum(), logits)[0]


def true_gradient(rewards):
    mean = sum(p * r for p, r in zip(POLICY, rewards, strict=True))
    return torch.tensor([p * (r - mean) for p, r in zip(POLICY, rewards, strict=True)], dtype=torch.float64)


def cosine(a, b):
    return (a @ b / (a.norm() * b.norm())).item()


@pytest.mark.parametrize("rewards", [GRADED, BINARY])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_rloo_expects_the_true_gradient(rewards, n):
    got = expected_gradient(lambda r, mask: rloo(r, mask, num_generations=n), rewards, n)
    assert torch.allclose(got, true_gradient(rewards), atol=1e-14, rtol=0)


@pytest.mark.parametrize("rewards", [GRADED, BINARY])
def test_reinforce_pp_expects_the_true_gradient_before_whitening(rewards):
    got = expected_gradient(lambda r, mask: reinforce_pp(r, mask, gamma=1.0), rewards, 1)
    assert torch.allclose(got, true_gradient(rewards), atol=1e-14, rtol=0)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_grpo_expects_the_true_direction_for_two_rewards_and_another_for_three(n):
    def estimator(r, mask):
        return grpo(r, mask, num_generations=n)

    assert cosine(expected_gradient(estimator, BINARY, n), true_gradient(BINARY)) == pytest.approx(1.0, abs=1e-12)
    assert cosine(expected_gradient(estimator, GRADED, n), true_gradient(GRADED)) < 0.995


def test_grpo_of_two_answers_expects_the_gradient_of_the_chance_to_win():
    """(r_1 − r_2) / std is ±√2 / 2: which answer is better counts, not by how much."""
    def win(i, j):
        gap = GRADED[i] - GRADED[j]
        return gap / 2 / (abs(gap) / math.sqrt(2) + 1e-4)

    chance = [sum(POLICY[j] * win(i, j) for j in range(3)) for i in range(3)]
    mean = sum(p * c for p, c in zip(POLICY, chance, strict=True))
    wanted = torch.tensor([p * (c - mean) for p, c in zip(POLICY, chance, strict=True)], dtype=torch.float64)
    got = expected_gradient(lambda r, mask: grpo(r, mask, num_generations=2), GRADED, 2)
    assert torch.allclose(got, wanted, atol=1e-14, rtol=0)


def test_by_hand():
    rewards = torch.tensor([[-0.5, 2.5], [4.0, NAN], [6.0, NAN], [1.0, 1.0], [2.0, NAN], [2.0, NAN]]).double()
    mask = length_mask(torch.tensor([2, 1, 1, 2, 1, 1]), 2)
    # returns 2, 4, 6 of one prompt and 2, 2, 2 of the other; the std of 2, 4, 6 is 2
    wanted = [[-3.0, -3.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert rloo(rewards, mask, num_generations=3).tolist() == wanted
    one = 2 / 2.0001
    wanted = [[-one, -one], [0.0, 0.0], [one, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert torch.allclose(grpo(rewards, mask, num_generations=3), torch.tensor(wanted).double(), atol=1e-7, rtol=0)
    wanted = [[0.75, 2.5], [4.0, 0.0], [6.0, 0.0], [1.5, 1.0], [2.0, 0.0], [2.0, 0.0]]
    assert reinforce_pp(rewards, mask, gamma=0.5).tolist() == wanted


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    mask = length_mask(torch.tensor([4, 1, 3, 2, 4, 2]), 4)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), mask


def test_rloo_of_two_is_the_difference_of_their_returns(case):
    rewards, mask = case
    advantages, returns = rloo(rewards, mask, num_generations=2), rewards.where(mask, 0.0).sum(1).tolist()
    for i in range(6):
        assert advantages[i, 0].item() == pytest.approx(returns[i] - returns[i ^ 1], abs=1e-14)


@pytest.mark.parametrize("estimator", [rloo, grpo])
def test_advantages_of_a_group_add_up_to_0_and_do_not_feel_other_groups(estimator, case):
    rewards, mask = case
    advantages = estimator(rewards, mask, num_generations=3)
    assert advantages[:, 0].reshape(2, 3).sum(1).tolist() == pytest.approx([0.0, 0.0], abs=1e-14)
    rewards = rewards.clone()
    rewards[3:] *= 50
    assert torch.equal(estimator(rewards, mask, num_generations=3)[:3], advantages[:3])
    assert torch.equal(estimator(rewards[:3], mask[:3], num_generations=3), advantages[:3])


@pytest.mark.parametrize(("estimator", "factor"), [(rloo, 10.0), (grpo, 1.0)])
def test_a_shift_of_all_returns_is_lost_and_only_grpo_loses_their_scale(estimator, factor, case):
    rewards, mask = case
    advantages = estimator(rewards, mask, num_generations=3)
    shifted = rewards.clone()
    shifted[:, 0] += 100
    assert torch.allclose(estimator(shifted, mask, num_generations=3), advantages, atol=1e-12, rtol=0)
    scaled = estimator(10 * rewards, mask, num_generations=3)
    assert torch.allclose(scaled, factor * advantages, atol=1e-3, rtol=0)
    assert not torch.allclose(scaled, (11 - factor) * advantages, atol=1e-1, rtol=0)


@pytest.mark.parametrize("estimator", [rloo, grpo])
def test_equal_returns_have_advantages_of_exactly_0(estimator):
    rewards = torch.full((6, 1), 0.1)
    assert estimator(rewards, torch.ones(6, 1, dtype=torch.bool), num_generations=3).count_nonzero() == 0


@pytest.mark.parametrize("estimator", [rloo, grpo])
def test_order_within_a_group_moves_with_the_rows(estimator, case):
    rewards, mask = case
    order = [2, 0, 1, 5, 4, 3]
    advantages = estimator(rewards, mask, num_generations=3)[order]
    got = estimator(rewards[order], mask[order], num_generations=3)
    assert torch.allclose(got.where(mask[order], 0.0), advantages.where(mask[order], 0.0), atol=1e-14, rtol=0)


@pytest.mark.parametrize("estimator", [rloo, grpo])
def test_one_answer_a_prompt_is_a_bug(estimator, case):
    with pytest.raises(AssertionError):
        estimator(*case, num_generations=1)


def test_reinforce_pp_is_gae_with_a_critic_of_0_at_lambda_1(case):
    rewards, mask = case
    advantages, returns = gae(rewards, torch.zeros_like(rewards), mask, gamma=0.9, lam=1.0)
    assert torch.equal(advantages, returns)
    assert torch.equal(reinforce_pp(rewards, mask, gamma=0.9), advantages)


ESTIMATORS = [
    lambda rewards, mask: rloo(rewards, mask, num_generations=3),
    lambda rewards, mask: grpo(rewards, mask, num_generations=3),
    lambda rewards, mask: reinforce_pp(rewards, mask, gamma=0.9),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=["rloo", "grpo", "reinforce_pp"])
@pytest.mark.parametrize("filler", [NAN, math.inf, 1e6])
def test_fifty_more_pads_of_anything_change_nothing(estimator, filler, case):
    rewards, mask = case
    dirty = torch.nn.functional.pad(rewards.where(mask, filler), (0, 50), value=filler)
    before = dirty.clone()
    got = estimator(dirty, torch.nn.functional.pad(mask, (0, 50)))
    assert torch.allclose(got[:, :4], estimator(rewards, mask), atol=1e-14, rtol=0)
    assert got[:, 4:].count_nonzero() == 0
    assert torch.equal(dirty.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=["rloo", "grpo", "reinforce_pp"])
def test_half_precision_is_done_in_float32(estimator, case):
    rewards, mask = case[0].bfloat16(), case[1]
    assert torch.equal(estimator(rewards, mask), estimator(rewards.float(), mask))
