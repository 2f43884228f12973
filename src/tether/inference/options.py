"""Checks of the options of commands that answer without a configuration file."""

from __future__ import annotations

import math

from tether.errors import ConfigError


def check_options(
    *,
    response_length: int | None = None,
    max_prompt_length: int | None = None,
    temperature: float | None = None,
) -> None:
    """Raises ``ConfigError`` for options that no answer can have; None leaves one out."""
    for name, value in (("response_length", response_length), ("max_prompt_length", max_prompt_length)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: got {value}, wanted a whole number above 0")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature: got {temperature}, wanted a number of at least 0")
