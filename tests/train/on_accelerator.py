"""Runs and commands of all kinds on an accelerator; ``test_accelerator.py`` starts this file in a process of its own.

    python -m tests.train.on_accelerator FOLDER

For every case, its numbers or its error end up in FOLDER/NAME.json.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.compat import trl_runs
from tests.rewards.encoders import save_encoder
from tests.rewards.test_build import save_reward_adapter
from tests.stages.test_reward_stage import stage_config
from tests.stages.test_sft import stage
from tests.tiny import save_tiny
from tests.train.runs import tiny_run, write
from tether.config.source import SourceConfig
from tether.inference.evaluate import evaluate_path
from tether.inference.generate import generate_path
from tether.inference.scoring import score_file
from tether.stages.reward import train_reward_model
from tether.stages.sft import train_sft
from tether.train.run import train_policy

Numbers = list[dict[str, Any]]
LORA = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
PPO: dict[str, dict[str, Any]] = {
    "full": {"train__gradient_checkpointing": True, "ppo__max_approx_kl": 0.001},
    "untied": {"tied": False, "ppo__num_mini_batches": 2, "train__micro_batch_size": 1, "sampling__batch_size": 3},
    "GPT-2": {"kind": "gpt2", "train__optim": "adamw_torch", "sampling__cache_implementation": "static"},
    "bf16": {"kind": "qwen2", "train__bf16": True, "ppo__entropy_coef": 0.01},
    "bfloat16 weights": {"model__dtype": "bfloat16"},
    "fp16": {"train__fp16": True},
    "LoRA": {"model__lora": LORA, "train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 40},
    "LoRA in bf16": {"model__lora": LORA, "train__bf16": True, "value__kind": "head", "ppo__kl_coef": 0.0},
    "head": {"value__kind": "head", "value__warmup_steps": 1, "ppo__value_lam": 1.0, "ppo__lam_alpha": 0.05},
    "best average": {
        "data__eval_fraction": 0.4, "train__eval_steps": 1, "train__save_steps": 1, "train__ema_decay": 0.5,
        "train__load_best_model_at_end": True, "train__metric_for_best_model": "eval_scores",
    },
    "several answers": {
        "sampling__num_generations": 2, "sampling__stop_strings": ["cat"], "sampling__top_p": 0.9, "sampling__top_k": 5,
        "sampling__allow_truncated_sampling": True, "ppo__advantage_estimator": "rloo",
    },
    "cut answers": {
        "ppo__mask_truncated": True, "sampling__response_length": 12, "ppo__kl_in": "loss", "ppo__kl_estimator": "k3",
    },
    "shaped scores": {
        "ppo__score_norm": "frozen", "ppo__reward_clip": 1.0, "ppo__missing_eos_penalty": 1.0, "ppo__kl_target": 0.1,
        "ppo__overlong_buffer": 3, "ppo__dual_clip": 3.0, "ppo__gamma": 0.9, "ppo__whiten_rewards": True,
    },
}  # fmt: skip


def run(folder: Path, **changes: Any) -> Numbers:
    """A PPO run; its updates and evaluations."""
    result = train_policy(tiny_run(folder, **{"model__attn_implementation": "eager"} | changes))
    return [*result.updates, *result.evaluations]


def judged(folder: Path) -> Numbers:
    """Reward models of all kinds: the policy's tokenizer and another, an adapter on the policy's base, an encoder."""
    policy = save_tiny(folder / "llama-tied", "llama")
    save_reward_adapter(folder / "adapter", policy)
    sources = [
        {"type": "model", "path": str(save_tiny(folder / "same", num_labels=1, seed=3)), "norm": "auto"},
        {"type": "model", "path": str(save_tiny(folder / "other", "gpt2", num_labels=1, seed=4))},
        {"type": "model", "path": str(save_encoder(folder / "encoder")), "input_format": "response"},
        {"type": "adapter", "path": str(folder / "adapter")},
    ]
    return run(folder, rewards=sources, model__lora=LORA, value__init="reward", value__kind="model")


def imitating(folder: Path) -> Numbers:
    """A run with demonstrations."""
    rows = [{"prompt": "the cat", "completion": "sees the dog"}, {"prompt": "you", "completion": "runs"}]
    ptx = write("".join(json.dumps(row) + "\n" for row in rows), folder / "ptx.jsonl")
    return run(folder, data__ptx=str(ptx), ppo__ptx_coef=0.5)


def resumed(folder: Path) -> Numbers:
    """A run of two updates, resumed for a third."""
    settings = {"model__lora": LORA, "train__ema_decay": 0.5, "train__save_steps": 1, "ppo__score_norm": "running"}
    run(folder, **settings)
    return run(folder, train__max_steps=3, resume=True, **settings)


def continued(folder: Path) -> Numbers:
    """A run that starts from the adapter of another."""
    run(folder, model__lora=LORA)
    return run(folder, model__path=str(folder / "out"), output_dir=str(folder / "more"))


def used(folder: Path) -> Numbers:
    """What evaluates a finished run, generates with its policy and scores with its judges."""
    run(folder, model__lora=LORA)
    found = evaluate_path(folder / "out", folder / "prompts.jsonl")
    answers = generate_path(folder / "out", folder / "prompts.jsonl", temperature=0.0)
    rows = [{"prompt": "the cat", "chosen": "sees the dog", "rejected": "runs"}] * 2
    pairs = write("".join(json.dumps(row) + "\n" for row in rows), folder / "pairs.jsonl")
    judge = {"type": "model", "path": str(save_tiny(folder / "judge", num_labels=1, seed=3))}
    scored = score_file(SourceConfig.model_validate({"rewards": [judge]}), pairs)
    return [found.metrics, *({"answer": row["response"]} for row in answers), *scored.rows]


def sft(folder: Path) -> Numbers:
    """Supervised fine-tuning."""
    config = stage(folder, data={"eval_fraction": 0.2}, lora={"r": 4}, max_steps=3)
    train_sft(config)
    return [*map(json.loads, (config.output_dir / "metrics.jsonl").read_text().splitlines())]


def reward_model(folder: Path) -> Numbers:
    """The training of a reward model."""
    config = stage_config(folder, num_train_epochs=1)
    train_reward_model(config)
    return [*map(json.loads, (config.output_dir / "metrics.jsonl").read_text().splitlines())]


def script(folder: Path) -> Numbers:
    """A script for TRL."""
    trainer = trl_runs.trainer(folder, args=trl_runs.arguments(folder, use_cpu=False))
    trainer.train()
    trainer.generate_completions()
    return trainer.state.log_history


CASES: dict[str, Callable[[Path], Numbers]] = {
    **{name: partial(run, **changes) for name, changes in PPO.items()},
    **{case.__name__: case for case in (judged, imitating, resumed, continued, used, sft, reward_model, script)},
}


def main(folder: Path, names: list[str]) -> None:
    importlib.import_module("tests.accelerator")
    for name in names or CASES:
        (folder / name).mkdir()
        try:
            found: Any = CASES[name](folder / name)
        except Exception:
            found = traceback.format_exc()
        write(json.dumps(found, default=str), folder / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
