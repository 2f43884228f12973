"""Token rewards and advantages against their definitions in plain Python floats."""

import math

import pytest
import torch

from tether.algo import gae, length_mask, token_rewards

NAN = math.nan
LENGTHS = [5, 1, 3]
WIDTH = 6


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


def test_nothing_comes_back_from_the_padding(case):
    rewards, values, mask = case
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for poison in (NAN, math.inf, 1e6):
        dirty = gae(rewards.where(mask, poison), values.where(mask, poison), mask, gamma=0.9, lam=0.8)
        assert all(torch.equal(a, b) for a, b in zip(dirty, clean, strict=True))


def test_more_padding_changes_nothing(case):
    rewards, values, mask = case
    wider = (torch.nn.functional.pad(x, (0, 3)) for x in case)
    clean, padded = gae(rewards, values, mask, gamma=0.9, lam=0.8), gae(*wider, gamma=0.9, lam=0.8)
    assert all(torch.equal(a, b[:, :WIDTH]) for a, b in zip(clean, padded, strict=True))


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


def test_token_rewards_by_hand():
    kl = torch.tensor([[1.0, -2.0, NAN], [4.0, NAN, NAN], [1.0, 1.0, 1.0]], dtype=torch.float64)
    scores = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    rewards = token_rewards(scores, kl, length_mask(torch.tensor([2, 1, 3]), 3), kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 11.0, 0.0], [18.0, 0.0, 0.0], [-0.5, -0.5, 29.5]]


def test_the_sum_of_token_rewards_is_the_objective(case):
    kl, _, mask = case
    scores = torch.tensor([3.0, -1.0, 0.25], dtype=torch.float64)
    rewards = token_rewards(scores, kl, mask, kl_coef=0.3)
    for b, length in enumerate(LENGTHS):
        wanted = scores[b].item() - 0.3 * sum(kl[b, :length].tolist())
        assert sum(rewards[b].tolist()) == pytest.approx(wanted, abs=1e-12)
