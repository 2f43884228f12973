"""Options of the commands that answer without a configuration file: their checks, and their names in messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from tether.errors import ConfigError, TetherError

_NAMES = (
    ("data.max_prompt_length", "--max_prompt_length"),
    ("sampling.response_length", "--response_length"),
    (", or load the model in fewer bits (model.quantization, model.dtype)", ""),
    (", or exceed the range of half precision (train.fp16)", ""),
)
"""What messages about keys of a configuration say, and what they say of a command's options."""
_NAMES_IN_CHAT = (
    ("data.max_prompt_length or sampling.response_length", "--response_length"),
    ("sampling.response_length or data.max_prompt_length", "--response_length"),
    *_NAMES,
)
"""The same for ``tether chat``, where a conversation may be as long as the model can read."""


@contextmanager
def naming_options(*, in_chat: bool = False) -> Iterator[None]:
    """Within this context, messages name the options of ``tether generate`` or ``tether chat`` instead of keys."""
    try:
        yield
    except TetherError as error:
        told = str(error)
        for key, option in _NAMES_IN_CHAT if in_chat else _NAMES:
            told = told.replace(key, option)
        error.args = (told, *error.args[1:])
        raise


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
