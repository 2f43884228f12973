"""The files of examples/ run: every key of them but paths and sizes, on tiny models."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny
from tests.train.test_run import weights
from tether.cli.main import main
from tether.config.load import load_config
from tether.inference.evaluate import evaluate_path
from tether.metrics.writers import read_jsonl
from tether.train.run import train_policy

EXAMPLES = Path(__file__).parents[1] / "examples"
PRESETS = ("preference_lora", "full_finetuning", "verifiable_reward")
FILES = {
    "preference_lora": {"adapter_model.safetensors", "score_norm.json"},
    "full_finetuning": {
        "model.safetensors", "score_norm.json", "checkpoint-3/tether_state/average.safetensors",
    },
    "verifiable_reward": {"adapter_model.safetensors"},
}  # fmt: skip
STEPS = {"preference_lora": 4, "full_finetuning": 4, "verifiable_reward": 1}
"""Optimizer steps an update."""
PROMPTS = ["the cat sees", "i like the dog", "you run and", "it is a good day"]


def example(name):
    """A module of examples/."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def preset(tmp_path, monkeypatch):
    """Reads a preset with paths of tiny models and sizes that they can bear; all other keys are its own."""
    monkeypatch.chdir(EXAMPLES.parent)  # from where the command in its first lines is run
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": 2}) + "\n" for text in PROMPTS))
    for name, num_labels in (("policy", None), ("judge", 1)):
        tokenizer = save_tiny(tmp_path / name, num_labels=num_labels) / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text().replace('"two"', '"2"').replace('"three"', '"3"'))
    sizes = {
        "model.path": tmp_path / "policy", "data.prompts": prompts, "data.eval_prompts": prompts,
        "data.eval_fraction": "null", "output_dir": tmp_path / "out", "sampling.response_length": 24,
        "train.rollout_batch_size": 16, "train.save_steps": 1,
    }  # fmt: skip
    judged = {
        "rewards.0.path": tmp_path / "judge", "train.total_episodes": 48, "train.micro_batch_size": 4,
        "ppo.score_norm_samples": 16,
    }  # fmt: skip
    own = {
        "preference_lora": judged | {"value.warmup_steps": 1},
        "full_finetuning": judged,
        "verifiable_reward": {
            "value.warmup_steps": 1, "train.max_steps": 3, "train.max_tokens_per_micro_batch": 80,
            "ppo.overlong_buffer": 8,
        },
    }  # fmt: skip

    def read(name):
        overrides = [f"--{key}={value}" for key, value in (sizes | own[name]).items()]
        return load_config(EXAMPLES / f"{name}.yaml", overrides)

    return read


@pytest.mark.parametrize("name", PRESETS)
def test_preset_runs(preset, tmp_path, name):
    config = preset(name)
    result = train_policy(config)
    assert [row["step"] for row in result.updates] == [1, 2, 3]
    for row in (*result.updates, *result.evaluations):
        assert all(math.isfinite(value) for value in row.values()), row
    expected = {key: value for key, value in result.evaluations[-1].items() if key != "step"}
    assert evaluate_path(config.output_dir).metrics == pytest.approx(expected, abs=1e-4)
    first, last = (weights(folder) for folder in (config.output_dir / "checkpoint-1", config.output_dir))
    assert any(not torch.equal(p, last[key]) for key, p in first.items())
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert files >= FILES[name]
    assert [row["update/num_steps"] for row in result.updates] == [STEPS[name]] * 3
    assert ("loss/policy_avg" in result.updates[0]) == (config.value.warmup_steps == 0)
    assert result.updates[0].keys() >= {"value/lr", "objective/kl"}


def test_pipeline_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    words = ("cat", "dog", "sun", "day", "rain", "night")
    rows = [{"prompt": f"the {word}", "chosen": "is good", "rejected": "is bad"} for word in words]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = {"sampling.response_length": 8, "train.rollout_batch_size": 16, "train.micro_batch_size": 4}
    small |= {"train.total_episodes": 32, "train.save_steps": 1, "ppo.score_norm_samples": 8}
    overrides = [f"--ppo.{key}={value}" for key, value in small.items()]
    arguments = [str(EXAMPLES / "pipeline.yaml"), "--model.path=model", *overrides]
    assert main(["pipeline", *arguments]) == 0
    for stage in ("sft", "reward", "ppo"):
        assert (tmp_path / "runs/pipeline" / stage / "adapter_model.safetensors").is_file()
    updates = [row for row in read_jsonl(tmp_path / "runs/pipeline/ppo/metrics.jsonl") if "objective/kl" in row]
    assert [row["step"] for row in updates] == [1, 2] and updates[0]["objective/kl"] == 0.0


def test_verifiable_reward_takes_off_for_length(preset):
    """Half a point at the most, over the last tokens of the limit: 8 of 24 here."""
    config = preset("verifiable_reward")
    train_policy(config)
    samples = read_jsonl(config.output_dir / "samples.jsonl")
    for row in samples:
        numbers = [word for word in row["response"].split() if word in ("2", "3")]
        assert row["rewards"]["last_number"] == float(numbers[-1:] == ["2"])
        assert row["score"] == pytest.approx(row["rewards"]["last_number"] - 0.5 * max(0, row["length"] - 16) / 8)
    assert len({row["score"] for row in samples}) > 3


@pytest.mark.parametrize(
    ("text", "right", "score"),
    [
        ("6 times 7 is 42", 42, 1.0),
        ("It is 42.", 42, 1.0),
        ("42, or rather 43", 42, 0.0),
        ("43, or rather 42", "42", 1.0),
        ("1,234 in all", 1234, 1.0),
        ("about -5", -5, 1.0),
        ("about -5", 5, 0.0),
        ("4.50 dollars", "4.5", 1.0),
        ("4.5 dollars", 45, 0.0),
        ("none", 0, 0.0),
        ("", 0, 0.0),
        ("zero is 0", 0.0, 1.0),
    ],
)
def test_last_number_by_hand(text, right, score):
    assert example("last_number").last_number(["how many?"], [text], answer=[right]) == [score]


def test_last_number_keeps_the_order_of_the_answers():
    scores = example("last_number").last_number(["a", "b", "c"], ["1", "2", "3"], answer=[1, 1, 3], other=[0, 0, 0])
    assert scores == [1.0, 0.0, 1.0]


def test_brevity_by_hand():
    ten = "one two three four five six seven eight nine ten"
    texts = [ten, ten + " eleven twelve", "one two three", ""]
    assert example("brevity").brevity(["?"] * 4, texts) == pytest.approx([0.0, -0.2, -0.7, -1.0])
    chat = [[{"role": "user", "content": ten}, {"role": "assistant", "content": "one two"}]]
    assert example("brevity").brevity(["?"], chat) == pytest.approx([-0.8])
