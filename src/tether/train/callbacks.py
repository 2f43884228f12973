"""Extension by ``transformers.TrainerCallback``; one step is one update."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.state import is_initialized
from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from tether.config.launched import local_rank, rank
from tether.config.schema import RunConfig, TrainConfig
from tether.errors import CheckpointError, ConfigError
from tether.metrics.reduce import improves
from tether.train.checkpoint import RunState

KEPT_LINES = 1000
"""Number of latest updates and evaluations kept in ``state.log_history``; metrics.jsonl has all."""


def callbacks_of(callbacks: Any) -> list[TrainerCallback]:
    """The callbacks as objects.

    Raises:
        ConfigError: one of them is something else.
    """
    wanted = "wanted a list of transformers.TrainerCallback, objects or classes"
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks: got {type(callbacks).__name__}, {wanted}")
    for callback in callbacks or ():
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise ConfigError(f"callbacks: got a list with {kind.__name__}, {wanted}")
    return [callback() if isinstance(callback, type) else callback for callback in callbacks or ()]


def training_arguments(config: RunConfig, num_updates: int) -> TrainingArguments:
    """The configuration as a real ``TrainingArguments``, for callbacks that read one."""
    train = config.train
    evaluates = config.data.has_eval
    args = TrainingArguments(
        output_dir=str(config.output_dir),
        per_device_train_batch_size=config.max_rows_per_micro_batch() or config.mini_batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type=_named_schedule(train),
        lr_scheduler_kwargs=train.lr_scheduler_kwargs,
        warmup_steps=train.warmup_steps or train.warmup_ratio,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm or 0.0,
        max_steps=num_updates,
        logging_steps=train.logging_steps,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=(train.eval_steps or num_updates) if evaluates else None,
        save_strategy="steps" if train.save_steps else "no",
        save_steps=train.save_steps or 500,
        save_total_limit=train.save_total_limit,
        metric_for_best_model=train.metric_for_best_model,
        greater_is_better=train.greater_is_better,
        seed=train.seed,
        run_name=train.run_name or str(config.output_dir),
        report_to="none",
        disable_tqdm=True,
        accelerator_config={"use_configured_state": is_initialized()},  # its state would be reset otherwise
    )
    # Not as an argument, which would require evaluations and saves at the same steps; here the best is saved anyway.
    args.load_best_model_at_end = train.load_best_model_at_end
    return args


def _named_schedule(train: TrainConfig) -> str:
    """The schedule, or "constant" for those that follow a metric, which ``TrainingArguments`` does not accept here."""
    return "constant" if train.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy") else train.lr_scheduler_type


class Callbacks:
    """Calls every callback at the events of a run and keeps their requests.

    Args:
        num_prompts: number of prompts in the training data.
        args, state: passed to callbacks; made from the configuration if omitted.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback],
        config: RunConfig,
        num_prompts: int,
        *,
        args: TrainingArguments | None = None,
        state: TrainerState | None = None,
    ) -> None:
        num_updates = config.num_updates(num_prompts)
        self.callbacks = list(callbacks)
        self.args = args or training_arguments(config, num_updates)
        self.state = state or TrainerState(
            max_steps=num_updates,
            logging_steps=config.train.logging_steps,
            train_batch_size=config.train.rollout_batch_size,
            is_local_process_zero=local_rank() == 0,
            is_world_process_zero=rank() == 0,
        )
        self.control = TrainerControl()
        self._config, self._num_prompts = config, num_prompts
        self._model: nn.Module | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def attach(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the policy and its tokenizer, which are passed to callbacks at every later event."""
        self._model, self._tokenizer = model, tokenizer

    @property
    def stop_requested(self) -> bool:
        """Whether a callback requested the end of training."""
        return self.control.should_training_stop

    def exported(self) -> dict[str, list[dict[str, Any]]]:
        """States of the callbacks that have one, by class.

        Raises:
            CheckpointError: a state cannot be written as JSON.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for callback in self.callbacks:
            if isinstance(callback, ExportableState):
                state, name = callback.state(), type(callback).__name__
                try:
                    found.setdefault(name, []).append(json.loads(json.dumps(state)))
                except (TypeError, ValueError) as error:
                    raise CheckpointError(f"the state of the callback {name} cannot be saved: {error}") from error
        return found

    def resume(self, state: RunState, history: Sequence[Mapping[str, Any]]) -> None:
        """Resumes from a checkpoint.

        Args:
            history: metrics of the updates and evaluations before it.
        """
        self.state.global_step, self.state.best_metric = state.step, state.best_metric
        self.state.best_global_step = state.best_step
        if state.best_step is not None:
            self.state.best_model_checkpoint = str(self._config.output_dir / f"checkpoint-{state.best_step}")
        self.state.log_history = [dict(line) for line in history[-KEPT_LINES:]]
        left = {name: list(states) for name, states in state.callbacks.items()}
        for callback in self.callbacks:
            if isinstance(callback, ExportableState) and left.get(type(callback).__name__):
                for name, value in left[type(callback).__name__].pop(0)["attributes"].items():
                    setattr(callback, name, value)

    def train_begin(self) -> None:
        """Called before the first update."""
        self.call("on_train_begin")

    def step_begin(self) -> None:
        """Called before an update."""
        self.control.should_evaluate = self.control.should_save = self.control.should_log = False
        self.call("on_step_begin")

    def step_end(self, metrics: Mapping[str, float]) -> None:
        """Called after an update; also adds its metrics to ``state.log_history``."""
        self.count()
        self.call("on_step_end")
        self.record(metrics)
        is_due = self.state.global_step % self._config.train.logging_steps == 0
        if self.control.should_log or is_due or self.state.global_step == self.state.max_steps:
            self.call("on_log", logs=dict(metrics))

    def count(self) -> None:
        """Counts an update."""
        self.state.global_step += 1
        self.state.epoch = self.epoch_after(self.state.global_step)

    def epoch_after(self, step: int) -> float:
        """Number of passes over the prompts after ``step`` updates."""
        answers = self._num_prompts * self._config.sampling.num_generations
        return step * self._config.train.rollout_batch_size / answers

    def record(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the history, which keeps the latest ``KEPT_LINES``."""
        self.state.log_history.append({"step": self.state.global_step, **metrics})
        del self.state.log_history[:-KEPT_LINES]

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation, which is logged. As in Trainer, ``state.best_metric`` is not updated yet then."""
        self.log_evaluation(metrics)
        self.call("on_evaluate", metrics=dict(metrics))
        name = self._config.train.metric_for_best_model
        if name is not None:
            value = metrics[name]
            if improves(value, self.state.best_metric, greater_is_better=self._config.train.greater_is_better):
                self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of an evaluation to the history and calls ``on_log``."""
        self.record(metrics)
        self.call("on_log", logs=dict(metrics))

    def saved(self, path: Path) -> None:
        """Called after a checkpoint, which may belong to the best evaluation so far."""
        if self.state.best_global_step is not None and self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(path)
        self.call("on_save", checkpoint=str(path))

    def train_end(self) -> None:
        """Called after the last update and its evaluation."""
        self.call("on_train_end")

    def due(self, what: str, every: int | None) -> bool:
        """Whether an evaluation or a save follows the current update: on schedule, or requested by a callback."""
        scheduled = every is not None and self.state.global_step % every == 0
        return scheduled or bool(getattr(self.control, f"should_{what}"))

    def call(self, event: str, **kwargs: Any) -> None:
        """Calls ``event`` of every callback."""
        for callback in self.callbacks:
            result = getattr(callback, event)(
                self.args,
                self.state,
                self.control,
                model=self._model,
                processing_class=self._tokenizer,
                **kwargs,
            )
            self.control = result or self.control
