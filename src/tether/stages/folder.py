"""The output folder of a stage: what a run may overwrite, and how the folder is prepared.

    output_dir/
      config.yaml, metrics.jsonl     from the start
      fingerprints.json              hashes of the model and the rows that the run reads, from the start
      checkpoint-N/                  the trainer's own checkpoints: weights, optimizer, schedule, random state
      finished.json                  at the end: the number of steps, and after which of them the model was kept
      manifest.json and the model    at the end
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tether.config.load import dump_run, parse_config
from tether.config.stage import StageConfig
from tether.errors import ConfigError
from tether.machine.claim import claimed
from tether.metrics.writers import truncate_after, unfinished, write_whole
from tether.models.checkpoints import METRICS, check_models_kept, holds_run, list_checkpoints
from tether.models.paths import is_adapter
from tether.models.saving import FINAL, MANIFEST, check_can_be_made, files_written, remove_unfinished
from tether.stages.checkpoints import step_of
from tether.stages.run import ConfigT

CONFIG_FILE, FINGERPRINTS_FILE = "config.yaml", "fingerprints.json"


def check_folder(config: StageConfig) -> None:
    """Raises ``ConfigError`` if ``output_dir`` cannot be written, or holds files that the run must not replace."""
    folder = config.output_dir
    check_can_be_made(folder, "output_dir")
    check_models_kept(folder, {"model.path": config.model.path})
    if is_empty(folder):
        return
    is_run = _is_run(folder, type(config))
    if not (config.overwrite_output_dir or config.resume or (is_run and not has_trained(folder))):
        raise ConfigError(
            f"output_dir: {folder} is not empty. Add --resume to continue the run in it, choose another, or add "
            "--overwrite to replace it"
        )
    if not is_run:
        raise ConfigError(f"output_dir: {folder} holds something other than a run of this command; choose another")


def is_empty(folder: Path) -> bool:
    """Whether a run in the folder has written nothing, or was killed while it wrote its first file."""
    return not folder.is_dir() or not set(folder.iterdir()) - {unfinished(folder / CONFIG_FILE)}


def has_trained(folder: Path) -> bool:
    """Whether a run in the folder recorded a step, has a checkpoint, or has written its model."""
    return holds_run(folder) or (folder / MANIFEST).is_file()


def _is_run(folder: Path, section: type[StageConfig]) -> bool:
    try:
        parse_config((folder / CONFIG_FILE).read_text(encoding="utf-8"), section)
    except (OSError, UnicodeDecodeError, ConfigError):
        return False
    return True


def saved_config(folder: Path, section: type[ConfigT]) -> ConfigT:
    """The configuration of the run in a folder."""
    file = folder / CONFIG_FILE
    return parse_config(file.read_text(encoding="utf-8"), section, source=str(file))


def clear(config: StageConfig) -> None:
    """``prepare`` for a run that is to start again later, in a folder checked by ``check_folder``.

    Raises:
        ConfigError: another run is writing to it.
    """
    with claimed(config.output_dir):
        prepare(config, None)


def mark(config: StageConfig) -> None:
    """Marks an empty ``output_dir`` as this run's, even if the run ends before its folder is prepared."""
    if is_empty(config.output_dir):
        _write_config(config)


def prepare(config: StageConfig, checkpoint: Path | None) -> None:
    """Removes what an earlier run wrote to ``output_dir``, or cuts it back to the checkpoint that the run resumes from;
    writes the configuration."""
    folder = config.output_dir
    remove_unfinished(folder, lambda name: name == FINAL)
    for name in (METRICS, FINGERPRINTS_FILE):
        unfinished(folder / name).unlink(missing_ok=True)
    if checkpoint is None:
        for path in list_checkpoints(folder):
            shutil.rmtree(path)
        for name in (METRICS, FINGERPRINTS_FILE, *files_written(folder)):
            (folder / name).unlink(missing_ok=True)
    else:
        step = step_of(checkpoint)
        for path in list_checkpoints(folder):
            if path.resolve() != checkpoint.resolve() and (step_of(path) is None or step_of(path) > step):
                shutil.rmtree(path)  # its steps are repeated, and it is written again
        truncate_after(folder / METRICS, step, step)
    _write_config(config)


def _write_config(config: StageConfig) -> None:
    continues = is_adapter(config.model.path, config.model.revision)
    write_whole(config.output_dir / CONFIG_FILE, dump_run(config, continues=continues).encode())
