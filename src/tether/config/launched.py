"""What a launcher such as ``accelerate launch`` or ``torchrun`` tells its processes by environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tether.errors import ConfigError

_planned: ContextVar[int | None] = ContextVar("planned", default=None)


def num_processes() -> int:
    """Processes that were launched, this one included; 1 if none were."""
    return _planned.get() or _number("WORLD_SIZE", 1)


@contextmanager
def planned(processes: int) -> Iterator[None]:
    """A context in which configurations are read as if this many processes had been launched."""
    token = _planned.set(processes)
    try:
        yield
    finally:
        _planned.reset(token)


def rank() -> int:
    """Number of this process among those that were launched; 0 if none were."""
    return _number("RANK", 0)


def local_rank() -> int:
    """Number of this process among those of its machine; 0 if none were launched."""
    return _number("LOCAL_RANK", 0)


def check_numbers() -> None:
    """Raises ``ConfigError`` if a variable that says how many processes there are, or which one this is, holds
    something other than that. Until then, the functions above may raise it."""
    for name, least in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", -1)):
        if _number(name, least) < least:
            raise ConfigError(_told(name, f"a whole number of at least {least}"))
    if rank() >= num_processes():
        raise ConfigError(_told("RANK", f"a number below WORLD_SIZE, {num_processes()}"))


def check() -> None:
    """Raises ``ConfigError`` if the variables are not those of a launcher, but left from something else."""
    check_numbers()
    is_launched = {"WORLD_SIZE": num_processes() > 1, "LOCAL_RANK": _number("LOCAL_RANK", -1) >= 0}
    lacking = [name for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR") if not os.environ.get(name)]
    if any(is_launched.values()) and lacking:
        given = " and ".join(f"{name} is {os.environ[name]}" for name, is_set in is_launched.items() if is_set)
        raise ConfigError(
            f"the environment is not that of a launcher, which sets them all: {given}, but {', '.join(lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} not set. To run one process, unset "
            f"{' and '.join(name for name, is_set in is_launched.items() if is_set)}; to run several, start with "
            "torchrun or accelerate launch"
        )


def uses_deepspeed() -> bool:
    """Whether the launcher's configuration asks for DeepSpeed."""
    return _is_on("ACCELERATE_USE_DEEPSPEED")


def uses_fsdp() -> bool:
    """Whether the launcher's configuration asks for FSDP."""
    return _is_on("ACCELERATE_USE_FSDP")


def mixed_precision() -> str:
    """Mixed precision in the launcher's configuration: ``no`` (also if it is not set), ``bf16``, …"""
    return (os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()


def _number(name: str, missing: int) -> int:
    try:
        return int(os.environ.get(name) or missing)
    except ValueError:
        raise ConfigError(_told(name, "a whole number")) from None


def _told(name: str, wanted: str) -> str:
    return (
        f"the environment variable {name}: got {os.environ[name]!r}, wanted {wanted}, as launchers set it: unset it to "
        "run one process"
    )


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"
