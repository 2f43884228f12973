"""Where the checkpoints of ``tether ppo`` and of the stages before it lie: in checkpoint-N in the run's folder. Also
whether a folder holds a run, and whether a run would overwrite a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tether.errors import ConfigError

METRICS = "metrics.jsonl"
"""The file in which a run records its steps, beside its checkpoints."""


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in ``output_dir``, oldest first. Links do not count: their targets do not belong to the run."""
    named = (path for path in output_dir.glob("checkpoint-*") if is_checkpoint_name(path.name))
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=checkpoint_step)


def holds_run(folder: Path) -> bool:
    """Whether a run trained there: it has a checkpoint, or recorded an evaluation or a step. A run that could not load
    its models has left nothing to resume from."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(list_checkpoints(folder))


def check_models_kept(folder: Path, read: Mapping[str, str], *, also: Iterable[str] = ()) -> None:
    """Raises ``ConfigError`` if a run that writes to ``folder`` would remove or overwrite a model that it reads.

    Args:
        read: key and path of every model that the run reads.
        also: names of the folders in ``folder`` that it writes beside its checkpoints.
    """
    removed = [path.resolve() for path in (*list_checkpoints(folder), *(folder / name for name in also))]
    for key, path in read.items():
        source = Path(path).resolve()
        if source == folder.resolve() or any(source.is_relative_to(path) for path in removed):
            raise ConfigError(f"output_dir: this run would overwrite {path}, which {key} names; choose another")


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of a run with this name is one of its checkpoints."""
    return re.fullmatch(r"checkpoint-[0-9]+", name) is not None


def run_folders(path: Path) -> Sequence[Path]:
    """Where files of a policy's run may lie: beside the policy, and, if it is a checkpoint, beside the checkpoint."""
    return (path, path.parent) if is_checkpoint_name(path.name) else (path,)


def checkpoint_step(path: Path) -> int:
    """Number of updates or steps that were finished when the checkpoint was written."""
    return int(path.name.removeprefix("checkpoint-"))


def way_on(checkpoint: Path | None) -> str:
    """A sentence on how to go on with a run that ends too early, for its message.

    Args:
        checkpoint: its last complete one, if there is one.
    """
    if checkpoint is None:
        return "There is no complete checkpoint to resume from; set train.save_steps to write checkpoints"
    return f"The last complete checkpoint is {checkpoint}: --resume continues from there"
