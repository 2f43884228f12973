"""What a report advises can be done: the run's own configuration takes the keys that it names."""

import math
import re

import pytest
import yaml

from tests.report.runs import answer, evaluation, update, write
from tether.config.load import dump_config, parse_config
from tether.errors import ConfigError
from tether.report.advice import better_critic, warm_critic
from tether.report.health import diagnose
from tether.report.read import read_run

N = 80
BASE = {
    "model": {"path": "tiny"},
    "rewards": [{"type": "function", "path": "r.py", "name": "r"}],
    "data": {"prompts": "p.jsonl"},
    "ppo": {"max_approx_kl": 0.05},
    "train": {"max_steps": N, "rollout_batch_size": 64},
    "output_dir": "out",
}
RUNS = {
    "model": {},
    "adapter": {"model.lora": {}},
    "head": {"value.kind": "head"},
    "rloo": {"ppo.advantage_estimator": "rloo", "sampling.num_generations": 4},
    "grpo": {"ppo.advantage_estimator": "grpo", "sampling.num_generations": 4},
    "reinforce_pp": {"ppo.advantage_estimator": "reinforce_pp", "ppo.gamma": 0.9, "ppo.whiten_rewards": True},
    "no reference, one epoch": {"ppo.kl_coef": 0.0, "ppo.num_ppo_epochs": 1, "ppo.num_mini_batches": 4},
    "adaptive": {"ppo.kl_target": 6.0, "ppo.missing_eos_score": -1.0},
    "penalty, fp16": {"ppo.missing_eos_penalty": 0.0, "train.fp16": True},
    "held out": {"data.eval_fraction": 0.1, "train.metric_for_best_model": "eval_length", "train.bf16": True},
    "best by length": {
        "data.eval_fraction": 0.1, "train.metric_for_best_model": "eval_length", "train.load_best_model_at_end": True,
    },
    "short": {"train.max_steps": 30},
    "warmed up, values unclipped": {"value.warmup_steps": 60, "ppo.cliprange_value": None},
    "reward model, adapter critic": {"model.lora": {}, "rewards": [{"type": "model", "path": "rm"}]},
    "reward model, critic of the policy": {"value.init": "policy", "rewards": [{"type": "model", "path": "rm"}]},
    "reward adapter, critic of the policy": {
        "model.lora": {}, "value.init": "policy", "rewards": [{"type": "adapter", "path": "rm"}],
    },
    "reward model, adapter critic of the policy": {
        "model.lora": {}, "value.init": "policy", "rewards": [{"type": "model", "path": "rm"}],
    },
}  # fmt: skip
COURSES = {
    "too far": {
        "policy/approxkl_avg": 0.1, "policy/clipfrac_avg": 0.5, "policy/dual_clipfrac": 0.2, "val/ratio_max": 9.0,
        "objective/kl": 60.0, "update/num_steps": 1.0, "rollout/top_token_share": 0.99,
        "rollout/top_answer_share": 0.99,
    },
    "no critic to speak of": {"val/explained_variance": -1.0, "val/clipfrac_avg": 0.9},
    "no signal": {"objective/scores": 0.5, "objective/kl": 0.0, "policy/clipfrac_avg": 0.0},
    "alike": {"objective/scores": 0.5, "objective/scores_std": 0.0},
    "short": {"rollout/length": 5.0, "rollout/eos_rate": 0.3},
    "bad": {"update/num_bad": 1.0, "policy/num_overflows": 2.0, "update/num_steps": 0.0, "rollout/logprob_gap": 0.9,
            "loss/policy_avg": math.nan},
    "saturated": {"objective/scores": 1.0, "val/explained_variance": 0.8},
    "ascent": lambda p: {"objective/scores": min(1.0, 4 * p), "objective/kl": 10 * p},
    "overdone": lambda p: {"objective/scores": 2 - 2 * abs(p - 0.5), "objective/kl": 10 * p},
    "collapse": lambda p: {"objective/kl": 30 * p, "policy/entropy_avg": 2 - 1.9 * p},
    "half": lambda p: {"policy/entropy_avg": 2.0 if p < 0.04 else 0.9},
    "dip": lambda p: {"objective/scores": -0.8 if 0.1 < p < 0.3 else 2 * p},
    "negative": {"objective/kl": -3.0},
}  # fmt: skip
EVALUATED = {"none": [], "lost": [0.0, 3.0, 1.0], "nothing": [0.0, 0.01], "worse": [0.0, -1.0]}
VALUES = {
    "value.warmup_steps": 50, "value.init": "reward", "value.learning_rate": 1e-4, "ppo.vf_coef": 0.5,
    "ppo.cliprange_value": None, "ppo.kl_coef": 0.2, "ppo.kl_target": 3.0, "ppo.num_ppo_epochs": "lower",
    "ppo.missing_eos_penalty": 1.0, "ppo.missing_eos_score": -2.0, "ppo.gamma": 1.0, "ppo.whiten_rewards": False,
    "ppo.score_norm": "frozen", "sampling.temperature": 1.1, "sampling.response_length": 80,
    "sampling.num_generations": 8, "train.learning_rate": 1e-6, "train.rollout_batch_size": 128, "train.bf16": False,
    "train.fp16": False, "train.max_grad_norm": 1.0, "data.eval_prompts": "e.jsonl",
    "train.metric_for_best_model": "eval_scores", "train.load_best_model_at_end": True,
}  # fmt: skip
"""A value of each key as the advice means it."""
TOGETHER = {"train.load_best_model_at_end": "train.metric_for_best_model"}


def placed(config, key, value):
    """The same with one key at another value."""
    section, name = key.split(".") if "." in key else (None, key)
    if section is None:
        return config | {name: value}
    if value == "lower":
        value = config[section][name] - 1
    return config | {section: config.get(section, {}) | {name: value}}


def configured(changes):
    """The configuration as a run with these keys writes it to config.yaml."""
    config = BASE
    for key, value in changes.items():
        config = placed(config, key, value)
    return yaml.safe_load(dump_config(parse_config(yaml.safe_dump(config)).resolved(bf16=False)))


def advised(folder, config, course, scores):
    """The advice on a run with a bad course."""
    lines, n = [], config["train"]["max_steps"]
    for step in range(1, n + 1):
        line = update(step, step / n) | (course(step / n) if callable(course) else course)
        if config["ppo"]["kl_coef"] == 0.0:
            del line["objective/kl"]
        if config["ppo"]["advantage_estimator"] != "gae":
            line = {k: v for k, v in line.items() if k not in ("val/explained_variance", "val/clipfrac_avg")}
        lines.append(line)
    evals = [evaluation(i * n // len(scores), 0.0, eval_scores=s) for i, s in enumerate(scores)]
    samples = [answer(0, row, 1.0) for row in range(8)]
    finished = {"step": n, "kept_step": 0} if config["train"]["load_best_model_at_end"] and scores else None
    run = read_run(write(folder, lines + evals, samples, config=yaml.safe_dump(config), finished=finished))
    return [finding.advice for finding in diagnose(run)]


def named(advice):
    """Keys that a piece of advice names, with the value that it gives or one as it means it."""
    for key, value in re.findall(r"\b((?:model|value|ppo|train|sampling|data)\.\w+)(?:: (\w+))?", advice):
        yield key, yaml.safe_load(value) if value else VALUES[key]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_takes_the_keys_of_every_piece_of_advice_on_it(tmp_path, run):
    config, seen = configured(RUNS[run]), set()
    cases = [(course, []) for course in COURSES.values()]
    if "data.eval_fraction" in RUNS[run]:
        cases += [(COURSES["too far"], scores) for scores in EVALUATED.values()]
    for course, scores in cases:
        for advice in advised(tmp_path, config, course, scores):
            for key, value in named(advice):
                changed = placed(config, key, value)
                if (other := TOGETHER.get(key)) is not None:
                    changed = placed(changed, other, VALUES[other])
                try:
                    parsed = parse_config(yaml.safe_dump(changed))
                except ConfigError as error:
                    pytest.fail(f"{advice}\n{error}")
                if key == "value.warmup_steps":
                    assert config["value"]["warmup_steps"] < value < parsed.train.max_steps, advice
                if key == "ppo.cliprange_value":
                    assert config["ppo"]["cliprange_value"] is not None, advice
                if parsed.value.init == "reward":
                    assert parsed.rewards[0].type in critic_types(parsed), advice
                seen.add(key)
    assert {"train.learning_rate", "sampling.response_length"} <= seen
    has_critic = config["ppo"]["advantage_estimator"] == "gae"
    assert ("value.warmup_steps" in seen) == (has_critic and "value.warmup_steps" not in RUNS[run])
    assert any(key.startswith("value.") for key in seen) == has_critic


def test_a_run_too_short_for_a_warm_up_is_advised_none(tmp_path):
    config = configured({"train.max_steps": 4, "ppo.cliprange_value": None})
    run = read_run(write(tmp_path, [update(1, 1.0)], config=yaml.safe_dump(config)))
    assert (better_critic(run), warm_critic(run)) == ("raise value.learning_rate", "")


def critic_types(config):
    """Types of a first reward that a critic of this kind can be copied from."""
    return {"adapter": ("adapter",), "model": ("model", "adapter"), "head": ()}[config.value_kind]


@pytest.mark.parametrize(
    ("run", "can"),
    [
        ("reward model, critic of the policy", True),
        ("reward adapter, critic of the policy", True),
        ("reward model, adapter critic of the policy", False),
        ("reward model, adapter critic", False),
        ("model", False),
        ("head", False),
    ],
)
def test_the_reward_model_is_advised_as_a_start_where_the_critic_could_be_copied_from_it(tmp_path, run, can):
    advice = advised(tmp_path, configured(RUNS[run]), COURSES["no critic to speak of"], [])
    assert any("value.init: reward" in text for text in advice) == can
    assert any("value.warmup_steps" in text for text in advice)
