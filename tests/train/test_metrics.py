"""Every number that an update or an evaluation logs is the one worked out by hand, and padding does not move it.

In float64, where the two agree to the last digits; Llama's and Qwen2's norms, and scores, stay in float32 even so.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import EOS
from tests.train import by_hand
from tests.train.reference import Rollout
from tests.train.runs import tiny_run
from tests.train.test_whole_step import settings
from tests.train.trainers import (
    collate_by,
    move,
    noted_gradients,
    noted_mini_batches,
    trainer_of,
    with_more_pads,
    with_random_pads,
)
from tether.algo import ScoreMoments
from tether.generation.fake import FakeGenerator
from tether.metrics.reduce import Metrics
from tether.train.experience import Outputs
from tether.train.measure import measure_objective
from tether.train.rollout import Answers
from tether.types import Completion, RewardOutput

ROOT = Path(__file__).parents[2]
RESPONSES = [
    [10, 11, 12, EOS], [20, EOS], [13, 14, 15, 16, 17, 18], [21, 22, EOS],
    [EOS], [30, 31, 32, 33, EOS], [12, 12, 12, 12, 12, 12], [25, 26, EOS],
]  # fmt: skip
KINDNESS = [1.0, -0.5, 0.25, 2.0, -1.5, 0.75, 0.0, 1.25]
BREVITY = [0.5, 1.5, -2.0, 1.0, 3.0, 0.0, -2.5, 0.25]
DEMONSTRATIONS = [
    {"prompt": "the cat sees", "completion": "a good dog"}, {"prompt": "you", "completion": "run"},
    {"prompt": "is it red", "completion": "it is not red and not blue but green"},
    {"prompt": "i like", "completion": "the sun"},
]  # fmt: skip
"""As many as a mini-batch has answers: every optimizer step has them all."""
PHASES = ("rollout", "reward", "logprobs", "values", "reference", "update")
COSTS = {"eps", "time/step_s", "time/rest_s", *(f"time/{phase}_s" for phase in PHASES)}
COSTS |= {"tokens/read", "tokens/update", "flops/update", "speed/rollout", "speed/update", "speed/mfu"}
COSTS |= {f"memory/{phase}" for phase in PHASES}
"""Worked out by tests/train/test_costs.py."""
OF_FLOAT16 = {f"{name}/{what}" for name in ("policy", "value") for what in ("loss_scale", "num_overflows")}
"""Worked out by tests/train/test_fp16.py."""
OF_VLLM = {f"rollout/importance_{what}" for what in ("mean", "max", "capped")}
"""Worked out by tests/train/test_importance.py."""
OPTIONAL = {"time/values_s", "memory/values", "time/reference_s", "memory/reference"}
"""Those of passes that not every run has."""

COMMON = {
    "sampling__temperature": 0.7, "ppo__gamma": 0.9, "ppo__lam": 0.6, "ppo__kl_coef": 0.3, "ppo__num_ppo_epochs": 2,
    "ppo__num_mini_batches": 2, "ppo__cliprange_value": 0.05, "train__micro_batch_size": 2,
    "train__learning_rate": 1e-2, "train__max_steps": 2,
}  # fmt: skip
MODEL, HEAD = {"kind": "gpt2", "value__kind": "model"}, {"kind": "gpt2", "value__kind": "head"}
RLOO = {
    "kind": "gpt2", "ppo__advantage_estimator": "rloo", "sampling__num_generations": 2, "ppo__lam": 0.95,
    "ppo__cliprange_value": 0.2,
}  # fmt: skip
CASES = {
    "critic model": MODEL | {"value__learning_rate": 2e-2},
    "head": HEAD,
    "llama": MODEL | {"kind": "llama"},
    "qwen2": HEAD | {"kind": "qwen2"},
    "k2, coefficient adapts": MODEL | {
        "ppo__kl_estimator": "k2", "ppo__kl_target": 0.1, "ppo__kl_horizon": 20, "train__max_steps": 3,
    },
    "running scores": MODEL | {
        "ppo__score_norm": "running", "ppo__reward_clip": 1.1, "ppo__missing_eos_penalty": 0.5,
        "ppo__overlong_buffer": 3, "ppo__overlong_penalty": 0.7, "ppo__kl_estimator": "k3",
    },
    "frozen scores": HEAD | {"ppo__score_norm": "frozen", "ppo__missing_eos_score": -2.0, "ppo__value_lam": 0.9},
    "KL k1 in the loss": MODEL | {"ppo__kl_in": "loss", "ppo__entropy_coef": 0.05},
    "KL k2 in the loss, cut answers masked": HEAD | {
        "ppo__kl_in": "loss", "ppo__kl_estimator": "k2", "ppo__mask_truncated": True,
        "ppo__loss_reduction": "sequence_mean",
    },
    "KL k3 in the loss, clips": MODEL | {
        "ppo__kl_in": "loss", "ppo__kl_estimator": "k3", "ppo__cliprange": 0.05, "ppo__cliprange_high": 0.1,
        "ppo__dual_clip": 1.2, "ppo__advantage_clip": 0.9, "ppo__loss_reduction": "fixed_length",
    },
    "demonstrations": HEAD | {"ppo__ptx_coef": 0.5},
    "warm-up, critic model": MODEL | {"value__warmup_steps": 1},
    "warm-up, head": HEAD | {"value__warmup_steps": 1},
    "early stop": MODEL | {"ppo__max_approx_kl": 0.005},
    "average": HEAD | {"train__ema_decay": 0.5},
    "rloo": RLOO | {"ppo__gamma": 1.0},
    "grpo without a reference": RLOO | {"ppo__gamma": 1.0, "ppo__advantage_estimator": "grpo", "ppo__kl_coef": 0.0},
    "reinforce_pp": RLOO | {"ppo__advantage_estimator": "reinforce_pp", "ppo__whiten_rewards": True},
}  # fmt: skip
REACHED = {
    "head": ("policy/clipfrac_low", "policy/clipfrac_high", "val/clipfrac_avg", "objective/kl"),
    "critic model": ("policy/clipfrac_low", "policy/clipfrac_high", "val/clipfrac_avg", "objective/kl"),
    "KL k3 in the loss, clips": ("policy/dual_clipfrac", "policy/clipfrac_low", "policy/clipfrac_high"),
}
"""Metrics that must be above 0 in every update, for a case to be about what it says."""


class ReportingGenerator(FakeGenerator):
    """Also reports log-probabilities, made up."""

    def generate(self, requests, sampling):
        for i, completion in super().generate(requests, sampling):
            yield i, replace(completion, logprobs=sampled(i, completion.token_ids))


def sampled(i, response):
    return [-(2 + (3 * i + t) % 7) / 4 for t in range(len(response))]


class TwoJudges:
    """Kindness less half the brevity; both are a quarter higher in each later batch."""

    def __init__(self):
        self.batches = []

    def score(self, batch):
        later = len(self.batches) / 4
        self.batches.append(batch)
        kind, brief = ([x + later for x in numbers[: len(batch)]] for numbers in (KINDNESS, BREVITY))
        return RewardOutput([a - b / 2 for a, b in zip(kind, brief, strict=True)], {"kind": kind, "brief": brief})


def trainer_in_float64(config):
    def prepare(roles):
        for name in ("policy", *["reference"] * roles.has_reference, *["value"] * roles.has_critic):
            roles.role(name).model.double()
        if roles.has_critic:
            roles.role("value").head.double()
        move(roles)

    trainer = trainer_of(config, TwoJudges(), ReportingGenerator(RESPONSES), prepare=prepare, stop_ids={EOS})
    if config.ppo.score_norm == "frozen":
        trainer.state.score_moments = ScoreMoments(count=4, mean=0.5, var=1.25)
    return trainer


def by_hand_of(trainer):
    """The same models and settings, and nothing else in common."""
    config, roles = trainer.config, trainer.roles
    policy = copy.deepcopy(roles.role("policy").model)
    ref = AutoModelForCausalLM.from_pretrained(config.model.path).eval().double() if config.ppo.kl_coef > 0 else None
    critic = None
    if roles.has_critic:
        trunk = policy if config.value_kind == "head" else copy.deepcopy(roles.role("value").model)
        critic = trunk.base_model, torch.nn.Parameter(roles.role("value").head.weight.detach().clone())
    run = by_hand.Run(policy, ref, critic, settings(config))
    if config.ppo.score_norm == "frozen":
        run.seen_scores = [-1.0, 0.0, 1.0, 2.0]
    return run


def scored(batch, number):
    """The rollouts of a scored batch, their scores, and those of each judge."""
    pairs = zip(batch.query_ids, batch.response_ids, strict=True)
    rollouts = [Rollout(query, response, ended=response[-1] == EOS) for query, response in pairs]
    rewards = {
        name: [x + number / 4 for x in numbers[: len(batch)]]
        for name, numbers in (("kind", KINDNESS), ("brief", BREVITY))
    }
    return rollouts, [a - b / 2 for a, b in zip(rewards["kind"], rewards["brief"], strict=True)], rewards


def test_the_gap_to_decoding_is_over_the_tokens_whose_log_probabilities_it_reported(tmp_path, monkeypatch):
    """In one mean for all answers, not one for each."""
    means, mean = [], Metrics.mean
    monkeypatch.setattr(Metrics, "mean", lambda self, name, *args: (means.append(name), mean(self, name, *args))[1])
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0], [-5.0, -6.0, 0.0]])
    told = [[-1.5, -2.0, -2.0], None, [-5.25, -6.0]]
    completions = [Completion([7] * (3 - i % 2), "stop", each) for i, each in enumerate(told)]
    answers, metrics = Answers([], completions, [""] * 3), Metrics()
    outputs = Outputs(mask=mask, logprobs=logprobs, entropy=-logprobs, values=None, ref_logprobs=None)
    measure_objective(metrics, outputs, torch.zeros(3), answers, tiny_run(tmp_path), kl_coef=0.0)
    assert metrics.compute()["rollout/logprob_gap"] == (0.5 + 1 + 0.25) / 5
    assert means.count("rollout/logprob_gap") == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(case, changes) → its configuration."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DEMONSTRATIONS))

    def config(case, **changes):
        changes = COMMON | CASES[case] | changes
        if "ppo__ptx_coef" in changes:
            changes["data__ptx"] = str(folder / "ptx.jsonl")
        return tiny_run(folder, **changes)

    return config


@dataclass(frozen=True)
class Logged:
    """What a run of a case logged, and what was worked out by hand: its updates, then an evaluation."""

    got: list[dict[str, float]]
    wanted: list[dict[str, float]]
    gradients: list[tuple[str, torch.Tensor]]
    """Of every optimizer step."""


def without_costs(line):
    return {name: number for name, number in line.items() if name not in COSTS}


@pytest.fixture(scope="module")
def logged(run):
    """case → its ``Logged``."""

    @cache
    def of(case):
        with pytest.MonkeyPatch.context() as monkeypatch:
            gradients, steps = noted_gradients(monkeypatch), noted_mini_batches(monkeypatch)
            trainer = trainer_in_float64(run(case))
            hand, wanted = by_hand_of(trainer), []
            texts = [(list(d.query_ids), list(d.response_ids)) for d in trainer.parts.demonstrations]
            for number in range(trainer.config.train.max_steps):
                steps.clear()
                trainer.train_one_update()
                rows = [[row for batch in step for row in batch.rows] for step in steps]
                assert [len(step) for step in rows] == [4] * 4
                rollouts, scores, rewards = scored(trainer.parts.rewards.batches[-1], number)
                reported = [sampled(i, rollout.response) for i, rollout in enumerate(rollouts)]
                hand.update(rollouts, scores, rows, [texts] * 4 if texts else [], rewards=rewards, sampled=reported)
                wanted.append(hand.metrics | {"step": number + 1})
            trainer.evaluate()
            evaluated = scored(trainer.parts.rewards.batches[-1], number + 1)
            wanted.append(hand.evaluation(*evaluated) | {"step": number + 1})
        return Logged([*trainer.log.updates, *trainer.log.evaluations], wanted, gradients)

    return of


def assert_equal(got, wanted, case):
    """Same names and, up to rounding, same numbers, line by line."""
    in_float32 = CASES[case]["kind"] != "gpt2" or "ppo__score_norm" in CASES[case]
    tolerance = 1e-5 if in_float32 else 1e-9
    for line, other in zip(got, wanted, strict=True):
        assert line.keys() - COSTS == other.keys() - COSTS
        for name in other.keys() - COSTS:
            assert line[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("case", CASES)
def test_logged_numbers_are_those_worked_out_by_hand(logged, case):
    run = logged(case)
    assert_equal(run.got, run.wanted, case)
    for got, wanted in list(zip(run.got, run.wanted, strict=True))[:-1]:
        assert got.keys() >= COSTS - OPTIONAL
        assert all(wanted[name] > 0 for name in REACHED.get(case, ()))
        assert wanted.get("val/first_ratio_error", 0.0) == 0.0


def test_the_cases_are_about_what_they_say(logged):
    def updates(case):
        return logged(case).wanted[:-1]

    assert [row["update/num_steps"] for row in updates("critic model")] == [4, 4]
    assert all(1 <= row["update/num_steps"] < 4 for row in updates("early stop"))
    coefficients = [row["objective/kl_coef"] for row in updates("k2, coefficient adapts")]
    assert coefficients[0] == 0.3 and len(set(coefficients)) == 3
    for case in ("warm-up, critic model", "warm-up, head"):
        first, second = updates(case)
        of_policy = {name for name in second.keys() - first.keys() if name not in ("lr", "policy/grad_norm")}
        assert of_policy == {
            "loss/policy_avg", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/clipfrac_low",
            "policy/clipfrac_high", "val/ratio", "val/ratio_var", "val/ratio_max", "val/first_ratio_error",
        }  # fmt: skip
    assert not any({"objective/kl", "objective/kl_k3"} & row.keys() for row in updates("grpo without a reference"))


def test_every_metric_in_the_docs_is_worked_out_by_hand(logged):
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    tables, evaluation = page.split("## Patterns")[0].split("## Evaluation")
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("|")]
    names = {name for text in (*cells, evaluation) for name in re.findall(r"`([a-z_]+(?:/[A-Za-z_0-9]+)?)`", text)}
    worked_out = {name for case in CASES for line in logged(case).wanted for name in line}
    assert {re.sub("kind|brief", "NAME", name) for name in worked_out} == names - COSTS - OF_FLOAT16 - OF_VLLM
    assert names >= COSTS | OF_FLOAT16 | OF_VLLM


def logged_with(config, change):
    """What the run logs, and the gradients of every optimizer step, with ``change`` of each micro-batch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gradients = noted_gradients(monkeypatch)
        collate_by(monkeypatch, change)
        trainer = trainer_in_float64(config)
        for _ in range(config.train.max_steps):
            trainer.train_one_update()
        trainer.evaluate()
    return [*trainer.log.updates, *trainer.log.evaluations], gradients


@pytest.mark.parametrize("case", CASES)
def test_fifty_more_pads_on_either_side_move_no_metric(run, logged, case):
    widths = []

    def widened(batch):
        widths.append(batch.token_ids.shape[1])
        return with_more_pads(batch)

    got, _ = logged_with(run(case), widened)
    assert 0 < max(widths) < 50, "more padding than tokens"
    assert_equal(got, logged(case).got, case)


@pytest.mark.parametrize("case", CASES)
def test_what_is_in_the_padding_changes_no_bit(run, logged, case):
    changed = []

    def filled(batch):
        changed.append(not torch.equal(with_random_pads(batch).token_ids, batch.token_ids))
        return with_random_pads(batch)

    usual, (got, gradients) = logged(case), logged_with(run(case), filled)
    assert any(changed)
    assert [without_costs(line) for line in got] == [without_costs(line) for line in usual.got]
    assert gradients[0][1].any()
    for (name, gradient), (other_name, other) in zip(gradients, usual.gradients, strict=True):
        assert name == other_name and torch.equal(gradient, other)
