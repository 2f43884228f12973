"""Calls callbacks at the events of a run as TRL's PPO does; also the callbacks that its trainer adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import (
    DefaultFlowCallback,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.integrations import get_reporting_integration_callbacks

from tether.compat.trl.config import PPOConfig
from tether.compat.trl.following import Changes
from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.train.callbacks import Callbacks
from tether.train.checkpoint import RunState
from tether.train.display import NullDisplay

logger = logging.getLogger(__name__)
SHOWN = (
    "objective/scores", "objective/kl", "rollout/length", "rollout/eos_rate", "policy/approxkl_avg", "loss/policy_avg",
    "loss/value_avg", "eval_scores", "eval_kl", "eval_length", "eval_eos_rate", "lr", "episode",
)  # fmt: skip
"""Metrics of an update and of an evaluation that are printed; metrics.jsonl and the trackers get all."""
ARGUMENTS = PPOConfig.__name__
"""Under what name the changes of arguments are saved beside the states of callbacks."""


@dataclass
class OnlineTrainerState(TrainerState):
    """The ``TrainerState`` of ``transformers`` with the number of answers so far."""

    episode: int = 0


class Events(Callbacks):
    """Calls callbacks during a run, with TRL's arguments and state.

    ``log`` is called with the metrics of every update, before ``on_step_end``, and of every evaluation.

    Args:
        num_prompts: number of prompts in the training data.
        model: the model passed to callbacks.
        log: appends to the state's history and calls callbacks.
        changes: what was changed in ``args``, which belongs to the state of a run.
        follow: lets the next update follow it.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback],
        args: PPOConfig,
        config: RunConfig,
        num_prompts: int,
        *,
        model: nn.Module,
        log: Callable[[dict[str, float]], None],
        changes: Changes,
        follow: Callable[[], None],
    ) -> None:
        super().__init__(callbacks, config, num_prompts, args=args, state=OnlineTrainerState())
        self.model, self.log, self._changes, self._follow = model, log, changes, follow
        self.given: dict[str, Any] = {}
        """Further arguments that every event receives."""
        self.state.max_steps = args.num_total_batches
        self.state.num_train_epochs = args.total_episodes / num_prompts
        self.state.train_batch_size = args.batch_size
        self.state.compute_steps(args, args.num_total_batches)

    def attach(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the tokenizer, and policy and critic in place of the policy."""
        super().attach(self.model, tokenizer)

    def step_begin(self) -> None:
        """Before an update, which follows what callbacks have changed in the arguments."""
        super().step_begin()
        self._follow()

    def exported(self) -> dict[str, list[dict[str, Any]]]:
        """States of the callbacks that have one, and what was changed in the arguments."""
        followed = self._changes.followed
        return super().exported() | ({ARGUMENTS: [{"attributes": followed}]} if followed else {})

    def step_end(self, metrics: Mapping[str, float]) -> None:
        """After an update: logs its metrics, then calls ``on_step_end``."""
        self.count()
        self.state.episode = int(metrics["episode"])
        self.record(metrics)
        self.call("on_step_end")

    def resume(self, state: RunState, history: Sequence[Mapping[str, Any]]) -> None:
        """Resumes from a checkpoint, with a history as ``log`` writes it."""
        for changed in state.callbacks.get(ARGUMENTS, []):
            self._changes.make(changed["attributes"])
        epochs = [{"epoch": self.epoch_after(row["step"])} if row["step"] else {} for row in history]
        super().resume(state, [{**row, **epoch} for row, epoch in zip(history, epochs, strict=True)])

    def record(self, metrics: Mapping[str, float]) -> None:
        """Logs metrics, which also calls the callbacks."""
        self.log(dict(metrics))

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Logs metrics."""
        self.record(metrics)

    def call(self, event: str, **kwargs: Any) -> None:
        """Calls every callback at an event."""
        super().call(event, **self.given, **kwargs)


class ShownSamples(TrainerCallback):
    """Shows answers to a few held-out prompts ``times`` times per run, first after the first update.

    Args:
        show: function that shows them.
    """

    def __init__(self, times: int, show: Callable[[], object]) -> None:
        self.times, self.show = times, show

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Shows them when due."""
        if (state.global_step - 1) % max(1, state.max_steps // self.times) == 0:
            self.show()


class PushedSaves(TrainerCallback):
    """Pushes the policy whenever a checkpoint was written. A failed push warns, and training continues.

    Args:
        push: pushes the policy, given a commit message.
    """

    def __init__(self, push: Callable[[str], object]) -> None:
        self.push = push

    def on_save(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Pushes the policy."""
        try:
            self.push(f"Training in progress, step {state.global_step}")
        except Exception as error:  # whatever network and hub raise, the run is worth more
            logger.warning("push_to_hub after step %d: %s: %s", state.global_step, type(error).__name__, error)


class ShortProgress(ProgressCallback):
    """The progress bar, and of each update's metrics those of ``SHOWN``."""

    def on_log(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Prints metrics above the bar."""
        super().on_log(args, state, control, **kwargs | {"logs": _shown(kwargs["logs"])})


class ShortPrinter(PrinterCallback):
    """The same without a bar."""

    def on_log(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Prints metrics."""
        super().on_log(args, state, control, **kwargs | {"logs": _shown(kwargs["logs"])})


def _shown(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of ``SHOWN``; all of a log that has none of them, as it is the script's own."""
    return {name: logs[name] for name in SHOWN if name in logs} or dict(logs)


class LoggedDisplay(NullDisplay):
    """Sends messages to Python's logging."""

    def message(self, text: str) -> None:
        """Logs one message, warnings at their own level."""
        is_warning = text.startswith("warning: ")
        logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text.removeprefix("warning: "))


def default_callbacks(args: PPOConfig, callbacks: Sequence[Any]) -> list[TrainerCallback]:
    """The callbacks of a run: those of ``transformers`` and of ``report_to``, and the user's, objects or classes.

    Raises:
        ConfigError: there is no tracker of a name in ``report_to``, or one did not start.
    """
    progress = ShortPrinter if args.disable_tqdm else ShortProgress
    try:
        trackers = _made(get_reporting_integration_callbacks(args.report_to))
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"PPOConfig.report_to: got {args.report_to}: {error} Or set it to none") from error
    return [DefaultFlowCallback(), *trackers, *_made([*callbacks, progress])]


def _made(callbacks: Sequence[Any]) -> list[TrainerCallback]:
    """The callbacks as objects."""
    return [callback() if isinstance(callback, type) else callback for callback in callbacks]
