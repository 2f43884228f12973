"""Runs on tiny models, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import save_tiny
from tether.config.schema import RunConfig

PROMPTS = ("the cat sees", "i like the dog", "you run and", "it is a good day", "the sun is red")
REWARD = '''
def letters(prompts, completions, **columns):
    """Tenths of an answer's letters: hardly two answers have the same score."""
    return [len(text) / 10 for text in completions]
'''


def write_prompts(path: Path, prompts=PROMPTS) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
    return path


def tiny_run(folder: Path, *, kind: str = "llama", tied: bool = True, **changes: Any) -> RunConfig:
    """A run over five prompts with a function reward; ``changes`` are dotted keys with ``__`` for the dot."""
    model = folder / f"{kind}-{'tied' if tied else 'untied'}"
    if not model.exists():
        save_tiny(model, kind, tied=tied)
    prompts = write_prompts(folder / "prompts.jsonl")
    reward = folder / "rewards.py"
    reward.write_text(REWARD, encoding="utf-8")
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "rewards": [{"type": "function", "path": str(reward), "name": "letters"}],
        "data": {"prompts": str(prompts)},
        "sampling": {"response_length": 6},
        "ppo": {"num_ppo_epochs": 2},
        "train": {
            "max_steps": 2,
            "rollout_batch_size": 8,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "bf16": False,
            "seed": 0,
        },
        "output_dir": str(folder / "out"),
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    lengths = {"total_episodes", "num_train_epochs"} & config["train"].keys()
    if lengths:
        config["train"].pop("max_steps")
    return RunConfig.model_validate(config)
