"""Training with TRL's trainers: their arguments, the run around them, and what is kept at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import constants as hub_constants
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, Trainer

from tether.config.base import passes_over
from tether.config.stage import StageConfig
from tether.errors import ModelError
from tether.machine.claim import claimed
from tether.metrics.trackers import trackers_of
from tether.metrics.writers import JsonlWriter, read_jsonl, write_whole
from tether.models.checkpoints import METRICS, way_on
from tether.models.preprocessing import write_processor
from tether.models.saving import may_run_out
from tether.report.card import write_card
from tether.report.read import FINISHED
from tether.stages.checkpoints import newest_checkpoint
from tether.stages.folder import FINGERPRINTS_FILE, check_folder, mark, prepare
from tether.stages.run import OnProgress, StageRun, Stop
from tether.stages.watch import Watch


def trainer_arguments(run: StageRun[Any], num_rows: int, *, evaluates: bool, kind: type) -> dict[str, Any]:
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


@contextmanager
def watched(
    run: StageRun[Any], read: Mapping[str, str], on_progress: OnProgress | None, stop: Stop | None
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
        dist.by_main(lambda: mark(config))
        trackers = dist.each(lambda: trackers_of(config, is_main=dist.is_main))
        stack.callback(trackers.close)
        stack.callback(run.engine.close)
        dist.by_main(lambda: prepare(config, run.checkpoint))
        dist.by_main(lambda: write_whole(folder / FINGERPRINTS_FILE, json.dumps(read, indent=1).encode()))
        writer = JsonlWriter(folder / METRICS) if dist.is_main else None
        with may_run_out(folder, lambda: way_on(newest_checkpoint(folder, lambda told: None))):
            yield Watch(writer, on_progress, stop, run, trackers)


def train(make_trainer: Callable[[], Trainer], run: StageRun[Any]) -> Trainer:
    """Creates TRL's trainer and trains, from the start or from one of its checkpoints."""
    checkpoint = run.checkpoint
    with _no_telemetry():
        trainer = make_trainer()
        trainer.create_model_card = lambda *args, **kwargs: None  # its README.md would be about TRL
        trainer.remove_callback(PrinterCallback)
        run.engine.take(trainer, run.precision)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    return trainer


def keep_best(run: StageRun[Any], trainer: Trainer, model: PreTrainedModel | PeftModel) -> int:
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
    processor: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Writes a model and its tokenizer, to be loaded with transformers or PEFT.

    Args:
        full: its weights if an engine has sharded them; None: those of the live model.
        processor: files that a multimodal model needs besides.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(folder, save_embedding_layers=False, state_dict=full)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    else:
        model.save_pretrained(folder, state_dict=full)
    tokenizer.save_pretrained(folder)
    write_processor(processor, folder)


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
