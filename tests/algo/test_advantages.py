"""Token rewards and advantages against their definitions in plain Python floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algo.ragged import answers, column, examples, padded, same, unpadded
from tests.operators import operators
from tether.algo import gae, length_adaptive_lam, length_mask, token_rewards

NAN = math.nan
LENGTHS = [5, 1, 3]
WIDTH = 6
SCORES = torch.tensor([3.0, -1.0, 0.25], dtype=torch.float64)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    mask = length_mask(torch.tensor(LENGTHS), WIDTH)
    return rewards, values, mask


def oracle(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_l (γλ)^l (r_{t+l} + γ V_{t+l+1} − V_{t+l}) over one response without padding, V past its end 0."""
    length = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < length else 0.0) - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.9, 1.0), (1.0, 0.0)])
def test_gae_by_its_definition(case, gamma, lam):
    rewards, values, mask = case
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for b, length in enumerate(LENGTHS):
        wanted = oracle(rewards[b, :length].tolist(), values[b, :length].tolist(), gamma, lam)
        assert advantages[b, :length].tolist() == pytest.approx(wanted, abs=1e-12)
        wanted = [a + v for a, v in zip(wanted, values[b, :length].tolist(), strict=True)]
        assert returns[b, :length].tolist() == pytest.approx(wanted, abs=1e-12)
        assert advantages[b, length:].tolist() == returns[b, length:].tolist() == [0.0] * (WIDTH - length)


@examples
@given(answers(2), st.sampled_from([1.0, 0.9, 0.0]), st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_gae_by_its_definition_with_a_lambda_for_each_answer(rows, gamma, lams):
    wanted = [oracle(r, v, gamma, lam) for r, v, lam in zip(column(rows, 0), column(rows, 1), lams, strict=False)]
    lam = torch.tensor(lams[: len(rows)], dtype=torch.float64)
    advantages, returns = gae(*padded(rows), gamma=gamma, lam=lam)
    assert same(unpadded(advantages, rows), wanted)
    values = column(rows, 1)
    wanted = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(wanted, values, strict=True)]
    assert same(unpadded(returns, rows), wanted)


def test_the_same_lambda_for_each_answer_is_one_lambda_for_all(case):
    each = gae(*case, gamma=0.9, lam=torch.full((len(LENGTHS),), 0.8, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(each, gae(*case, gamma=0.9, lam=0.8), strict=True))


@pytest.mark.parametrize("lam", [0.95, torch.tensor([0.9, 0.3, 1.0])])
def test_gae_is_bitwise_its_recurrence_over_columns(case, lam):
    rewards, values, mask = (x.float() if x.is_floating_point() else x for x in case)
    advantages, _ = gae(rewards, values, mask, gamma=0.97, lam=lam)
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    carry, zero = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(WIDTH)):
        delta = rewards[:, t] + 0.97 * (values[:, t + 1] if t + 1 < WIDTH else zero) - values[:, t]
        carry = delta + 0.97 * lam * carry
        assert torch.equal(advantages[:, t], carry)


def test_gae_takes_two_operations_a_token():
    numbers = []
    for width in (10, 30):
        ones, mask = torch.ones(2, 3, width), torch.ones(3, width, dtype=torch.bool)
        numbers.append(operators(lambda x=ones, m=mask: gae(*x, m, gamma=0.9, lam=0.9), inner=False).total())
    assert numbers[1] - numbers[0] == 2 * 20


def test_gae_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 1.0, -1.0]], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5, lam=0.5)
    # δ = 1 + .5 − .5 = 1;  0 − .5 − 1 = −1.5;  2 + 1 = 3.   A_2 = 3;  A_1 = −1.5 + .75;  A_0 = 1 − .1875
    assert advantages.tolist() == [[0.8125, -0.75, 3.0]]
    assert returns.tolist() == [[1.3125, 0.25, 2.0]]


def test_lambda_1_is_monte_carlo(case):
    rewards, values, mask = case
    _, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            to_go = sum(0.9 ** (k - t) * rewards[b, k].item() for k in range(t, length))
            assert returns[b, t].item() == pytest.approx(to_go, abs=1e-12)


def test_lambda_0_is_the_td_error(case):
    rewards, values, mask = case
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            after = values[b, t + 1].item() if t + 1 < length else 0.0
            wanted = rewards[b, t].item() + 0.9 * after - values[b, t].item()
            assert advantages[b, t].item() == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_an_exact_critic_of_a_sure_reward_sees_no_advantage(lam):
    """Values that are the discounted rewards to come: every TD error is 0, and the returns are the values."""
    rewards = torch.tensor([[1.0, -2.0, 4.0, NAN]], dtype=torch.float64)
    values = torch.tensor([[1.0 - 1.0 + 1.0, -2.0 + 2.0, 4.0, NAN]], dtype=torch.float64)
    advantages, returns = gae(rewards, values, length_mask(torch.tensor([3]), 4), gamma=0.5, lam=lam)
    assert advantages.tolist() == [[0.0] * 4]
    assert returns.tolist() == [[1.0, 0.0, 4.0, 0.0]]


@pytest.mark.parametrize("filler", [NAN, math.inf, 1e6])
def test_fifty_more_pads_of_anything_change_nothing(case, filler):
    rewards, values, mask = case
    dirty = [torch.nn.functional.pad(x.where(mask, filler), (0, 50), value=filler) for x in (rewards, values)]
    wider = torch.nn.functional.pad(mask, (0, 50))
    clean = [*gae(rewards, values, mask, gamma=0.9, lam=0.8), token_rewards(SCORES, rewards, mask, kl_coef=0.3)]
    padded = [*gae(*dirty, wider, gamma=0.9, lam=0.8), token_rewards(SCORES, dirty[0], wider, kl_coef=0.3)]
    for a, b in zip(clean, padded, strict=True):
        assert torch.equal(a, b[:, :WIDTH])
        assert b[:, WIDTH:].count_nonzero() == 0


def test_arguments_are_not_written_to(case):
    before = [x.clone() for x in case]
    gae(*case, gamma=0.9, lam=0.8)
    token_rewards(torch.ones(len(LENGTHS), dtype=torch.float64), case[0], case[2], kl_coef=0.1)
    assert all(torch.equal(a, b) for a, b in zip(case, before, strict=True))


def test_half_precision_is_done_in_float32(case):
    rewards, values, mask = (x.bfloat16() if x.is_floating_point() else x for x in case)
    halves = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    singles = gae(rewards.float(), values.float(), mask, gamma=0.9, lam=0.8)
    assert all(torch.equal(a, b) for a, b in zip(halves, singles, strict=True))
    scores = torch.ones(len(LENGTHS))
    halves, singles = (token_rewards(scores, kl, mask, kl_coef=0.1) for kl in (rewards, rewards.float()))
    assert torch.equal(halves, singles)


@examples
@given(answers(1), st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.sampled_from([0.0, 0.05, 2.0]))
def test_token_rewards_by_their_definition(rows, scores, kl_coef):
    wanted = [[-kl_coef * kl for kl in row] for row in column(rows, 0)]
    for row, score in zip(wanted, scores, strict=False):
        row[-1] += score
    kl, mask = padded(rows)
    rewards = token_rewards(torch.tensor(scores[: len(rows)], dtype=torch.float64), kl, mask, kl_coef=kl_coef)
    assert same(unpadded(rewards, rows), wanted)


def test_an_answer_without_tokens_has_no_reward():
    rewards = token_rewards(torch.tensor([5.0]), torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool), kl_coef=0.5)
    assert rewards.tolist() == [[0.0] * 3]


def test_token_rewards_by_hand():
    kl = torch.tensor([[1.0, -2.0, NAN], [4.0, NAN, NAN], [1.0, 1.0, 1.0]], dtype=torch.float64)
    scores = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    rewards = token_rewards(scores, kl, length_mask(torch.tensor([2, 1, 3]), 3), kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 11.0, 0.0], [18.0, 0.0, 0.0], [-0.5, -0.5, 29.5]]


def test_token_rewards_by_hand_where_the_judge_scores_tokens():
    kl = torch.tensor([[1.0, -2.0, NAN], [4.0, NAN, NAN], [1.0, 1.0, 1.0]], dtype=torch.float64)
    scores = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    parts = torch.tensor([[7.0, 99.0, NAN], [NAN, NAN, NAN], [-2.0, 4.0, NAN]], dtype=torch.float64)
    mask = length_mask(torch.tensor([2, 1, 3]), 3)
    rewards = token_rewards(scores, kl, mask, kl_coef=0.5, token_scores=parts)
    assert rewards.tolist() == [[6.5, 4.0, 0.0], [18.0, 0.0, 0.0], [-2.5, 3.5, 27.5]]


def test_the_sum_of_token_rewards_is_the_objective(case):
    kl, _, mask = case
    rewards = token_rewards(SCORES, kl, mask, kl_coef=0.3)
    for b, length in enumerate(LENGTHS):
        wanted = SCORES[b].item() - 0.3 * sum(kl[b, :length].tolist())
        assert sum(rewards[b].tolist()) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("length", "lam"), [(1, 0.0), (19, 0.0), (20, 0.0), (40, 0.5), (100, 0.8), (500, 0.96), (1000, 0.98), (5000, 0.996)]
)
def test_length_adaptive_lambda_by_hand(length, lam):
    assert length_adaptive_lam(torch.tensor([length]), alpha=0.05).tolist() == pytest.approx([lam], abs=1e-6)


@examples
@given(st.lists(st.integers(1, 10_000), max_size=5), st.floats(0.001, 100))
def test_length_adaptive_lambda_by_its_definition(lengths, alpha):
    wanted = [min(max(1 - 1 / (alpha * length), 0.0), 1.0) for length in lengths]
    got = length_adaptive_lam(torch.tensor(lengths, dtype=torch.long), alpha=alpha)
    assert got.tolist() == pytest.approx(wanted, abs=1e-5)


def test_weights_of_length_adaptive_lambda_add_up_to_alpha_times_the_length():
    lam = length_adaptive_lam(torch.tensor([60]), alpha=0.25).item()
    assert sum(lam**k for k in range(2000)) == pytest.approx(0.25 * 60, rel=1e-4)


@pytest.mark.parametrize("alpha", [1e12, math.inf])
def test_length_adaptive_lambda_of_endless_alpha_is_monte_carlo(case, alpha):
    lam = length_adaptive_lam(torch.tensor(LENGTHS), alpha=alpha)
    assert lam.tolist() == [1.0] * len(LENGTHS)
    for a, b in zip(gae(*case, gamma=1.0, lam=lam), gae(*case, gamma=1.0, lam=1.0), strict=True):
        assert torch.equal(a, b)
