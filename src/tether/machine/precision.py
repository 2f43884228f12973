"""Checks the launcher's mixed precision against the configuration of a run."""

from __future__ import annotations

from tether.config import launched
from tether.config.model import check_weights
from tether.config.schema import RunConfig
from tether.config.stage import StageConfig
from tether.errors import ConfigError


def check_precision(config: RunConfig | StageConfig) -> None:
    """Raises ``ConfigError`` if the launcher asks for a precision that differs from the run's or is not supported."""
    asked = launched.mixed_precision()
    if asked not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"mixed_precision in the configuration of accelerate launch: got {asked}, wanted bf16, fp16 or no: "
            "forward passes run under autocast (train.bf16, train.fp16) or in the weights' own type"
        )
    if asked == "no":
        return
    train = config.train
    given = {"bf16": train.bf16, "fp16": train.fp16 if "fp16" in train.model_fields_set else None}
    for name, value in given.items():
        if value is not None and value != (name == asked):
            raise ConfigError(
                f"train.{name}: got {str(value).lower()}, but accelerate launch uses mixed_precision {asked}; wanted "
                f"the same in both. Remove train.{name}, or set mixed_precision to no"
            )
    try:
        check_weights(config.model, fp16=asked == "fp16")
    except ValueError as error:
        raise ConfigError(f"mixed_precision {asked} of accelerate launch means train.{asked}: {error}") from error
