"""The pieces together: over an enumerable language, the expected update is the exact gradient of the objective.

The language has a stop token and two others, answers of at most three tokens, and one logit table a prefix. The
objective E[score] − β KL(π ‖ ref) is enumerated in one expression and differentiated by autograd; the update is the
probability-weighted sum of what ``token_rewards``, an advantage and ``policy_loss`` give for each answer.
"""

import itertools

import pytest
import torch

from tether.algo import (
    gae,
    grpo,
    importance_weights,
    kl_estimate,
    kl_loss,
    length_mask,
    normaliser,
    policy_loss,
    reduced,
    reinforce_pp,
    rloo,
    token_rewards,
)

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


def tables():
    """Logits of the policy and of the reference for every prefix, and a score for every answer."""
    generator = torch.Generator().manual_seed(0)
    policy, ref = torch.randn(2, len(PREFIXES), 3, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), ref, torch.randn(len(ANSWERS), generator=generator, dtype=torch.float64)


@pytest.fixture
def case():
    policy, ref, scores = tables()
    return policy, token_logprobs(ref), scores


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


def cosine(a, b):
    return ((a * b).sum() / (a.norm() * b.norm())).item()


def test_returns_to_go_without_a_critic_give_the_exact_gradient(case):
    policy, ref_logprobs, scores = case
    new = token_logprobs(policy)
    old = new.detach()
    rewards = token_rewards(scores, kl_estimate(old, ref_logprobs, "k1"), MASK, kl_coef=BETA)
    loss = policy_loss(new, old, reinforce_pp(rewards, MASK, gamma=1.0), cliprange=0.2).sum(1)
    update = -torch.autograd.grad((old.sum(1).exp() * loss).sum(), policy)[0]
    assert torch.allclose(update, exact_gradient(*case), atol=1e-12, rtol=0)


def expected_update_of_pairs(policy, ref_logprobs, scores, estimator):
    """The expectation over every two answers that the policy may give to the prompt."""
    pairs = torch.cartesian_prod(torch.arange(len(ANSWERS)), torch.arange(len(ANSWERS))).reshape(-1)
    new = token_logprobs(policy)[pairs]
    old = new.detach()
    rewards = token_rewards(scores[pairs], kl_estimate(old, ref_logprobs[pairs], "k1"), MASK[pairs], kl_coef=BETA)
    loss = policy_loss(new, old, estimator(rewards, MASK[pairs], num_generations=2), cliprange=0.2)
    weights = old.sum(1).reshape(-1, 2).sum(1).exp()
    return -torch.autograd.grad((weights * loss.sum(1).reshape(-1, 2).sum(1) / 2).sum(), policy)[0]


def test_rloo_gives_the_exact_gradient(case):
    assert torch.allclose(expected_update_of_pairs(*case, rloo), exact_gradient(*case), atol=1e-12, rtol=0)


def test_grpo_does_not(case):
    assert cosine(expected_update_of_pairs(*case, grpo), exact_gradient(*case)) < 0.99


def test_a_token_mean_keeps_the_direction_and_a_sequence_mean_does_not(case):
    """In an endless batch, where each answer is there as often as its probability says."""
    policy, ref_logprobs, scores = case
    wanted, updates = exact_gradient(*case), {}
    for how in ("token_mean", "sequence_mean", "fixed_length"):
        new = token_logprobs(policy)
        old = new.detach()
        rewards = token_rewards(scores, kl_estimate(old, ref_logprobs, "k1"), MASK, kl_coef=BETA)
        losses = policy_loss(new, old, reinforce_pp(rewards, MASK, gamma=1.0), cliprange=0.2)
        weights = old.sum(1).exp().tolist()
        rows = [(losses[i : i + 1], MASK[i : i + 1]) for i in range(len(ANSWERS))]
        total = sum(w * reduced(*row, how=how) for w, row in zip(weights, rows, strict=True))
        count = sum(w * normaliser(m, how=how, max_length=5) for w, (_, m) in zip(weights, rows, strict=True))
        updates[how] = -torch.autograd.grad(total / count, policy)[0]
    length = sum(w * len(a) for w, a in zip(weights, ANSWERS, strict=True))
    assert torch.allclose(updates["token_mean"] * length, wanted, atol=1e-6, rtol=0)
    assert torch.allclose(updates["fixed_length"] * 5, wanted, atol=1e-6, rtol=0)
    assert cosine(updates["sequence_mean"], wanted) < 0.99


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_as_a_loss_gives_the_gradient_of_each_tokens_kl_and_not_of_the_sequences(estimator):
    """Off policy: states are those of π_old, what is measured in them is π_new."""
    policy, ref, _ = tables()
    ref_logprobs = token_logprobs(ref)
    shift = torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    old, new = token_logprobs(policy + shift).detach(), token_logprobs(policy)
    weights = old.sum(1).exp()
    loss = torch.where(MASK, kl_loss(new, old, ref_logprobs, estimator), 0.0).sum(1)
    got = torch.autograd.grad((weights * loss).sum(), policy)[0]

    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for answer, weight in zip(ANSWERS, weights, strict=True):
        for t in range(len(answer)):
            visits[PREFIXES.index(answer[:t])] += weight
    logs, ref_logs = policy.log_softmax(-1), ref.log_softmax(-1)
    of_tokens = (visits * (logs.exp() * (logs - ref_logs)).sum(-1)).sum()
    assert torch.allclose(got, torch.autograd.grad(of_tokens, policy)[0], atol=1e-12, rtol=0)

    sequence = token_logprobs(policy).sum(1)
    of_sequences = (sequence.exp() * (sequence - ref_logprobs.sum(1))).sum()
    assert cosine(got, torch.autograd.grad(of_sequences, policy)[0]) < 0.99


def drawn_elsewhere(policy):
    """Log-probabilities of an engine whose logits are not quite the policy's."""
    shift = 0.5 * torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (policy.detach() + shift).log_softmax(-1)


def weighted_update(policy, tables_of_engine, gains, cap):
    """The expected update over answers that an engine drew, where each token's advantage is that of its state.

    Args:
        gains: advantage of each token in each state.
        cap: None for no weights.
    """
    new = token_logprobs(policy)
    old, rollout = new.detach(), token_logprobs(tables_of_engine)
    advantages = torch.where(MASK, gains[STATES, TOKENS], 0.0)
    loss = policy_loss(new, old, advantages, cliprange=0.2)
    if cap is not None:
        loss = importance_weights(old, rollout, cap=cap) * loss
    weights = rollout.sum(1).exp()
    return -torch.autograd.grad((weights * torch.where(MASK, loss, 0.0).sum(1)).sum(), policy)[0]


def wanted_update(policy, tables_of_engine, gains, cap):
    """Over the states that the engine visits: Σ_a min(π(a), cap μ(a)) A(a) ∇ log π(a), enumerated."""
    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for answer, weight in zip(ANSWERS, token_logprobs(tables_of_engine).sum(1).exp(), strict=True):
        for t in range(len(answer)):
            visits[PREFIXES.index(answer[:t])] += weight
    logs = policy.log_softmax(-1)
    masses = torch.minimum(logs.detach().exp(), cap * tables_of_engine.exp())
    return torch.autograd.grad((visits[:, None] * masses * gains * logs).sum(), policy)[0]


@pytest.mark.parametrize("cap", [2.0, 1.2, 1e9])
def test_importance_weights_make_an_update_that_of_the_policys_own_tokens_up_to_the_cap(cap):
    policy, _, _ = tables()
    engine = drawn_elsewhere(policy)
    gains = torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    got = weighted_update(policy, engine, gains, cap)
    assert torch.allclose(got, wanted_update(policy, engine, gains, cap), atol=1e-12, rtol=0)
    exact = wanted_update(policy, engine, gains, 1e9)
    largest = (policy.detach().log_softmax(-1) - engine).exp().max()
    assert torch.allclose(got, exact, atol=1e-12, rtol=0) == bool(cap > largest)
    unweighted = weighted_update(policy, engine, gains, None)
    assert not torch.allclose(unweighted, exact, atol=1e-2, rtol=0)
    assert (got - exact).norm() < (unweighted - exact).norm()
