"""What a resumed run of a stage must keep, and what it may change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.config.base import differences
from tether.config.places import FILE_OF, different, is_place, not_moved
from tether.config.stage import StageConfig
from tether.data.digest import file_digest, rows_digest
from tether.errors import CheckpointError
from tether.models.paths import model_digest
from tether.stages.folder import CONFIG_FILE, FINGERPRINTS_FILE, saved_config
from tether.stages.run import ConfigT

OF_RESULT = frozenset({
    "train.metric_for_best_model", "train.greater_is_better", "train.load_best_model_at_end",
    "train.early_stopping_patience",
})  # fmt: skip
"""Keys that decide which model a run leaves behind. A resumed run may change them; a finished one is another run with
them."""
MAY_CHANGE = OF_RESULT | frozenset({
    "resume", "overwrite_output_dir", "output_dir", "train.eval_steps", "train.save_steps", "train.save_total_limit",
    "train.ddp_timeout", "train.report_to", "train.run_name", "train.micro_batch_size", "train.gradient_checkpointing",
})  # fmt: skip
"""Keys that a resumed run may change. With another micro_batch_size, an optimizer step still reads the same rows."""
Rows = Iterable[tuple[int, Sequence[Iterable[int]], Mapping[str, Any]]]
"""Argument of ``rows_digest``."""


def may_change(key: str, *, is_finished: bool) -> bool:
    """Whether a resumed run may change a key.

    Args:
        is_finished: whether nothing is left to train, so that only keys without effect on the result may change.
    """
    return key in MAY_CHANGE and not (is_finished and key in OF_RESULT)


def check_same_run(held: Path, folder: Path, config: StageConfig, *, is_finished: bool) -> list[str]:
    """Keys that name other places than in the run that ``held``, a checkpoint or a trained model, belongs to; models
    and files there are the same, and ``check_same_data`` compares rows.

    Args:
        is_finished: as in ``may_change``.

    Raises:
        CheckpointError: it belongs to another run.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(f"resume: {file} is missing, so it is not known which run {held} belongs to")
    differing = differences(saved_config(folder, type(config)), config).items()
    changed = {key: values for key, values in differing if not may_change(key, is_finished=is_finished)}
    refused = not_moved(changed, _recorded(folder), place_digests(config)) if changed else []
    if refused:
        told = ", ".join("{} {} → {}".format(key, *changed[key]) for key in refused)
        moved = (
            " A model on the hub is known by its name and revision alone, one in a folder by its contents."
            if any(is_place(key) for key in refused)
            else ""
        )
        raise CheckpointError(
            f"resume: {held} belongs to another run: {told}. Restore these values, or start anew: choose "
            f"another output_dir, or use --overwrite instead of --resume.{moved}"
        )
    return [*changed]


def fingerprints(config: StageConfig, rows: Mapping[str, Rows]) -> dict[str, str]:
    """Hashes of the model and the file of the chat template that a run reads, unless they are not in a folder, and of
    each of its datasets.

    Args:
        rows: rows of each dataset, by its name in messages.
    """
    return place_digests(config) | {name: rows_digest(each) for name, each in rows.items()}


def place_digests(config: StageConfig) -> dict[str, str]:
    """Hashes of what a stage reads from folders except its data, by key; see ``tether.config.places``."""
    template = file_digest(config.data.chat_template)
    digests = {"model.path": model_digest(config.model.path), f"{FILE_OF}data.chat_template": template}
    return {key: digest for key, digest in digests.items() if digest is not None}


def other_contents(
    config: ConfigT, changed: Iterable[str], read: Callable[[ConfigT], Mapping[str, str]]
) -> list[str]:
    """Keys that changed since the run in ``output_dir`` in more than the places of inputs, else datasets of other rows.

    Args:
        changed: keys that were different then.
        read: as in ``begin``.
    """
    folder = config.output_dir
    saved = _recorded(folder) if (folder / FINGERPRINTS_FILE).is_file() else {}  # of a run that has not begun
    return not_moved(changed, saved, place_digests(config)) or different(saved, read(config))


def _recorded(folder: Path) -> dict[str, str]:
    """The ``fingerprints`` of the run in a folder.

    Raises:
        CheckpointError: they are missing, or cannot be read.
    """
    file = folder / FINGERPRINTS_FILE
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"resume: {file} cannot be read: {error}") from error


def check_same_data(checkpoint: Path | None, read: Mapping[str, str]) -> None:
    """Checks that a run reads the same model and rows as the one that it resumes.

    Args:
        checkpoint: what it resumes from, if it does.
        read: its ``fingerprints``.

    Raises:
        CheckpointError: the model or a dataset has changed. The trainer skips as many rows as were trained on, so other
            rows would be trained on twice, or never.
    """
    if checkpoint is not None:
        check_read(checkpoint, checkpoint.parent, read)


def check_read(held: Path, folder: Path, read: Mapping[str, str]) -> None:
    """``check_same_data`` for ``held``, a checkpoint or a trained model, of the run in ``folder``."""
    if changed := different(_recorded(folder), read):
        of_data = [key for key in changed if key != "model.path"]
        what = "rows, their order, the tokenizer or its chat template" if of_data else "weights or shape"
        raise CheckpointError(
            f"resume: {' and '.join(changed)} changed since {held} was written: {what}. Restore what was "
            f"there, or start anew: remove {folder}, or choose another output_dir"
        )
