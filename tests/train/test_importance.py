"""Weights of tokens that another engine drew: from what it told to the gradient, and what is logged of them."""

import math

import pytest
import torch

from tests.tiny import EOS
from tests.train.runs import tiny_run
from tests.train.trainers import noted_gradients, trainer_of
from tether.generation.fake import FakeGenerator
from tether.metrics.reduce import Metrics
from tether.rewards.fake import FakeRewards
from tether.train.batches import halved
from tether.types import Completion

ANSWERS = [[10, 11, 12, EOS], [20, EOS], [13, 14, 15, 16, 17, 18], [21, 22, EOS]]
CAP = 1.5


class Elsewhere(FakeGenerator):
    """Tells log-probabilities that are not the policy's, for all answers but the second."""

    def generate(self, requests, sampling):
        for i, completion in super().generate(requests, sampling):
            told = [-3.0 - 0.25 * t - 0.1 * i for t in range(len(completion.token_ids))]
            yield i, Completion(completion.token_ids, completion.finish_reason, None if i == 1 else told)


def trainer(folder, **changes):
    changes = {"sampling__vllm": {}, "ppo__importance_sampling_cap": CAP, "ppo__num_ppo_epochs": 1} | changes
    config = tiny_run(folder, train__rollout_batch_size=4, train__micro_batch_size=2, **changes)
    rewards = FakeRewards(lambda query, response: float(len(response)))
    return trainer_of(config, rewards, Elsewhere(ANSWERS), stop_ids=(EOS,))


def prepared(trainer):
    """One update's answers, its experience, and its metrics."""
    metrics = Metrics()
    answers = trainer.rollout(metrics)
    judged, _ = trainer.score(answers, metrics)
    experience = trainer.experience(answers, judged, metrics)
    return answers, experience, metrics


def test_each_tokens_weight_is_its_capped_ratio_to_what_the_engine_told(tmp_path):
    answers, experience, metrics = prepared(trainer(tmp_path))
    ratios, weights = [], []
    for item in experience:
        for row, number in enumerate(item.batch.rows):
            completion = answers.completions[number]
            for t in range(len(completion.token_ids)):
                old, weight = float(item.logprobs[row, t]), float(item.importance[row, t])
                ratio = 1.0 if completion.logprobs is None else math.exp(old - completion.logprobs[t])
                assert weight == pytest.approx(min(ratio, CAP), rel=1e-5)
                if completion.logprobs is not None:
                    ratios.append(ratio), weights.append(weight)
    assert {weight == CAP for weight in weights} == {True, False}
    logged = metrics.compute()
    assert logged["rollout/importance_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert logged["rollout/importance_max"] == pytest.approx(max(ratios), rel=1e-5)
    assert logged["rollout/importance_capped"] == sum(ratio > CAP for ratio in ratios) / len(ratios)


@pytest.mark.parametrize("changes", [{}, {"model__lora": {"r": 2}}, {"value__kind": "head", "ppo__vf_coef": 1e-9}])
def test_the_gradient_is_that_of_the_weighted_loss(tmp_path, monkeypatch, changes):
    """At ratio 1, Σ w A ∇ log π over the tokens, by another forward."""
    run = trainer(tmp_path, train__max_grad_norm=None, **changes)
    seen = noted_gradients(monkeypatch)
    answers, experience, metrics = prepared(run)
    policy = run.roles.role("policy")
    total, count = 0.0, sum(len(completion.token_ids) for completion in answers.completions)
    for item in experience:
        for row, number in enumerate(item.batch.rows):
            query, ids = answers.prompts[number].token_ids, answers.completions[number].token_ids
            logits = policy.model(torch.tensor([[*query, *ids]])).logits[0, len(query) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(ids)), ids]
            gains = (item.importance * item.advantages)[row, : len(ids)]
            total = total - (gains * logprobs).sum() / count
    wanted = torch.autograd.grad(total, list(policy.trained.values()))
    run.update(experience, answers, metrics)
    (gradient,) = [each for name, each in seen if name == "policy"]
    wanted = torch.cat([each.flatten() for each in wanted])
    torch.testing.assert_close(gradient[: len(wanted)], wanted, atol=1e-6, rtol=1e-4)


def test_halves_of_a_micro_batch_keep_their_weights(tmp_path):
    _, experience, _ = prepared(trainer(tmp_path))
    for item in experience:
        assert torch.equal(torch.cat([half.importance for half in halved(item)]), item.importance)


@pytest.mark.parametrize("changes", [{"sampling__vllm": None, "ppo__importance_sampling_cap": 2.0},
                                     {"ppo__importance_sampling_cap": None}])  # fmt: skip
def test_without_another_engine_or_a_cap_there_are_none(tmp_path, changes):
    _, experience, metrics = prepared(trainer(tmp_path, **changes))
    assert all(item.importance is None for item in experience)
    names = metrics.compute().keys()
    assert "rollout/logprob_gap" in names and not any("importance" in name for name in names)
