"""Environment variables that libraries read as they are imported, and refuse."""

from __future__ import annotations

import os
import traceback

from tether.errors import ConfigError

_LIBRARIES = (
    "torch", "transformers", "huggingface_hub", "datasets", "accelerate", "peft", "trl", "tokenizers", "tqdm", "vllm",
)  # fmt: skip
_PREFIXES = ("TORCH", "PYTORCH", "HF_", "HUGGINGFACE_", *(f"{name.upper()}_" for name in _LIBRARIES))
"""Beginnings of the names of their variables."""
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Parts of the names of variables whose values no message may show."""
SHOWN = 200
"""Maximum number of characters of a library's own words."""


def refused_variable(error: Exception) -> ConfigError | None:
    """The error in words that name the variable, if a library raised it because of one that the user set.

    Libraries name the variable, or only quote its value. A value counts while a library is being imported, which is
    when they read most of them, while an ``Accelerator`` is made, which reads its own, or in a function or module that
    is named after the environment. Errors of other kinds (out of memory) mention variables as a way out; tokens and
    keys are never shown.
    """
    told = str(error)
    said = told.lower()
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    library = next((name for name in reversed(by) if name in _LIBRARIES), None)
    if library is None or not isinstance(error, ValueError | KeyError | TypeError):
        return None
    reads = any(
        name in _LIBRARIES and _reads_environment(frame.f_globals["__name__"], frame.f_code.co_name)
        for name, frame in zip(by, frames, strict=True)
    )
    set_ones = (name for name, value in os.environ.items() if name.startswith(_PREFIXES) and value)
    given = {name: os.environ[name] for name in set_ones if not any(word in name for word in _SECRET)}
    named = [name for name in given if name in told]
    quoted = [
        name for name, value in given.items() if repr(value.lower()) in said or said.endswith(f" {value.lower()}")
    ]
    at_fault = named or (quoted if reads else [])
    if not at_fault:
        return None
    got = ", or ".join(f"{name}: got {given[name]!r}" for name in sorted(at_fault))
    from tether.report.text import one_line

    reason = one_line(told, SHOWN).rstrip(".")
    found = ConfigError(f"the environment variable {got}, which {library} refuses ({reason}): correct or unset it")
    found.is_shared = getattr(error, "is_shared", False)
    return found


def _reads_environment(module: str, function: str) -> bool:
    makes_accelerator = (module, function) == ("accelerate.accelerator", "__init__")
    return function == "<module>" or makes_accelerator or "env" in function or "environment" in module
