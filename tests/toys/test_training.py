"""The whole trainer against a known optimum: a short run comes closer to it than any trainer with a defect."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.toys.language import END, random_language
from benchmarks.toys.run import judged, table_trainer, toy_config, train_tables

from tether import algo
from tether.rewards.function import FunctionSource
from tether.train import trainer as trainer_module

LANGUAGE = random_language(3, 4, 2, seed=0, end_bias=-0.5)
SETTINGS = {
    "train.max_steps": 25,
    "train.rollout_batch_size": 256,
    "train.micro_batch_size": 256,
    "train.learning_rate": 0.15,
    "train.seed": 0,
}
MOST_REGRET = 0.03
"""Upper bound on the regret of a short run of a correct trainer; every defect here leaves more than twice that."""


def trained_policy(tmp_path, parts=None, **changes):
    """Log-probabilities of the policy after a run of 25 updates of 256 answers."""
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    trainer = table_trainer(LANGUAGE, toy_config(LANGUAGE, tmp_path, settings), **parts or {})
    trainer.fit()
    return trainer.roles.policy.logprobs()


def regret(tmp_path, parts=None, **changes):
    return LANGUAGE.regret(trained_policy(tmp_path, parts, **changes))


COMPLETE = {
    "defaults": {},
    "another seed": {"train__seed": 1},
    "λ 1": {"ppo__lam": 1.0},
    "mini-batches": {"ppo__num_mini_batches": 2, "ppo__num_ppo_epochs": 2, "train__micro_batch_size": 64},
    "RLOO": {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 8},
    "REINFORCE++": {"ppo__advantage_estimator": "reinforce_pp"},
}


@pytest.mark.parametrize("case", COMPLETE)
def test_a_short_run_comes_near_the_optimum(tmp_path, case):
    assert regret(tmp_path, **COMPLETE[case]) < MOST_REGRET


def test_kl_as_a_loss_goes_to_the_optimum_of_another_objective(tmp_path):
    """To the policy that in each state weighs the future score against the KL there, but not the future KL.

        π(a|s) ∝ π_ref(a|s) exp(Q(s, a) / β),      Q(s, a) = E[r | s, a]
    """
    own = LANGUAGE.ref_logprobs.clone()

    def value(x, text):
        if len(text) == LANGUAGE.max_length:
            return LANGUAGE.cut_score
        state = LANGUAGE.number(text)
        q = [LANGUAGE.scores[x, state].item(), *(value(x, (*text, letter)) for letter in (1, 2))]
        own[x, state] = (own[x, state] + torch.tensor(q) / LANGUAGE.beta).log_softmax(-1)
        return sum(p * u for p, u in zip(own[x, state].exp().tolist(), q, strict=True))

    for x in range(LANGUAGE.num_prompts):
        value(x, ())
    assert LANGUAGE.regret(own) > 0.5
    logprobs = trained_policy(tmp_path, ppo__kl_in="loss", ppo__kl_estimator="k3")
    towards_own = replace(LANGUAGE, ref_logprobs=own)
    start, end = (float(towards_own.figures(x).kl) for x in (LANGUAGE.ref_logprobs, logprobs))
    assert end < 0.1 * start, (start, end)


# Defects


def wrapped(monkeypatch, owner, name, change):
    """Replaces a function by ``change(original, *args, **kwargs)``."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def one_token_early(original, scores, kl, mask, *, kl_coef, token_scores):
    rewards = original(torch.zeros_like(scores), kl, mask, kl_coef=kl_coef, token_scores=token_scores)
    lengths = mask.sum(dim=1)
    rewards[torch.arange(len(mask)), (lengths - 2).clamp(min=0)] += scores
    return rewards


def on_the_first_token(original, scores, kl, mask, *, kl_coef, token_scores):
    rewards = original(torch.zeros_like(scores), kl, mask, kl_coef=kl_coef, token_scores=token_scores)
    rewards[:, 0] += scores
    return rewards


def without(token_is_masked):
    """``experience`` whose losses omit some tokens."""

    def change(original, *args, **kwargs):
        records = original(*args, **kwargs)
        return [replace(r, loss_mask=r.loss_mask & ~token_is_masked(r.batch)) for r in records]

    return change


def is_end(batch):
    return batch.token_ids[:, -batch.response_mask.shape[1] :] == END


def is_last(batch):
    return batch.response_mask.cumsum(1) == batch.lengths.unsqueeze(1)


def per_batch(prompts, completions):
    """Scores in standard deviations of the batch they came in."""
    scores = torch.tensor(judged(LANGUAGE, prompts, completions))
    return ((scores - scores.mean()) / scores.std()).tolist()


def averaged_over_tokens(original, scores, kl, mask, *, kl_coef, token_scores):
    return original(scores, kl / mask.sum(dim=1, keepdim=True), mask, kl_coef=kl_coef, token_scores=token_scores)


DEFECTS = {
    "score one token early": (algo, "token_rewards", one_token_early),
    "score on the first token": (algo, "token_rewards", on_the_first_token),
    "score lost": (algo, "token_rewards", lambda f, scores, *a, **k: f(torch.zeros_like(scores), *a, **k)),
    "score of another answer": (algo, "token_rewards", lambda f, scores, *a, **k: f(scores.flip(0), *a, **k)),
    "KL sign flipped": (algo, "kl_estimate", lambda f, *args: -f(*args)),
    "KL averaged over tokens": (algo, "token_rewards", averaged_over_tokens),
    "end token masked": (trainer_module, "experience", without(is_end)),
    "last token masked": (trainer_module, "experience", without(is_last)),
}
OTHER_OBJECTIVES = {
    "no KL": {"ppo__kl_coef": 0.0},
    "no rule for cut answers": {"ppo__missing_eos_score": None},
    "scores normalised by each batch": {"parts": {"rewards": FunctionSource(per_batch, "per batch")}},
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_keeps_the_trainer_from_it(tmp_path, monkeypatch, defect):
    wrapped(monkeypatch, *DEFECTS[defect])
    assert regret(tmp_path) > 2 * MOST_REGRET


@pytest.mark.parametrize("case", OTHER_OBJECTIVES)
def test_another_objective_leads_elsewhere(tmp_path, case):
    assert regret(tmp_path, **OTHER_OBJECTIVES[case]) > 2 * MOST_REGRET


def test_a_run_that_was_interrupted_is_not_measured(tmp_path, capsys):
    with pytest.raises(SystemExit, match="130"):
        train_tables(LANGUAGE, tmp_path, SETTINGS | {"train.max_runtime": 1e-9})
    assert capsys.readouterr().err.endswith("stopped by max_runtime of 1e-09 h: nothing was measured\n")
