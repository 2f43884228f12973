"""Checks of the options of commands that answer without a configuration file."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tether.config.chat import COLUMNS_OPTION, DataSource
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


def named_source(
    given: str,
    key: str,
    *,
    split: str,
    subset: str | None,
    columns: dict[str, str] | None,
    of_run: Mapping[str, str] | None = None,
) -> DataSource:
    """The dataset that a command reads under the option ``key``.

    Args:
        columns: the dataset's column names by ours; those of the run if None.
        of_run: ``data.columns`` of the run, if the command answers for one.
    """
    are_own = columns is not None
    return DataSource(
        given,
        key,
        split=split,
        subset=subset,
        columns=(columns if are_own else of_run) or {},
        columns_key=COLUMNS_OPTION,
        has_columns_of_run=not are_own,
    )
