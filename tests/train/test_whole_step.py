"""The trainer's parameters after its updates equal those of updates written a second time, row by row.

In float64: in float32 Adam turns the rounding of a gradient that is really 0 (GPT-2's key biases) into
steps. Llama's norms stay in float32 even so.
"""

from __future__ import annotations

import copy
import json
from itertools import count

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import EOS
from tests.train import reference
from tests.train.runs import tiny_run
from tether.generation.fake import FakeGenerator
from tether.machine.distributed import Dist
from tether.metrics.trackers import Trackers
from tether.models.build import build_roles
from tether.models.heads import ScalarHead
from tether.rewards.fake import FakeRewards
from tether.train import update
from tether.train.callbacks import Callbacks
from tether.train.display import NullDisplay
from tether.train.inputs import load_data
from tether.train.log import RunLog
from tether.train.parts import Parts
from tether.train.trainer import PPOTrainer
from tether.types import Completion, RewardOutput, Sampling

RESPONSES = [
    [10, 11, 12, EOS], [20, EOS], [13, 14, 15, 16, 17, 18], [21, 22, EOS],
    [EOS], [30, 31, 32, 33, EOS], [12, 12, 12, 12, 12, 12], [25, 26, EOS],
]  # fmt: skip
SCORES = [1.0, -0.5, 0.25, 2.0, -1.5, 0.75, 0.0, 1.25]
TEXTS = [
    {"prompt": "the cat sees", "completion": "a good dog"}, {"prompt": "you", "completion": "run"},
    {"prompt": "is it red", "completion": "it is not red and not blue but green"},
    {"prompt": "i like", "completion": "the sun"}, {"prompt": "two nice", "completion": "days and nights"},
]  # fmt: skip


def scores_of(batch):
    """Scores of the run's batch of that number: half a point more in each later one."""
    return [score + batch / 2 for score in SCORES]


def token_scores_of(batch):
    """The same where the judge scores tokens: a row an answer, of both signs."""
    return [
        [score * (t + 1) / 4 - 0.3 * t for t in range(len(response))]
        for score, response in zip(scores_of(batch), RESPONSES, strict=True)
    ]


DRAWN = [[-2.5 - 0.25 * ((i + 3 * t) % 9) for t in range(len(response))] for i, response in enumerate(RESPONSES)]
"""Log-probabilities with which another engine drew the responses, where a case says so; exact in float32."""


class Elsewhere(FakeGenerator):
    """Another engine."""

    def generate(self, requests, sampling):
        for i, completion in super().generate(requests, sampling):
            yield i, Completion(completion.token_ids, completion.finish_reason, DRAWN[i])


class TokenRewards:
    """A judge that scores tokens; keeps the batches that it was given."""

    def __init__(self):
        self.batches = []

    def score(self, batch):
        rows = token_scores_of(len(self.batches))
        self.batches.append(batch)
        return RewardOutput([sum(row) for row in rows], token_scores=rows)


def parts_for(config, *, by_token=False):
    """Models as the configuration has them, answers and scores as above."""
    data = load_data(config)
    tokenizer, prompts, ptx = data.tokenizer, data.prompts, data.ptx
    scores = (score for batch in count() for score in scores_of(batch))
    return Parts(
        roles=build_roles(config, tokenizer, device=Dist().device, autocast_dtype=None),
        generator=(FakeGenerator if config.sampling.vllm is None else Elsewhere)(RESPONSES),
        rewards=TokenRewards() if by_token else FakeRewards(lambda query, response: next(scores)),
        tokenizer=tokenizer,
        sampling=Sampling(config.sampling.response_length, config.sampling.temperature, frozenset({EOS})),
        prompts=prompts.prompts,
        eval_prompts=[],
        demonstrations=ptx.demonstrations if ptx else [],
    )


def trainer_for(config, tmp_path, parts=None):
    log = RunLog(config.output_dir, NullDisplay(), Trackers("none", "t", tmp_path, {}), logging_steps=1)
    parts = parts or parts_for(config)
    callbacks = Callbacks((), config, len(parts.prompts))
    return PPOTrainer(config, parts, read={}, log=log, callbacks=callbacks)


def moved_away(roles):
    """The roles in float64, with a policy that is not the reference and a critic that does not say 0 of everything."""
    names = {"policy": True, "reference": roles.has_reference, "value": roles.has_critic}
    for name in (name for name, is_there in names.items() if is_there):
        roles.role(name).model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in roles.role("policy").trained.values():
            p += 0.02 * torch.randn(p.shape, generator=generator)
        if roles.has_critic:
            head = roles.role("value").head.double()
            head.weight += 0.1 * torch.randn(head.weight.shape, generator=generator)


def settings(config):
    """What the reference needs of a configuration: every key of ``ppo``, so that a new one has to be in it too."""
    adam = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "ema_decay")
    algorithm = config.ppo.model_dump(exclude={"score_norm_samples"})
    return reference.Settings(
        **algorithm | {"whiten_advantages": config.ppo.whitens_advantages},
        **{name: getattr(config.train, name) for name in adam},
        num_generations=config.sampling.num_generations,
        response_length=config.sampling.response_length,
        temperature=config.sampling.temperature,
        learning_rate=config.learning_rate,
        value_learning_rate=config.value.learning_rate or config.learning_rate,
        warmup_steps=config.value.warmup_steps,
        detach=config.value.detach,
        num_updates=config.train.max_steps,
    )


class Twins:
    """The trainer and the reference, from the same weights through the same updates."""

    def __init__(self, config, tmp_path, monkeypatch, *, by_token=False):
        self.by_token = by_token
        parts = parts_for(config, by_token=by_token)
        moved_away(parts.roles)
        self.trainer, self.roles = trainer_for(config, tmp_path, parts), parts.roles
        self.start = {name: p.detach().clone() for name, p in parts.roles.role("policy").trained.items()}
        policy = copy.deepcopy(parts.roles.role("policy").model)
        frozen, critic = None, None
        if config.ppo.kl_coef > 0:
            frozen = AutoModelForCausalLM.from_pretrained(config.model.path).eval().double()
        if parts.roles.has_critic:
            value = parts.roles.role("value")
            trunk = policy if config.value_kind == "head" else copy.deepcopy(value.model)
            critic = trunk.base_model, torch.nn.Parameter(value.head.weight.detach().clone())
        self.reference = reference.Run(policy, frozen, critic, settings(config))
        self.steps, self.demonstrations = [], []
        monkeypatch.setattr(update, "mini_batches", self.noting_rows(update.mini_batches))
        monkeypatch.setattr(update, "demonstration_batches", self.noting_texts(update.demonstration_batches))

    def noting_rows(self, mini_batches):
        def noted(experience, *args):
            for mini_batch in mini_batches(experience, *args):
                self.steps.append([row for item in mini_batch for row in item.batch.rows])
                yield mini_batch

        return noted

    def noting_texts(self, demonstration_batches):
        known = {
            (*each.query_ids, *each.response_ids): (list(each.query_ids), list(each.response_ids))
            for each in self.trainer.parts.demonstrations
        }

        def noted(*args, **kwargs):
            batches = demonstration_batches(*args, **kwargs)
            ids = [batch.token_ids[i][batch.attention_mask[i]] for batch in batches for i in range(len(batch.rows))]
            self.demonstrations.append([known[tuple(row.tolist())] for row in ids])
            return batches

        return noted

    @property
    def batches(self):
        """What the trainer had scored so far."""
        return self.trainer.parts.rewards.batches

    def scored(self):
        """What the judge said of the last batch."""
        return (token_scores_of if self.by_token else scores_of)(len(self.batches) - 1)

    def freeze_moments(self):
        """Measures what scores are normalised by."""
        self.trainer.freeze_norms()
        scores = self.scored()
        self.reference.seen_scores += [sum(row) for row in scores] if self.by_token else scores

    def update(self):
        """Runs one update of both; returns the trainer's metrics."""
        self.steps.clear()
        self.demonstrations.clear()
        self.trainer.train_one_update()
        batch, metrics = self.batches[-1], self.trainer.log.updates[-1]
        assert batch.response_ids == RESPONSES
        self.check_order()
        drawn = [None] * len(DRAWN) if self.trainer.config.importance_cap is None else DRAWN
        rollouts = [
            reference.Rollout(query, response, ended=response[-1] == EOS, drawn=told)
            for query, response, told in zip(batch.query_ids, batch.response_ids, drawn, strict=True)
        ]
        taken = self.reference.update(rollouts, self.scored(), self.steps, self.demonstrations)
        assert metrics["update/num_steps"] == taken
        return metrics

    def check_order(self):
        """Every answer once an epoch, in steps of equal size."""
        ppo = self.trainer.config.ppo
        assert len(self.steps) == ppo.num_ppo_epochs * ppo.num_mini_batches
        assert {len(step) for step in self.steps} == {len(RESPONSES) // ppo.num_mini_batches}
        for first in range(0, len(self.steps), ppo.num_mini_batches):
            epoch = self.steps[first : first + ppo.num_mini_batches]
            assert sorted(row for step in epoch for row in step) == list(range(len(RESPONSES)))

    def check_equal(self):
        """Policy, its average, and critic are those of the reference."""
        policy = dict(self.reference.policy.named_parameters())
        assert_close(self.roles.role("policy").trained, policy)
        if self.trainer.average is not None:
            assert_close(self.trainer.average.state_dict(), self.reference.average)
        if self.reference.critic is not None:
            trunk, head_weight = self.reference.critic
            assert_close({"head": self.roles.role("value").head.weight}, {"head": head_weight})
            ours = self.roles.role("value").model.base_model
            assert_close(dict(ours.named_parameters()), dict(trunk.named_parameters()))

    def moved(self):
        """How far the policy moved, at most."""
        trained = self.roles.role("policy").trained
        return max(float((p.detach() - self.start[name]).abs().max()) for name, p in trained.items())


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name], p, atol=1e-7, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


OWN_CRITIC = {"kind": "llama", "tied": False, "value__kind": "model"}
HEAD = {"kind": "gpt2", "tied": True, "value__kind": "head"}
USUAL = {
    "ppo__kl_coef": 0.3, "ppo__num_ppo_epochs": 3, "train__max_grad_norm": None, "train__adam_epsilon": 1e-3,
}  # fmt: skip
"""What a case does not say otherwise. With gradients clipped, or a small ε, Adam would hide the scale of the loss."""
CASES = {
    "defaults": {"train__max_grad_norm": 1.0, "train__adam_epsilon": 1e-5},
    "settings of the optimizer": {
        "train__max_grad_norm": 0.3, "train__weight_decay": 0.1, "train__adam_beta1": 0.8, "train__adam_beta2": 0.95,
    },
    "k3, temperature, gamma, lambda": {
        "ppo__kl_estimator": "k3", "sampling__temperature": 0.7, "ppo__gamma": 0.9, "ppo__lam": 0.6,
    },
    "k2, mini-batches": {
        "ppo__kl_estimator": "k2", "ppo__num_mini_batches": 4, "train__micro_batch_size": 1,
    },
    "no whitening, no value clip": {"ppo__whiten_advantages": False, "ppo__cliprange_value": None},
    "rewards whitened, tight clips": {
        "ppo__whiten_rewards": True, "ppo__cliprange": 0.01, "ppo__cliprange_value": 0.001,
    },
    "KL k1 in the loss": {"ppo__kl_in": "loss"},
    "KL k2 in the loss, temperature": {
        "ppo__kl_in": "loss", "ppo__kl_estimator": "k2", "sampling__temperature": 1.5,
    },
    "KL k3 in the loss, no whitening": {
        "ppo__kl_in": "loss", "ppo__kl_estimator": "k3", "ppo__whiten_advantages": False,
    },
    "lambda of the critic, advantages clipped": {
        "ppo__lam": 0.7, "ppo__value_lam": 0.9, "ppo__gamma": 0.95, "ppo__advantage_clip": 0.8,
    },
    "length-adaptive lambda": {"ppo__lam_alpha": 0.6, "ppo__lam": 0.9},
    "length-adaptive lambda, lambda of the critic": {"ppo__lam_alpha": 0.6, "ppo__value_lam": 0.5},
    "running moments, penalty, overlong": {
        "ppo__score_norm": "running", "ppo__reward_clip": 0.9, "ppo__missing_eos_penalty": 0.6,
        "ppo__overlong_buffer": 3, "ppo__overlong_penalty": 0.7, "updates": 2,
    },
    "frozen moments, fixed score, overlong, cut answers masked": {
        "ppo__score_norm": "frozen", "ppo__score_norm_samples": 8, "ppo__reward_clip": 1.2,
        "ppo__missing_eos_score": -2.0, "ppo__overlong_buffer": 4, "ppo__mask_truncated": True, "updates": 2,
    },
    "frozen moments, fixed score, overlong": {
        "ppo__score_norm": "frozen", "ppo__score_norm_samples": 8, "ppo__reward_clip": 1.2,
        "ppo__missing_eos_score": -2.0, "ppo__overlong_buffer": 4,
    },
    "cut answers masked, KL in the loss, mean over answers": {
        "ppo__mask_truncated": True, "ppo__kl_in": "loss", "ppo__loss_reduction": "sequence_mean",
        "ppo__num_mini_batches": 2, "ppo__entropy_coef": 0.05,
    },
    "cut answers masked, steps of one answer": {
        "ppo__mask_truncated": True, "ppo__num_mini_batches": 8, "train__micro_batch_size": 1,
        "ppo__max_approx_kl": 10.0, "train__weight_decay": 0.1,
    },
    "upper clip, dual clip": {
        "ppo__cliprange": 0.05, "ppo__cliprange_high": 0.1, "ppo__dual_clip": 1.05, "ppo__num_mini_batches": 2,
        "train__learning_rate": 5e-3,
    },
    "drawn elsewhere, dual clip, mini-batches": {
        "sampling__vllm": {}, "ppo__importance_sampling_cap": 1.3, "ppo__dual_clip": 1.05, "ppo__num_mini_batches": 2,
        "ppo__cliprange": 0.05, "train__learning_rate": 5e-3,
    },
    "drawn elsewhere, KL in the loss, entropy": {
        "sampling__vllm": {}, "ppo__kl_in": "loss", "ppo__entropy_coef": 0.05, "ppo__mask_truncated": True,
        "train__micro_batch_size": 2,
    },
    "drawn elsewhere, no weights": {"sampling__vllm": {}, "ppo__importance_sampling_cap": None},
    "entropy, temperature": {"ppo__entropy_coef": 0.1, "sampling__temperature": 0.6},
    "fixed length, mini-batches": {
        "ppo__loss_reduction": "fixed_length", "ppo__num_mini_batches": 2, "ppo__entropy_coef": 0.02,
    },
    "mean over answers": {"ppo__loss_reduction": "sequence_mean"},
    "demonstrations, temperature": {
        "ppo__ptx_coef": 0.5, "sampling__temperature": 0.7, "ppo__num_mini_batches": 2, "train__micro_batch_size": 2,
    },
    "early stop by KL": {"ppo__max_approx_kl": 2e-3, "ppo__num_mini_batches": 2, "updates": 2},
    "early stop by ratio": {"ppo__max_ratio": 1.01, "ppo__num_mini_batches": 2, "updates": 2},
    "warm-up of the critic": {
        "value__warmup_steps": 1, "updates": 3, "ppo__num_ppo_epochs": 2, "ppo__num_mini_batches": 2,
        "ppo__ptx_coef": 0.2, "ppo__entropy_coef": 0.01, "train__ema_decay": 0.9, "train__weight_decay": 0.1,
    },
    "adaptive coefficient": {"ppo__kl_target": 0.25, "ppo__kl_horizon": 50, "updates": 3, "ppo__num_ppo_epochs": 1},
    "adaptive coefficient, warm-up of the critic": {
        "ppo__kl_target": 0.25, "ppo__kl_horizon": 50, "value__warmup_steps": 1, "updates": 3,
    },
    "moving average": {"train__ema_decay": 0.75, "updates": 2},
}
"""Options, and the number of updates where it is not 1."""
BY_TOKEN = {
    "scores of tokens": OWN_CRITIC | {"ppo__gamma": 0.9, "ppo__lam": 0.6},
    "scores of tokens, running moments, clip, penalty": HEAD | {
        "ppo__score_norm": "running", "ppo__reward_clip": 0.7, "ppo__missing_eos_penalty": 0.6, "ppo__lam": 0.5,
        "ppo__overlong_buffer": 3, "updates": 2,
    },
    "scores of tokens, frozen moments, fixed score": OWN_CRITIC | {
        "ppo__score_norm": "frozen", "ppo__score_norm_samples": 8, "ppo__missing_eos_score": -2.0, "ppo__lam": 0.5,
        "train__micro_batch_size": 1,
    },
    "scores of tokens, return to go": {
        "kind": "llama", "tied": False, "ppo__advantage_estimator": "reinforce_pp", "ppo__gamma": 0.9,
    },
}
"""Cases in which the judge scores tokens."""
REACHED = {
    "defaults": ("policy/clipfrac_low", "policy/clipfrac_high"),
    "rewards whitened, tight clips": ("policy/clipfrac_low", "policy/clipfrac_high", "val/clipfrac_avg"),
    "upper clip, dual clip": ("policy/clipfrac_low", "policy/clipfrac_high", "policy/dual_clipfrac"),
    "drawn elsewhere, dual clip, mini-batches": ("policy/dual_clipfrac", "rollout/importance_capped"),
}
"""Metrics that are above 0 where a case does what it is for."""
ONE_CRITIC = {
    "own critic, learning rate of its own": OWN_CRITIC | {"value__learning_rate": 3e-3},
    "head, detached": HEAD | {"value__detach": True},
}
CRITIC_FREE = {
    "rloo, pairs": {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 2},
    "rloo, fours, whitened": {
        "ppo__advantage_estimator": "rloo", "sampling__num_generations": 4, "ppo__whiten_advantages": True,
    },
    "grpo, KL in the loss": {
        "ppo__advantage_estimator": "grpo", "sampling__num_generations": 4, "ppo__kl_in": "loss",
        "ppo__kl_estimator": "k3", "ppo__loss_reduction": "sequence_mean", "ppo__advantage_clip": 1.0,
    },
    "grpo, KL in the reward": {
        "ppo__advantage_estimator": "grpo", "sampling__num_generations": 4, "ppo__missing_eos_penalty": 0.5,
    },
    "reinforce_pp": {"ppo__advantage_estimator": "reinforce_pp", "ppo__gamma": 0.9},
    "reinforce_pp, several answers": {
        "ppo__advantage_estimator": "reinforce_pp", "sampling__num_generations": 2, "ppo__whiten_advantages": False,
    },
    "no KL": {"ppo__kl_coef": 0.0, "ppo__advantage_estimator": "grpo", "sampling__num_generations": 2},
}
ALL = (
    {f"{name}, {kind}": options | sharing for name, options in CASES.items()
     for kind, sharing in {"own critic": OWN_CRITIC, "head": HEAD}.items()}
    | ONE_CRITIC
    | {name: {"kind": "llama", "tied": False} | options for name, options in CRITIC_FREE.items()}
    | BY_TOKEN
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models that are saved once for all cases, and demonstrations."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    return folder


@pytest.mark.parametrize("case", ALL)
def test_parameters_equal_updates_written_a_second_time(folder, tmp_path, monkeypatch, case):
    options = USUAL | ALL[case]
    updates = options.pop("updates", 1)
    if "ppo__ptx_coef" in options:
        options["data__ptx"] = str(folder / "ptx.jsonl")
    config = tiny_run(folder, output_dir=str(tmp_path), train__max_steps=updates, **options)
    twins, rows = Twins(config, tmp_path, monkeypatch, by_token=case in BY_TOKEN), []
    if config.ppo.score_norm == "frozen":
        twins.freeze_moments()
    for number in range(updates):
        rows.append(twins.update())
        twins.check_equal()
        if number < config.value.warmup_steps:
            assert twins.moved() == 0.0
    assert twins.moved() > 1e-3, "the updates are too small for this test to mean anything"
    for name in REACHED.get(case.rpartition(", ")[0], ()):
        assert any(row[name] > 0 for row in rows), f"{name}: the case has nothing of what it is for"
    if case.startswith("early stop"):
        taken = [row["update/num_steps"] for row in rows]
        assert all(1 <= number < 6 for number in taken) and max(taken) > 1


def test_critic_head_is_a_scalar_head(tmp_path):
    trainer = trainer_for(tiny_run(tmp_path, value__kind="model"), tmp_path)
    assert isinstance(trainer.roles.role("value").head, ScalarHead)
