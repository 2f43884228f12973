"""The start of a run of a stage: its checks, and what it resumes from, before a tokenizer or a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import SchedulerType

from tether.config import launched
from tether.config.chat import present, with_now
from tether.config.stage import StageConfig
from tether.errors import CheckpointError, ConfigError
from tether.machine.distributed import Dist
from tether.machine.precision import check_precision
from tether.metrics.trackers import check_report_to
from tether.models.attention import check_kernel
from tether.models.chat import check_template
from tether.models.device import default_device
from tether.models.paths import check_model_path
from tether.models.saving import MANIFEST, verify_manifest
from tether.stages.checkpoints import missing_in, newest_checkpoint
from tether.stages.engine import stage_engine
from tether.stages.folder import CONFIG_FILE, check_folder, has_trained, saved_config
from tether.stages.run import ConfigT, StageRun, Tell
from tether.stages.same_run import check_read, check_same_run
from tether.stages.watch import check_same_engine

SCHEDULES = tuple(
    kind.value
    for kind in (
        *(SchedulerType.LINEAR, SchedulerType.COSINE, SchedulerType.COSINE_WITH_RESTARTS, SchedulerType.POLYNOMIAL),
        *(SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.INVERSE_SQRT),
    )
)
"""Schedules of transformers that need no extra arguments and do not depend on a metric."""


def begin(
    config: ConfigT,
    command: str,
    check: Callable[[ConfigT], None],
    read: Callable[[ConfigT], Mapping[str, str]],
    tell: Tell,
) -> StageRun[ConfigT]:
    """Checks all that can be checked without loading a tokenizer or a model, and reports what the run computes on.

    Args:
        check: the stage's own checks.
        read: loads the data for ``fingerprints``; called for a finished run whose data lies elsewhere now.

    Raises:
        ConfigError, DataError, ModelError: a mistake; raised in all processes.
        CheckpointError: as ``find_checkpoint`` and ``check_same_engine``.
    """
    dist = Dist(config.train.ddp_timeout)
    tell = tell if dist.is_main else lambda text: None
    dist.each(lambda: check_launch(config, dist))
    config = as_launched(config)
    dist.each(lambda: check(config))
    dist.by_main(lambda: check_folder(config))
    config = with_now(config, dist.by_main(lambda: _begun_at(config) or present()))
    finished = dist.by_main(lambda: is_finished(config, read))
    checkpoint = None if finished else dist.by_main(lambda: find_checkpoint(config, tell))
    run = StageRun(dist, config, tell, checkpoint, finished)
    if finished:
        tell(f"finished: {config.output_dir} holds the model after the last step")
    else:
        dist.by_main(lambda: check_same_engine(checkpoint, run.engine, dist))
        tell(f"on {dist.described(f'tether {command}', run.engine.name)}")
    return run


def check_stage(config: StageConfig, command: str) -> None:
    """Raises for every mistake that both stages share and that can be found without loading a tokenizer."""
    if find_spec("trl") is None:
        raise ConfigError(f"tether {command} trains with TRL, which is not installed: pip install 'tether[trl]'")
    if config.train.fp16 and not torch.accelerator.is_available():
        told = "train.fp16: got true, wanted false"
        if launched.mixed_precision() == "fp16":
            told = "mixed_precision of the launch: got fp16, wanted no"
        raise ConfigError(f"{told}: there is no accelerator, so tether {command} would train in float32")
    check_kernel(config.model.attn_implementation, default_device())
    check_model_path(config.model.path, "model.path", revision=config.model.revision)
    check_template(config.data.chat_template)
    if config.train.lr_scheduler_type not in SCHEDULES:
        raise ConfigError(
            f"train.lr_scheduler_type: got {config.train.lr_scheduler_type}, wanted one of {', '.join(SCHEDULES)}"
        )
    check_report_to(config.train.report_to)


def check_launch(config: StageConfig, dist: Dist) -> None:
    """Raises ``ConfigError`` if the launch does not fit the run."""
    engine = stage_engine(dist)
    check_precision(config)
    _rows_at_once(config, dist.num_processes)
    engine.check(as_launched(config))


def _rows_at_once(config: StageConfig, num_processes: int) -> int:
    try:
        return config.train.rows_at_once(num_processes)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def as_launched(config: ConfigT) -> ConfigT:
    """The configuration with the micro-batches that fit the launched processes, if it leaves them open, and with the
    precision that the launcher asks for, if any.

    Raises:
        ConfigError: an optimizer step cannot be divided over the processes.
    """
    train, asked = config.train, launched.mixed_precision()
    filled = {"micro_batch_size": train.micro_batch_size or _rows_at_once(config, launched.num_processes())}
    precision = {} if asked == "no" else {"bf16": asked == "bf16", "fp16": asked == "fp16"}
    return config.model_copy(update={"train": train.model_copy(update=filled | precision)})


def _begun_at(config: StageConfig) -> str | None:
    """``data.chat_template_now`` of the run that is resumed; None if there is none, or if it has not begun."""
    if config.resume is False:
        return None
    folder = config.output_dir if config.resume in (True, "auto") else Path(config.resume).parent
    return saved_config(folder, type(config)).data.chat_template_now if (folder / CONFIG_FILE).is_file() else None


def is_finished(config: ConfigT, read: Callable[[ConfigT], Mapping[str, str]]) -> bool:
    """Whether a run with ``resume: auto`` has nothing left to train, as ``output_dir`` already holds its model.

    Args:
        read: as in ``begin``.

    Raises:
        CheckpointError: the model is another run's, or damaged.
    """
    if config.resume != "auto" or not (config.output_dir / MANIFEST).is_file():
        return False
    if check_same_run(config.output_dir, config.output_dir, config, is_finished=True):
        check_read(config.output_dir, config.output_dir, read(config))
    verify_manifest(config.output_dir)
    return True


def find_checkpoint(config: StageConfig, tell: Tell) -> Path | None:
    """The checkpoint to resume from; None if the run starts from the beginning. Incomplete ones are skipped and
    reported by ``tell``. With ``resume: auto``, a run starts from the beginning if nothing has been trained yet.

    Raises:
        CheckpointError: resuming was requested, but there is no complete checkpoint, it belongs to another run, or the
            run is finished.
    """
    if config.resume is False:
        return None
    if isinstance(config.resume, str) and config.resume != "auto":
        found = Path(config.resume)
        if (lacks := missing_in(found)) is not None:
            raise CheckpointError(f"resume: {found} is not a complete checkpoint: {lacks}")
    else:
        if (config.output_dir / MANIFEST).is_file():
            raise CheckpointError(f"resume: the run in {config.output_dir} is finished; there is nothing to resume")
        found = newest_checkpoint(config.output_dir, tell)
        if found is None and config.resume == "auto" and not has_trained(config.output_dir):
            return None
        if found is None:
            raise CheckpointError(
                f"resume: no complete checkpoint in {config.output_dir}; run without --resume to start, or with "
                "--overwrite to replace an earlier run, and set train.save_steps to write checkpoints. If the folder "
                "of the run has moved, name its new place as output_dir"
            )
    check_same_run(found, found.parent, config, is_finished=False)
    return found
