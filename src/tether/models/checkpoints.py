"""Where the checkpoints of a run lie, of ``tether ppo`` and of the stages before it: checkpoint-N in its folder; and
whether a folder holds a run, or a run would write over a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tether.errors import ConfigError

METRICS = "metrics.jsonl"
"""Where a run records its steps, beside its checkpoints."""


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in ``output_dir``, oldest first. Links are none: what they lead to is not the run's."""
    named = (path for path in output_dir.glob("checkpoint-*") if is_checkpoint_name(path.name))
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=checkpoint_step)


def holds_run(folder: Path) -> bool:
    """Whether a run trained there: it has a checkpoint, or recorded an evaluation or a step. One that could not load
    its models has left nothing to go on from."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(list_checkpoints(folder))


def check_models_kept(folder: Path, read: Mapping[str, str], *, also: Iterable[str] = ()) -> None:
    """Raises ``ConfigError`` if a run that writes to ``folder`` would remove or write over a model that it reads.

    Args:
        read: key and path of every model that the run reads.
        also: names of the folders in ``folder`` that it writes beside its checkpoints.
    """
    removed = [path.resolve() for path in (*list_checkpoints(folder), *(folder / name for name in also))]
    for key, path in read.items():
        source = Path(path).resolve()
        if source == folder.resolve() or any(source.is_relative_to(path) for path in removed):
            raise ConfigError(f"output_dir: this run would write over {path}, which {key} names; choose another")


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of a run that is called so is one of its checkpoints."""
    return re.fullmatch(r"checkpoint-[0-9]+", name) is not None


def run_folders(path: Path) -> Sequence[Path]:
    """Where files of the run may lie that a policy is of: beside it, and beside the checkpoint that it is."""
    return (path, path.parent) if is_checkpoint_name(path.name) else (path,)


def checkpoint_step(path: Path) -> int:
    """Updates or steps that were finished when the checkpoint was written."""
    return int(path.name.removeprefix("checkpoint-"))
