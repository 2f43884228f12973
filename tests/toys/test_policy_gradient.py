"""The gradient of the trainer's first step is the exact gradient of the objective.

The policy's probabilities are multiples of a quarter, so that a rollout batch can hold every answer exactly in
proportion to its probability: 64 answers per prompt, of up to three tokens. Over such a batch a sum is an expectation
without noise. The other side is autograd through the exact objective, which involves no log-probability ratios, token
rewards, advantages or masks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.toys.language import END, random_language
from benchmarks.toys.run import table_trainer, toy_config

from tether.generation.fake import FakeGenerator

EACH = 64
"""Number of answers to each prompt in the batch."""


def quarters(language):
    """Probabilities ½, ¼, ¼ in an order that differs from state to state."""
    orders = [torch.randperm(3, generator=torch.Generator().manual_seed(i)) for i in range(2 * language.num_prefixes)]
    rows = torch.stack([torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)[order] for order in orders])
    return rows.view(language.ref_logprobs.shape)


LANGUAGE = random_language(3, 3, 2, seed=2, end_bias=0.0)
LANGUAGE = replace(LANGUAGE, scores=(LANGUAGE.scores * 64).round() / 64)  # exact in float32
PROBABILITIES = quarters(LANGUAGE)


def answers_to(prompt):
    """Every answer in proportion to its probability."""
    listed, unfinished = [], [((), 1.0)]
    while unfinished:
        tokens, p = unfinished.pop()
        if tokens and (tokens[-1] == END or len(tokens) == LANGUAGE.max_length):
            assert (p * EACH).is_integer()
            listed += [list(tokens)] * int(p * EACH)
            continue
        row = PROBABILITIES[prompt, LANGUAGE.number(tokens)].tolist()
        unfinished += [((*tokens, token), p * row[token]) for token in range(3)]
    assert len(listed) == EACH
    return listed


def exact_values(ref_logprobs):
    """Expected remaining reward in each state, by recursion."""
    values = torch.zeros(LANGUAGE.num_prompts, LANGUAGE.num_prefixes, dtype=torch.float64)

    def value(x, letters):
        state, total = LANGUAGE.number(letters), 0.0
        for token, p in enumerate(PROBABILITIES[x, state].tolist()):
            kl = PROBABILITIES[x, state, token].log().item() - ref_logprobs[x, state, token].item()
            if token == END:
                after = LANGUAGE.scores[x, state].item()
            elif len(letters) + 1 == LANGUAGE.max_length:
                after = LANGUAGE.cut_score
            else:
                after = value(x, (*letters, token))
            total += p * (after - LANGUAGE.beta * kl)
        values[x, state] = total
        return total

    for x in range(LANGUAGE.num_prompts):
        value(x, ())
    return values


def gradients(tmp_path, critic="zero", **changes):
    """The gradient of the policy's first step, and the exact gradient of the objective."""
    settings = {
        "train.max_steps": 1,
        "train.rollout_batch_size": 2 * EACH,
        "train.micro_batch_size": 32,
        "train.max_grad_norm": None,
        "train.learning_rate": 1e-3,
        "ppo.num_ppo_epochs": 1,
        "ppo.whiten_advantages": False,
        "ppo.lam": 1.0,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    if settings.get("ppo.advantage_estimator", "gae") != "gae":
        del settings["ppo.lam"]
    config = toy_config(LANGUAGE, tmp_path, settings)
    listings = {LANGUAGE.query(x): iter(answers_to(x)) for x in range(LANGUAGE.num_prompts)}
    generator = FakeGenerator(lambda request: next(listings[tuple(request.token_ids)]))
    trainer = table_trainer(LANGUAGE, config, generator=generator)
    policy, reference = (trainer.roles.role(name).model.double() for name in ("policy", "reference"))
    temperature = config.sampling.temperature
    ref_logprobs = (LANGUAGE.ref_logprobs / temperature).log_softmax(-1)
    with torch.no_grad():
        policy.rows.weight.copy_(temperature * PROBABILITIES.log())
        reference.rows.weight.copy_(LANGUAGE.ref_logprobs)
        if trainer.roles.has_critic:
            weight = trainer.roles.role("value").head.double().weight
            if critic == "exact":
                weight.copy_(exact_values(ref_logprobs).view(1, -1))
            elif critic == "random":
                weight.normal_(generator=torch.Generator().manual_seed(3))
    taken = []
    trainer.optimizers[0].optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: taken.append(policy.rows.weight.grad.clone())
    )
    logits = policy.rows.weight.detach().clone().requires_grad_()
    metrics = trainer.step()
    assert metrics["val/first_ratio_error"] == 0.0
    objective = replace(LANGUAGE, ref_logprobs=ref_logprobs).figures((logits / temperature).log_softmax(-1)).objective
    num_tokens = sum(len(answer) for x in range(LANGUAGE.num_prompts) for answer in answers_to(x))
    (step,) = taken
    return step * num_tokens / (2 * EACH), -torch.autograd.grad(objective, logits)[0]


def cosine(a, b):
    return (a * b).sum().item() / (a.norm() * b.norm()).item()


CASES = {
    "critic at 0": {},
    "any critic": {"critic": "random"},
    "exact critic, λ 0.95": {"critic": "exact", "ppo__lam": 0.95},
    "exact critic, λ 0": {"critic": "exact", "ppo__lam": 0.0},
    "critic's own λ": {"critic": "random", "ppo__value_lam": 0.5},
    "temperature": {"critic": "exact", "ppo__lam": 0.95, "sampling__temperature": 0.7},
    "return to go": {"ppo__advantage_estimator": "reinforce_pp"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_has_the_exact_gradient(tmp_path, case):
    step, exact = gradients(tmp_path, **CASES[case])
    assert exact.norm() > 0.1
    assert cosine(step, exact) >= 1 - 1e-8
    torch.testing.assert_close(step, exact, atol=1e-12, rtol=0)


def test_rloo_has_the_exact_gradient_times_n_over_n_minus_1(tmp_path):
    """An answer's own return is in the mean of all but not in that of the others, and the batch is the whole
    distribution."""
    changes = {"ppo__advantage_estimator": "rloo", "sampling__num_generations": EACH}
    step, exact = gradients(tmp_path, **changes)
    torch.testing.assert_close(step, exact * EACH / (EACH - 1), atol=1e-12, rtol=0)


def test_a_loss_over_the_longest_length_has_the_same_direction(tmp_path):
    step, exact = gradients(tmp_path, ppo__loss_reduction="fixed_length")
    assert cosine(step, exact) >= 1 - 1e-8


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_as_a_loss_has_the_gradient_of_the_kl_in_the_states_that_were_visited(tmp_path, estimator):
    """Not the gradient of the whole KL: an action is not penalised for leading to states of large KL."""
    step, _ = gradients(tmp_path, ppo__kl_in="loss", ppo__kl_estimator=estimator)
    logits = PROBABILITIES.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    visits = torch.zeros(LANGUAGE.num_prompts, LANGUAGE.num_prefixes, dtype=torch.float64)
    for x in range(LANGUAGE.num_prompts):
        for answer in answers_to(x):
            for t in range(len(answer)):
                visits[x, LANGUAGE.number(answer[:t])] += 1 / (2 * EACH)
    kl = (logprobs.exp() * (logprobs - LANGUAGE.ref_logprobs)).sum(-1)
    objective = LANGUAGE.figures(logprobs).reward - LANGUAGE.beta * (visits * kl).sum()
    exact = -torch.autograd.grad(objective, logits)[0]
    assert cosine(step, exact) >= 1 - 1e-8
    torch.testing.assert_close(step, exact, atol=1e-12, rtol=0)


BIASED = {
    "a wrong critic, λ 0.95": {"critic": "random", "ppo__lam": 0.95},
    "k3 in the reward": {"ppo__kl_estimator": "k3"},
    "discount": {"ppo__gamma": 0.95},
    "a mean over each answer": {"ppo__loss_reduction": "sequence_mean"},
    "KL as a loss": {"ppo__kl_in": "loss"},
}


@pytest.mark.parametrize("case", BIASED)
def test_what_is_biased_shows(tmp_path, case):
    """Settings with another expected gradient: the check above can fail."""
    step, exact = gradients(tmp_path, **BIASED[case])
    assert cosine(step, exact) < 1 - 1e-5
