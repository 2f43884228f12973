"""The pieces together: over an enumerable language, the expected update is the exact gradient of the objective.

The language has a stop token and two others, answers of at most three tokens, and one logit table a prefix. The
objective E[score] − β KL(π ‖ ref) is enumerated in one expression and differentiated by autograd; the update is the
probability-weighted sum of what ``token_rewards``, ``gae`` and ``policy_loss`` give for each answer.
"""

import itertools

import pytest
import torch

from tether.algo import gae, kl_estimate, length_mask, policy_loss, token_rewards

STOP, MAX_LENGTH, BETA = 0, 3, 0.3
ANSWERS = [
    answer
    for length in range(1, MAX_LENGTH + 1)
    for answer in itertools.product(range(3), repeat=length)
    if STOP not in answer[:-1] and (answer[-1] == STOP or length == MAX_LENGTH)
]
PREFIXES = sorted({answer[:t] for answer in ANSWERS for t in range(len(answer))})
STATES = torch.tensor(
    [[PREFIXES.index(a[:t]) for t in range(len(a))] + [0] * (MAX_LENGTH - len(a)) for a in ANSWERS]
)
TOKENS = torch.tensor([[*a, *[0] * (MAX_LENGTH - len(a))] for a in ANSWERS])
MASK = length_mask(torch.tensor([len(a) for a in ANSWERS]), MAX_LENGTH)


def token_logprobs(logits: torch.Tensor) -> torch.Tensor:
    chosen = logits.log_softmax(-1)[STATES, TOKENS]
    return torch.where(MASK, chosen, torch.zeros_like(chosen))


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    policy, ref = torch.randn(2, len(PREFIXES), 3, generator=generator, dtype=torch.float64)
    scores = torch.randn(len(ANSWERS), generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), token_logprobs(ref), scores


def exact_gradient(policy, ref_logprobs, scores):
    sequence = token_logprobs(policy).sum(1)
    objective = (sequence.exp() * (scores - BETA * (sequence - ref_logprobs.sum(1)))).sum()
    return torch.autograd.grad(objective, policy)[0]


def expected_update(policy, ref_logprobs, scores, values, lam, estimator="k1"):
    new = token_logprobs(policy)
    old = new.detach()
    rewards = token_rewards(scores, kl_estimate(old, ref_logprobs, estimator), MASK, kl_coef=BETA)
    advantages, _ = gae(rewards, values, MASK, gamma=1.0, lam=lam)
    loss = policy_loss(new, old, advantages, cliprange=0.2).sum(1)
    return -torch.autograd.grad((old.sum(1).exp() * loss).sum(), policy)[0]


def exact_values(policy, ref_logprobs, scores):
    """Mean of what is still to come over the answers that pass through a state, by enumeration."""
    old = token_logprobs(policy).detach()
    rewards = (BETA * (ref_logprobs - old)).tolist()
    weights, values = old.sum(1).exp().tolist(), {}
    for prefix in PREFIXES:
        through = [i for i, answer in enumerate(ANSWERS) if answer[: len(prefix)] == prefix]
        to_go = [sum(rewards[i][len(prefix) : len(ANSWERS[i])]) + scores[i].item() for i in through]
        mass = sum(weights[i] for i in through)
        values[prefix] = sum(weights[i] * x for i, x in zip(through, to_go, strict=True)) / mass
    table = torch.tensor([values[prefix] for prefix in PREFIXES], dtype=torch.float64)
    return table[STATES]


def test_the_language_is_complete(case):
    assert token_logprobs(case[0]).sum(1).exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert len({len(a) for a in ANSWERS}) == 3


def test_lambda_1_with_any_critic_gives_the_exact_gradient(case):
    values = torch.randn(len(PREFIXES), generator=torch.Generator().manual_seed(1), dtype=torch.float64)[STATES]
    update = expected_update(*case, values=values, lam=1.0)
    assert torch.allclose(update, exact_gradient(*case), atol=1e-12, rtol=0)


@pytest.mark.parametrize("lam", [0.0, 0.95])
def test_an_exact_critic_gives_the_exact_gradient_at_any_lambda(case, lam):
    update = expected_update(*case, values=exact_values(*case), lam=lam)
    assert torch.allclose(update, exact_gradient(*case), atol=1e-12, rtol=0)


def test_k3_in_the_reward_does_not(case):
    values = torch.zeros(len(PREFIXES), dtype=torch.float64)[STATES]
    update = expected_update(*case, values=values, lam=1.0, estimator="k3")
    assert not torch.allclose(update, exact_gradient(*case), atol=1e-2, rtol=0)
