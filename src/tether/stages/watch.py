"""The callback that writes a run's log, keeps its best model, and ends it early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from tether.config.keys import counted
from tether.errors import CheckpointError, TrainingError
from tether.machine.distributed import Dist, met_by_all
from tether.metrics.reduce import improves
from tether.metrics.trackers import Trackers
from tether.metrics.writers import JsonlWriter
from tether.stages.checkpoints import step_of, trainer_state
from tether.stages.engine import StageEngine, load_weights
from tether.stages.run import OnProgress, StageRun, Stop

_NOT_LOGGED = frozenset({"num_tokens", "eval_num_tokens"})
"""Counts that TRL starts again in every process, so that they are useless in resumed runs."""


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
    run: StageRun[Any]
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
        chosen_by, state.stateful_callbacks[Watch.__name__] = state.stateful_callbacks[Watch.__name__], self.state()
        if state.best_global_step is None:
            return
        found = self.run.dist.by_main(lambda: _best_so_far(self.run, state))
        is_same = _criterion(chosen_by) == _criterion(self.state())
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
        """Records the logs of a step or an evaluation.

        Raises:
            TrainingError: the loss is not finite.
        """
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
        """Ends a run that should stop, with a checkpoint."""
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


def _best_so_far(run: StageRun[Any], state: TrainerState) -> Path | None:
    """The best checkpoint that a resumed run recorded: beside the one that it resumes from, or where it was then."""
    beside = run.checkpoint.parent / f"checkpoint-{state.best_global_step}"
    recorded = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint is not None else []
    return next((path for path in (beside, *recorded) if step_of(path) == state.best_global_step), None)


def check_same_engine(checkpoint: Path | None, engine: StageEngine, dist: Dist) -> None:
    """Checks that the checkpoint that a run resumes from, if any, was written by the same engine, and by as many
    processes if it shards anything: each process keeps its own part of the optimizer states.

    Raises:
        CheckpointError: it was not.
    """
    if checkpoint is None:
        return
    kept = trainer_state(checkpoint)["stateful_callbacks"][Watch.__name__]
    before, now = kept["attributes"]["sharded"], sharded_by(engine, dist)
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
