"""Runs on tiny models, for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.tiny import save_tiny
from tether.config.schema import RunConfig
from tether.rewards.model import ModelSource

PROMPTS = ("the cat sees", "i like the dog", "you run and", "it is a good day", "the sun is red")
REWARD = '''
def letters(prompts, completions, **columns):
    """Tenths of an answer's letters: hardly two answers have the same score."""
    return [len(text) / 10 for text in completions]
'''


def write_prompts(path: Path, prompts=PROMPTS) -> Path:
    return write("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), path)


def write(text: str, path: Path) -> Path:
    """Writes a file whole, as other processes may read it meanwhile."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)


def tiny_run(folder: Path, *, kind: str = "llama", tied: bool = True, **changes: Any) -> RunConfig:
    """A run over five prompts with a function reward; ``changes`` are dotted keys with ``__`` for the dot."""
    model = folder / f"{kind}-{'tied' if tied else 'untied'}"
    if not model.exists():
        save_tiny(model, kind, tied=tied)
    prompts, reward = write_prompts(folder / "prompts.jsonl"), write(REWARD, folder / "rewards.py")
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


def seen_by_models(monkeypatch) -> list[str]:
    """The texts that reward models are shown from now on."""
    seen, original = [], ModelSource.read

    def read(self, batch):
        seen.extend(self.seen(batch))
        return original(self, batch)

    monkeypatch.setattr(ModelSource, "read", read)
    return seen
