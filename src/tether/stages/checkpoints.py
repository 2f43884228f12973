"""The checkpoints of TRL's trainers: which of them are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError, safe_open

from tether.models.checkpoints import list_checkpoints
from tether.stages.run import Tell

TRAINER_STATE = "trainer_state.json"
_PIECES = (
    ("config.json", "adapter_config.json"), ("model*.safetensors", "adapter_model.safetensors"),
    ("optimizer.pt", "global_step*"), ("scheduler.pt",), ("rng_state*.pth",),
)  # fmt: skip
"""Patterns of what the trainer saves in a checkpoint besides its state. Of most, what is missing it silently begins
anew."""


def newest_checkpoint(folder: Path, tell: Tell) -> Path | None:
    """The newest complete checkpoint in a run's folder, if there is one."""
    for path in reversed(list_checkpoints(folder)):
        if (lacks := missing_in(path)) is None:
            return path
        tell(f"{path} is incomplete: {lacks}; trying the checkpoint before it")
    return None


def step_of(checkpoint: Path) -> int | None:
    """Number of finished steps from the trainer's state, which is written last; None without it."""
    try:
        return int(trainer_state(checkpoint)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def trainer_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's own state in a checkpoint."""
    return json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))


def missing_in(checkpoint: Path) -> str | None:
    """What a checkpoint lacks, of its pieces and of the ends of their files; None if nothing is found without reading
    all of it."""
    if step_of(checkpoint) is None:
        return f"there is no {TRAINER_STATE} that can be read"
    for patterns in _PIECES:
        found = [path for pattern in patterns for path in checkpoint.glob(pattern)]
        if not found:
            return f"there is no {' or '.join(patterns)}"
        for path in found:
            if (error := _unreadable(path)) is not None:
                return f"{path.name} cannot be read ({error})"
    return None


def _unreadable(path: Path) -> Exception | None:
    """What is wrong with the ends of a file, where each format has its table of contents."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.is_file():
            ZipFile(path).close()
    except (OSError, ValueError, SafetensorError, BadZipFile) as error:
        return error
    return None
