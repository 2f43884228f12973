"""Where the checkpoints of a run lie, of ``tether ppo`` and of the stages before it: checkpoint-N in its folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in ``output_dir``, oldest first. Links are none: what they lead to is not the run's."""
    named = (path for path in output_dir.glob("checkpoint-*") if is_checkpoint_name(path.name))
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=checkpoint_step)


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of a run that is called so is one of its checkpoints."""
    return re.fullmatch(r"checkpoint-[0-9]+", name) is not None


def run_folders(path: Path) -> Sequence[Path]:
    """Where files of the run may lie that a policy is of: beside it, and beside the checkpoint that it is."""
    return (path, path.parent) if is_checkpoint_name(path.name) else (path,)


def checkpoint_step(path: Path) -> int:
    """Updates or steps that were finished when the checkpoint was written."""
    return int(path.name.removeprefix("checkpoint-"))
