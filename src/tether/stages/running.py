"""Shared by the stages that use TRL's trainers: checks, the folder of a run, its log, stopping and resuming.

    output_dir/
      config.yaml, metrics.jsonl     from the start
      fingerprints.json              hashes of the model and the rows that the run reads, from the start
      checkpoint-N/                  the trainer's own checkpoints: weights, optimizer, schedule, random state
      finished.json                  at the end: the number of steps, and after which of them the model was kept
      manifest.json and the model    at the end
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar
from zipfile import BadZipFile, ZipFile

import torch
from huggingface_hub import constants as hub_constants
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from tether.config import launched
from tether.config.base import differences, passes_over
from tether.config.chat import present, with_now
from tether.config.keys import counted
from tether.config.load import dump_run, parse_config
from tether.config.places import FILE_OF, different, is_place, not_moved
from tether.config.stage import StageConfig
from tether.data.digest import file_digest, rows_digest
from tether.errors import CheckpointError, ConfigError, ModelError, TrainingError
from tether.machine.claim import claimed
from tether.machine.distributed import Dist, met_by_all
from tether.machine.precision import check_precision
from tether.metrics.reduce import improves
from tether.metrics.trackers import Trackers, check_report_to, trackers_of
from tether.metrics.writers import JsonlWriter, read_jsonl, truncate_after, unfinished, write_whole
from tether.models.chat import check_template
from tether.models.checkpoints import METRICS, check_models_kept, holds_run, list_checkpoints, way_on
from tether.models.device import half_dtype
from tether.models.paths import check_model_path, is_adapter, model_digest
from tether.models.saving import (
    FINAL,
    MANIFEST,
    check_can_be_made,
    files_written,
    may_run_out,
    remove_unfinished,
    verify_manifest,
)
from tether.report.card import write_card
from tether.report.read import FINISHED
from tether.stages.engine import StageEngine, load_weights, stage_engine

CONFIG_FILE, TRAINER_STATE = "config.yaml", "trainer_state.json"
FINGERPRINTS_FILE = "fingerprints.json"
_PIECES = (
    ("config.json", "adapter_config.json"), ("model*.safetensors", "adapter_model.safetensors"),
    ("optimizer.pt", "global_step*"), ("scheduler.pt",), ("rng_state*.pth",),
)  # fmt: skip
"""Patterns of what the trainer saves in a checkpoint besides its state. Of most, what is missing it silently begins
anew."""
SCHEDULES = tuple(
    kind.value
    for kind in (
        *(SchedulerType.LINEAR, SchedulerType.COSINE, SchedulerType.COSINE_WITH_RESTARTS, SchedulerType.POLYNOMIAL),
        *(SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.INVERSE_SQRT),
    )
)
"""Schedules of transformers that need no extra arguments and do not depend on a metric."""
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
_NOT_LOGGED = frozenset({"num_tokens", "eval_num_tokens"})
"""Counts that TRL starts again in every process, so that they are useless in resumed runs."""

OnProgress = Callable[[int, int, Mapping[str, float]], None]
"""Called after every optimizer step with its number from 1, the number of steps, and TRL's logs (loss, accuracy, …)."""
Tell = Callable[[str], None]
"""Called with messages for the user, of one or more lines."""
Stop = Callable[[], str | None]
"""Called after every optimizer step; if it returns a reason, the run ends with a checkpoint."""
ConfigT = TypeVar("ConfigT", bound=StageConfig)


# Before a model is loaded


def check_stage(config: StageConfig, command: str) -> None:
    """Raises for every mistake that both stages share and that can be found without loading a tokenizer."""
    if find_spec("trl") is None:
        raise ConfigError(f"tether {command} trains with TRL, which is not installed: pip install 'tether[trl]'")
    if config.train.fp16 and not torch.accelerator.is_available():
        told = "train.fp16: got true, wanted false"
        if launched.mixed_precision() == "fp16":
            told = "mixed_precision of the launch: got fp16, wanted no"
        raise ConfigError(f"{told}: there is no accelerator, so tether {command} would train in float32")
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


def check_folder(config: StageConfig) -> None:
    """Raises ``ConfigError`` if ``output_dir`` cannot be written, or holds files that the run must not replace."""
    folder = config.output_dir
    check_can_be_made(folder, "output_dir")
    check_models_kept(folder, {"model.path": config.model.path})
    if is_empty(folder):
        return
    is_run = _is_run(folder, type(config))
    if not (config.overwrite_output_dir or config.resume or (is_run and not _has_trained(folder))):
        raise ConfigError(
            f"output_dir: {folder} is not empty. Add --resume to continue the run in it, choose another, or add "
            "--overwrite to replace it"
        )
    if not is_run:
        raise ConfigError(f"output_dir: {folder} holds something other than a run of this command; choose another")


def is_empty(folder: Path) -> bool:
    """Whether a run in the folder has written nothing, or was killed while it wrote its first file."""
    return not folder.is_dir() or not set(folder.iterdir()) - {unfinished(folder / CONFIG_FILE)}


def _has_trained(folder: Path) -> bool:
    """Whether a run in the folder recorded a step, has a checkpoint, or has written its model."""
    return holds_run(folder) or (folder / MANIFEST).is_file()


def _is_run(folder: Path, section: type[StageConfig]) -> bool:
    try:
        parse_config((folder / CONFIG_FILE).read_text(encoding="utf-8"), section)
    except (OSError, UnicodeDecodeError, ConfigError):
        return False
    return True


@dataclass(frozen=True)
class Begun(Generic[ConfigT]):
    """A run whose configuration, launch and folder have been checked."""

    dist: Dist
    """The processes, of which only the main one writes files and messages."""
    config: ConfigT
    """The configuration ``as_launched``."""
    tell: Tell
    """Silent in all processes except the main one."""
    checkpoint: Path | None
    """What the run resumes from."""
    is_finished: bool
    """Whether nothing is left to train."""

    @cached_property
    def engine(self) -> StageEngine:
        """Distributes the model over the processes."""
        return stage_engine(self.dist)

    @property
    def precision(self) -> torch.dtype | None:
        """The autocast dtype of forward passes, None for that of the weights."""
        return half_dtype(self.config.train, self.dist.device)


def begin(
    config: ConfigT,
    command: str,
    check: Callable[[ConfigT], None],
    read: Callable[[ConfigT], Mapping[str, str]],
    tell: Tell,
) -> Begun[ConfigT]:
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
    run = Begun(dist, config, tell, checkpoint, finished)
    if finished:
        tell(f"finished: {config.output_dir} holds the model after the last step")
    else:
        dist.by_main(lambda: check_same_engine(checkpoint, run.engine, dist))
        tell(f"on {dist.described(f'tether {command}', run.engine.name)}")
    return run


# The folder of a run


def _begun_at(config: StageConfig) -> str | None:
    """``data.chat_template_now`` of the run that is resumed; None if there is none, or if it kept no date."""
    if config.resume is False:
        return None
    folder = config.output_dir if config.resume in (True, "auto") else Path(config.resume).parent
    return _saved(folder, type(config)).data.chat_template_now if (folder / CONFIG_FILE).is_file() else None


def is_finished(config: ConfigT, read: Callable[[ConfigT], Mapping[str, str]]) -> bool:
    """Whether a run with ``resume: auto`` has nothing left to train, as ``output_dir`` already holds its model.

    Args:
        read: as in ``begin``.

    Raises:
        CheckpointError: the model is another run's, or damaged.
    """
    if config.resume != "auto" or not (config.output_dir / MANIFEST).is_file():
        return False
    if _check_same_run(config.output_dir, config.output_dir, config, is_finished=True):
        _check_read(config.output_dir, config.output_dir, read(config))
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
        if (lacks := _lacks(found)) is not None:
            raise CheckpointError(f"resume: {found} is not a complete checkpoint: {lacks}")
    else:
        if (config.output_dir / MANIFEST).is_file():
            raise CheckpointError(f"resume: the run in {config.output_dir} is finished; there is nothing to resume")
        found = newest_checkpoint(config.output_dir, tell)
        if found is None and config.resume == "auto" and not _has_trained(config.output_dir):
            return None
        if found is None:
            raise CheckpointError(
                f"resume: no complete checkpoint in {config.output_dir}; run without --resume to start, or with "
                "--overwrite to replace an earlier run, and set train.save_steps to write checkpoints. If the folder "
                "of the run has moved, name its new place as output_dir"
            )
    _check_same_run(found, found.parent, config, is_finished=False)
    return found


def newest_checkpoint(folder: Path, tell: Tell) -> Path | None:
    """The newest complete checkpoint in a run's folder, if there is one."""
    for path in reversed(list_checkpoints(folder)):
        if (lacks := _lacks(path)) is None:
            return path
        tell(f"{path} is incomplete: {lacks}; trying the checkpoint before it")
    return None


def _step(checkpoint: Path) -> int | None:
    """Number of finished steps from the trainer's state, which is written last; None without it."""
    try:
        return int(_trainer_state(checkpoint)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _trainer_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))


def _lacks(checkpoint: Path) -> str | None:
    """What a checkpoint lacks, of its pieces and of the ends of their files; None if nothing is found without reading
    all of it."""
    if _step(checkpoint) is None:
        return f"there is no {TRAINER_STATE} that can be read"
    for patterns in _PIECES:
        found = [path for pattern in patterns for path in checkpoint.glob(pattern)]
        if not found:
            return f"there is no {' or '.join(patterns)}"
        for path in found:
            try:
                if path.suffix == ".safetensors":
                    with safe_open(path, framework="pt"):
                        pass
                elif path.suffix == ".json":
                    json.loads(path.read_text(encoding="utf-8"))
                elif path.is_file():
                    ZipFile(path).close()
            except (OSError, ValueError, SafetensorError, BadZipFile) as error:
                return f"{path.name} cannot be read ({error})"
    return None


def check_same_engine(checkpoint: Path | None, engine: StageEngine, dist: Dist) -> None:
    """Checks that the checkpoint that a run resumes from, if any, was written by the same engine, and by as many
    processes if it shards anything: each process keeps its own part of the optimizer states.

    Raises:
        CheckpointError: it was not.
    """
    if checkpoint is None:
        return
    kept = _trainer_state(checkpoint).get("stateful_callbacks", {}).get(Watch.__name__, {})
    before, now = kept.get("attributes", {}).get("sharded"), sharded_by(engine, dist)
    if before != now:
        raise CheckpointError(
            f"resume: {checkpoint} was written {_under(before)}, and cannot be resumed {_under(now)}: launch the run "
            "as before, or start anew from these weights, with the checkpoint as model.path and another output_dir"
        )


def sharded_by(engine: StageEngine, dist: Dist) -> list[Any] | None:
    """The engine that shards the states of a run, and over how many processes; None if none does."""
    return [engine.name, dist.num_processes] if engine.shards else None


def _under(sharded: list[Any] | None) -> str:
    if sharded is None:
        return "without ZeRO"
    name, num_processes = sharded
    return f"by {counted(num_processes, 'process')} under {name}"


def may_change(key: str, *, is_finished: bool) -> bool:
    """Whether a resumed run may change a key.

    Args:
        is_finished: whether nothing is left to train, so that only keys without effect on the result may change.
    """
    return key in MAY_CHANGE and not (is_finished and key in OF_RESULT)


def _check_same_run(held: Path, folder: Path, config: StageConfig, *, is_finished: bool) -> list[str]:
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
    saved = with_now(_saved(folder, type(config)), config.data.chat_template_now)  # older runs kept no date
    differing = differences(saved, config).items()
    changed = {key: values for key, values in differing if not may_change(key, is_finished=is_finished)}
    recorded = _recorded(folder) if changed else {}
    places = place_digests(config) if changed else {}
    refused = not_moved(changed, recorded, places) if recorded else [*changed]
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


def _saved(folder: Path, section: type[ConfigT]) -> ConfigT:
    """The configuration of the run in a folder."""
    file = folder / CONFIG_FILE
    return parse_config(file.read_text(encoding="utf-8"), section, source=str(file))


Rows = Iterable[tuple[int, Sequence[Iterable[int]], Mapping[str, Any]]]
"""Argument of ``rows_digest``."""


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
    saved = _recorded(config.output_dir)
    return not_moved(changed, saved, place_digests(config)) or different(saved, read(config))


def _recorded(folder: Path) -> dict[str, str]:
    """The ``fingerprints`` of the run in a folder; none if a version without them wrote it.

    Raises:
        CheckpointError: they cannot be read.
    """
    file = folder / FINGERPRINTS_FILE
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"resume: {file} cannot be read: {error}") from error


def check_same_data(run: Begun[Any], read: Mapping[str, str]) -> None:
    """Checks that a resumed run reads the same model and rows as before; runs of versions without hashes are accepted.

    Args:
        read: its ``fingerprints``.

    Raises:
        CheckpointError: the model or a dataset has changed. The trainer skips as many rows as were trained on, so other
            rows would be trained on twice, or never.
    """
    if run.checkpoint is not None:
        _check_read(run.checkpoint, run.checkpoint.parent, read)


def _check_read(held: Path, folder: Path, read: Mapping[str, str]) -> None:
    saved = _recorded(folder)
    if changed := different(saved, read) if saved else []:
        of_data = [key for key in changed if key != "model.path"]
        what = "rows, their order, the tokenizer or its chat template" if of_data else "weights or shape"
        raise CheckpointError(
            f"resume: {' and '.join(changed)} changed since {held} was written: {what}. Restore what was "
            f"there, or start anew: remove {folder}, or choose another output_dir"
        )


def clear(config: StageConfig) -> None:
    """Removes what an earlier run wrote to ``output_dir``, checked by ``check_folder``, and writes the configuration.

    Raises:
        ConfigError: as ``watched``.
    """
    with claimed(config.output_dir):
        _prepare(config, None)


def _mark(config: StageConfig) -> None:
    """Marks an empty ``output_dir`` as this run's, even if the run ends before its folder is prepared."""
    if is_empty(config.output_dir):
        _write_config(config)


def _prepare(config: StageConfig, checkpoint: Path | None) -> None:
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
        step = _step(checkpoint)
        for path in list_checkpoints(folder):
            if path.resolve() != checkpoint.resolve() and (_step(path) is None or _step(path) > step):
                shutil.rmtree(path)  # its steps are repeated, and it is written again
        truncate_after(folder / METRICS, step, step)
    _write_config(config)


def _write_config(config: StageConfig) -> None:
    continues = is_adapter(config.model.path, config.model.revision)
    write_whole(config.output_dir / CONFIG_FILE, dump_run(config, continues=continues).encode())


# Training


def trainer_arguments(run: Begun[Any], num_rows: int, *, evaluates: bool, kind: type) -> dict[str, Any]:
    """Arguments of TRL's trainers that both stages set.

    Args:
        num_rows: number of training rows.
        evaluates: whether there are held-out rows, to evaluate on every ``train.eval_steps`` steps.
        kind: class of the arguments.
    """
    config, train = run.config, run.config.train
    saves = bool(train.save_steps or train.metric_for_best_model)
    eval_steps = train.eval_steps if evaluates else None
    rows = train.rows_at_once(run.dist.num_processes)
    at_once = rows * run.dist.num_processes
    accumulation = train.batch_size // at_once
    steps_an_epoch = math.ceil(math.ceil(num_rows / at_once) / accumulation)
    num_steps = train.max_steps or math.ceil(passes_over(steps_an_epoch, train.num_train_epochs or 1.0))
    has_accelerator = torch.accelerator.is_available()
    names = {argument.name for argument in fields(kind)}  # transformers is renaming this argument
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {
        "output_dir": str(config.output_dir),
        "max_steps": num_steps,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": train.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": train.lr_scheduler_type,
        "warmup_steps": train.warmup_steps or round(train.warmup_ratio * num_steps),
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm or 0.0,
        checkpointing: train.gradient_checkpointing,
        "seed": train.seed,
        "max_length": None,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no" if eval_steps is None else "steps",
        "eval_steps": eval_steps,
        "save_strategy": "steps" if saves else "no",
        "save_steps": train.save_steps or num_steps,
        "save_total_limit": train.save_total_limit,
        # load_best_model_at_end is keep_best here: the trainer's own would require saves and evaluations at the same
        # steps, although the best is saved anyway, and goes on silently with the last model if it cannot load the best
        "metric_for_best_model": train.metric_for_best_model,
        "greater_is_better": train.is_greater_better if train.metric_for_best_model else None,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not has_accelerator,
        "ddp_timeout": train.ddp_timeout,
        "dataloader_pin_memory": has_accelerator,
        **run.engine.arguments(run.precision),
    }


@dataclass
class Watch(TrainerCallback, ExportableState):
    """Writes TRL's logs to metrics.jsonl, trackers and callers, saves the best evaluated model, and ends a run that
    should stop, does not improve any more, or has diverged.

    Every process has one.
    """

    writer: JsonlWriter | None
    """Only in the main process."""
    on_progress: OnProgress | None
    stop: Stop | None
    run: Begun[Any]
    """The watched run."""
    trackers: Trackers
    """The run's trackers in the main process; none in the others."""
    interrupted: str | None = None
    """Why the run was asked to stop, if it was."""

    def state(self) -> dict[str, Any]:
        """What every checkpoint keeps: for ``on_train_begin`` the criterion for the best evaluation, and for
        ``check_same_engine`` what shards it."""
        train, sharded = self.run.config.train, sharded_by(self.run.engine, self.run.dist)
        criterion = [train.metric_for_best_model, train.is_greater_better]
        return {"args": {}, "attributes": {"criterion": criterion, "sharded": sharded}}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel | PeftModel,
        **kwargs: Any,
    ) -> None:
        """Completes what the trainer restored of a resumed run.

        The weights of a full model are loaded again: transformers matches them by name alone, and leaves those as they
        are whose names in a file are others than in memory, such as experts. The optimizer already holds the
        parameters. An engine that shards has saved and loaded them by their names in memory. The best checkpoint is
        looked for, as the folder may have moved since its place was recorded. It is forgotten if another criterion
        chose it.
        """
        checkpoint = self.run.checkpoint
        if checkpoint is not None and not isinstance(model, PeftModel) and not self.run.engine.shards:
            self.run.dist.each(lambda: load_weights(model, checkpoint))
        chosen_by, state.stateful_callbacks[Watch.__name__] = state.stateful_callbacks.get(Watch.__name__), self.state()
        if state.best_global_step is None:
            return
        found = self.run.dist.by_main(lambda: _best_so_far(self.run, state))
        is_same = chosen_by is None or _criterion(chosen_by) == _criterion(self.state())  # older ones allowed no other
        if found is not None and is_same:
            state.best_model_checkpoint = str(found)
            return
        why = "is not there any more" if is_same else "was chosen by another criterion"
        self.run.tell(
            f"warning: checkpoint-{state.best_global_step}, the best so far, {why}; the best from here on is kept"
        )
        state.best_global_step = state.best_metric = state.best_model_checkpoint = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or not {"loss", "eval_loss", "eval_accuracy"} & logs.keys():
            return
        numbers = {name: float(value) for name, value in logs.items() if name not in _NOT_LOGGED}
        if not math.isfinite(numbers.get("loss", 0.0)):
            diverged = TrainingError(
                f"step {state.global_step}: the loss is {numbers['loss']}; lower train.learning_rate, or set "
                "train.bf16 and train.fp16 to false"
            )
            raise met_by_all(diverged)  # the loss is the mean over all processes
        if self.writer is None:
            return
        self.writer.write({"step": state.global_step, **numbers})
        self.trackers.log(numbers, state.global_step)
        if self.on_progress is not None and "loss" in numbers:
            self.on_progress(state.global_step, state.max_steps, numbers)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.stop is None or state.global_step >= state.max_steps:
            return
        self.interrupted = self.run.dist.first(self.stop())  # a signal may reach each process at a different time
        if self.interrupted is not None:
            control.should_save = control.should_training_stop = True
            if args.save_total_limit == 1:  # with 1, the trainer would at its end keep only the best checkpoint
                args.save_total_limit = 2

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float],
        **kwargs: Any,
    ) -> None:
        """Saves the best so far; as in Trainer, ``state.best_metric`` is not updated yet."""
        train = self.run.config.train
        name = train.metric_for_best_model
        if name is None:
            return
        if improves(metrics[name], state.best_metric, greater_is_better=train.is_greater_better):
            control.should_save = True
        elif train.early_stopping_patience is not None:
            # counted anew, so that a resumed run counts those before it as well
            since = [row for row in state.log_history if name in row and row["step"] > (state.best_global_step or 0)]
            if len(since) >= train.early_stopping_patience:
                waited = f"{counted(len(since), 'evaluation')} in a row without a better {name}"
                self.run.tell(f"ends after step {state.global_step}: {waited}")
                control.should_training_stop, self.interrupted = True, None


def _criterion(kept: Mapping[str, Any]) -> list[Any]:
    """The criterion in what a checkpoint keeps."""
    return kept["attributes"]["criterion"]


def _best_so_far(run: Begun[Any], state: TrainerState) -> Path | None:
    """The best checkpoint that a resumed run recorded: beside the one that it resumes from, or where it was then."""
    beside = run.checkpoint.parent / f"checkpoint-{state.best_global_step}"
    recorded = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint is not None else []
    return next((path for path in (beside, *recorded) if _step(path) == state.best_global_step), None)


@contextmanager
def watched(
    run: Begun[Any], read: Mapping[str, str], on_progress: OnProgress | None, stop: Stop | None
) -> Iterator[Watch]:
    """A callback that writes the run's log and feeds its trackers, which are closed on exit.

    Inside, this run has exclusive use of ``output_dir``, which is prepared: files of an earlier run are removed, or the
    folder is cut back to the checkpoint that the run resumes from. Nothing is removed before the trackers have started.

    Args:
        read: the run's ``fingerprints``, saved for a later resume.

    Raises:
        CheckpointError: inside, the disk cannot be written to any more.
        ConfigError: ``output_dir`` cannot be created, another run is writing or has meanwhile written to it, or a
            tracker did not start.
    """
    dist, config = run.dist, run.config
    folder = config.output_dir
    with ExitStack() as stack:
        dist.by_main(lambda: stack.enter_context(claimed(folder)))
        dist.by_main(lambda: check_folder(config))  # again: another run may have started there in the meantime
        dist.by_main(lambda: _mark(config))
        trackers = dist.each(lambda: trackers_of(config, is_main=dist.is_main))
        stack.callback(trackers.close)
        stack.callback(run.engine.close)
        dist.by_main(lambda: _prepare(config, run.checkpoint))
        dist.by_main(lambda: write_whole(folder / FINGERPRINTS_FILE, json.dumps(read, indent=1).encode()))
        writer = JsonlWriter(folder / METRICS) if dist.is_main else None
        with may_run_out(folder, lambda: way_on(newest_checkpoint(folder, lambda told: None))):
            yield Watch(writer, on_progress, stop, run, trackers)


def train(make_trainer: Callable[[], Trainer], run: Begun[Any]) -> Trainer:
    """Creates TRL's trainer and trains, from the start or from one of its checkpoints."""
    checkpoint = run.checkpoint
    with _no_telemetry():
        trainer = make_trainer()
        trainer.create_model_card = lambda *args, **kwargs: None  # its README.md would be about TRL
        trainer.remove_callback(PrinterCallback)
        run.engine.take(trainer, run.precision)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    return trainer


def keep_best(run: Begun[Any], trainer: Trainer, model: PreTrainedModel | PeftModel) -> int:
    """Replaces the last model by the best one, if requested; returns the number of steps that the kept model was
    trained for."""
    state, train = trainer.state, run.config.train
    last, best = state.global_step, state.best_global_step
    if not train.load_best_model_at_end or best in (None, last):
        return last
    try:
        run.engine.load(model, Path(state.best_model_checkpoint))
    except ModelError as error:
        run.tell(f"warning: {error}; the model of the last step is kept instead of the best one")
        return last
    name = train.metric_for_best_model
    run.tell(f"kept: the model after step {best} of {last}, with the best {name}, {state.best_metric:.3g}")
    return best


def save(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    full: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes a model and its tokenizer, to be loaded with transformers or PEFT.

    Args:
        full: its weights if an engine has sharded them; None: those of the live model.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(folder, save_embedding_layers=False, state_dict=full)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    else:
        model.save_pretrained(folder, state_dict=full)
    tokenizer.save_pretrained(folder)


def write_end(folder: Path, output_dir: Path, *, last: int, kept: int, evaluation: Mapping[str, float]) -> None:
    """Writes how a run ended, and the card, beside its model.

    Args:
        folder: folder of the model, whose files are then moved to ``output_dir``.
        last: number of steps of the run.
        kept: number of steps that the model was trained for.
        evaluation: its metrics on held-out rows.
    """
    (folder / FINISHED).write_text(json.dumps({"step": last, "kept_step": kept}) + "\n", encoding="utf-8")
    write_card(folder, output_dir, evaluation=evaluation)


def last_loss(config: StageConfig) -> float:
    """The training loss of the last step in the log."""
    return next(row["loss"] for row in reversed(read_jsonl(config.output_dir / METRICS)) if "loss" in row)


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Keeps TRL from sending telemetry."""
    before = hub_constants.HF_HUB_DISABLE_TELEMETRY
    hub_constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        hub_constants.HF_HUB_DISABLE_TELEMETRY = before
