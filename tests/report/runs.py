"""Folders of made-up runs."""

import json
import math
from pathlib import Path
from typing import Any

CONFIG = """\
model: {path: tiny, lora: {r: 16}}
rewards:
- {type: function, path: my_rewards.py, name: brevity, weight: 1.0}
sampling: {response_length: 48, temperature: 1.0, stop_token: eos}
ppo: {kl_coef: 0.05, num_ppo_epochs: 4, num_mini_batches: 1}
train: {total_episodes: 1600, rollout_batch_size: 64}
output_dir: runs/tiny
"""


def update(step: int, progress: float, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl of a healthy run, ``progress`` from 0 to 1; keyword names use __ for the slash."""
    wave = math.sin(step)
    line = {
        "step": step,
        "episode": 64.0 * step,
        "objective/scores": 2 * progress + 0.02 * wave,
        "objective/scores_std": 1.0,
        "objective/kl": 4 * progress + 0.01,
        "objective/rlhf_reward": 1.8 * progress,
        "policy/approxkl_avg": 0.01 + 0.001 * wave,
        "policy/clipfrac_avg": 0.05,
        "policy/entropy_avg": 2 - 0.4 * progress,
        "loss/policy_avg": -0.01,
        "loss/value_avg": 0.5 - 0.4 * progress,
        "val/clipfrac_avg": 0.1,
        "val/ratio_var": 0.001,
        "val/ratio_max": 1.4,
        "val/first_ratio_error": 0.0,
        "val/explained_variance": 0.7 * progress,
        "rollout/length": 30 - 4 * progress,
        "rollout/eos_rate": 0.9 + 0.05 * progress,
        "rewards/brevity": 2 * progress,
        "policy/grad_norm": 1 + 0.1 * wave,
        "time/rollout_s": 3.0,
        "time/update_s": 2.0,
        "time/step_s": 5.5,
        "lr": 3e-4 * (1 - progress),
    }
    return line | {name.replace("__", "/"): value for name, value in changes.items()}


def evaluation(step: int, progress: float, **changes: Any) -> dict[str, Any]:
    """The line of an evaluation."""
    line = {
        "step": step,
        "eval_scores": 0.1 + 2 * progress,
        "eval_scores_std": 1.0,
        "eval_kl": 4 * progress,
        "eval_length": 30 - 4 * progress,
        "eval_eos_rate": 0.9 + 0.05 * progress,
        "eval_rewards/brevity": 0.1 + 2 * progress,
    }
    return line | changes


def answer(step: int, row: int, score: float | None, /, *, split: str = "eval", **changes: Any) -> dict[str, Any]:
    """A line of samples.jsonl."""
    line = {
        "step": step,
        "split": split,
        "row": row,
        "prompt": f"question {row}",
        "query": f"<|user|>question {row}",
        "response": f"answer {row} at {step}",
        "length": 12,
        "finish_reason": "stop",
        "score": score,
        "rewards": {"brevity": score},
        "kl": 0.5,
    }
    return line | changes


def write(
    folder: Path,
    metrics: list[Any] | None = None,
    samples: list[Any] | None = None,
    config: str | None = CONFIG,
    finished: dict[str, int] | None = None,
):
    """Writes the files of a run; None leaves a file out."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.yaml").write_text(config, encoding="utf-8")
    for name, lines in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        if lines is not None:
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if finished is not None:
        (folder / "finished.json").write_text(json.dumps(finished), encoding="utf-8")
    return folder


def healthy(folder: Path, updates: int = 25) -> Path:
    """A whole run with evaluations at both ends."""
    metrics = [evaluation(0, 0.0)]
    metrics += [update(step, step / updates) for step in range(1, updates + 1)]
    metrics.append(evaluation(updates, 1.0))
    samples = [answer(step, row, 2.0 * (step > 0) + 0.1 * (row % 3)) for step in (0, updates) for row in range(16)]
    samples += [answer(step, 0, 1.0, split="train") for step in range(1, updates + 1)]
    return write(folder, metrics, samples)


def sft_run(folder: Path, held_out: tuple[float, ...] = (3.0, 2.5)) -> Path:
    """A run of demonstrations with evaluations, as ``tether sft`` logs it."""
    steps = [
        {"step": i, "loss": 4 - 0.1 * i, "grad_norm": 1.0, "learning_rate": 1e-4 * (1 - i / 20),
         "mean_token_accuracy": 0.2 + 0.02 * i, "entropy": 3.0, "epoch": i / 10}
        for i in range(1, 21)
    ]  # fmt: skip
    evals = [
        {"step": 20 * (i + 1) // len(held_out), "eval_loss": loss, "eval_mean_token_accuracy": 0.5, "epoch": 2.0}
        for i, loss in enumerate(held_out)
    ]
    config = "model: {path: tiny, lora: null}\ndata: {demonstrations: [mine.jsonl]}\ntrain: {batch_size: 8}\n"
    return write(folder, steps + evals, config=config)


def reward_run(folder: Path, accuracy: float | None = 0.8, pairs: int = 100) -> Path:
    """A run of pairs, as ``tether reward`` logs it; without a result on held-out ones at accuracy None."""
    steps = [
        {"step": i, "loss": 0.7 - 0.02 * i, "grad_norm": 1.0, "learning_rate": 1e-4, "accuracy": 0.5 + 0.02 * i,
         "margin": 0.1 * i, "epoch": i / 20}
        for i in range(1, 21)
    ]  # fmt: skip
    write(folder, steps, config="model: {path: tiny, lora: {r: 8}}\ndata: {pairs: [org/pairs]}\ntrain: {}\n")
    if accuracy is not None:
        evaluation = {"metrics": {"accuracy": accuracy, "margin": 1.5}, "pairs": [{"row": i} for i in range(pairs)]}
        (folder / "reward_eval.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return folder
