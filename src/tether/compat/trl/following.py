"""Arguments that a script changes after it made the trainer, in a callback for example."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tether.compat.trl.config import PPOConfig, check_arguments
from tether.config.schema import RunConfig
from tether.errors import ConfigError

logger = logging.getLogger(__name__)

FOLLOWED = (
    "kl_coef", "kl_estimator", "whiten_rewards", "gamma", "lam", "cliprange", "cliprange_value", "vf_coef",
    "missing_eos_penalty",
)  # fmt: skip
"""Arguments that a run reads anew at each update, as TRL's does."""
OF_TRACKERS = ("run_name",)
"""Arguments that callbacks of transformers change."""


class Changes:
    """What a script has changed in the arguments of a trainer since it made the trainer.

    Args:
        args: the arguments.
        describe: the run that arguments describe.
    """

    def __init__(self, args: PPOConfig, describe: Callable[[PPOConfig], RunConfig]) -> None:
        self._args, self._describe = args, describe
        self._made_with, self._config = _values(args), describe(args)
        self._last = self._made_with
        self._told: set[str] = set()

    @property
    def followed(self) -> dict[str, Any]:
        """The arguments of ``FOLLOWED`` that the script has changed, with their values."""
        return {name: value for name, value in self._changed().items() if name in FOLLOWED}

    def read(self, *, begins: bool) -> dict[str, Any]:
        """The arguments of ``FOLLOWED``, whose values are valid.

        Args:
            begins: whether the run has not begun, so that a changed argument that is not followed is an error. Later it
                is a warning, once.

        Raises:
            ConfigError: an argument is invalid or not followed; says which.
        """
        if _values(self._args) != self._last:
            check_arguments(self._args)
            self._describe(self._args)
            if self._made_with["kl_coef"] == 0 < self._args.kl_coef:
                raise ConfigError(
                    f"PPOConfig.kl_coef: changed from 0 to {self._args.kl_coef} after PPOTrainer was made, which has "
                    "no reference then; make it with a kl_coef above 0"
                )
            for line in self._kept():
                if begins:
                    raise ConfigError(line)
                if line not in self._told:
                    logger.warning(line)
                self._told.add(line)
            self._last = _values(self._args)
        return {name: getattr(self._args, name) for name in FOLLOWED}

    def make(self, values: Mapping[str, Any]) -> None:
        """Changes arguments: to those of the main process, or of the run that a checkpoint continues."""
        vars(self._args).update(values)

    def _changed(self) -> dict[str, Any]:
        return {name: value for name, value in _values(self._args).items() if value != self._made_with[name]}

    def _kept(self) -> list[str]:
        """A line for each argument that the script has changed and that is not followed."""
        lines = []
        for name, value in self._changed().items():
            only = copy.copy(self._args)
            vars(only).update(self._made_with | {name: value})
            if name not in (*FOLLOWED, *OF_TRACKERS) and self._describe(only) != self._config:
                old = self._made_with[name]
                lines.append(
                    f"PPOConfig.{name}: changed from {old} to {value} after PPOTrainer was made, which keeps {old}; "
                    "change it before"
                )
        return lines


def _values(args: PPOConfig) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in fields(args)}
