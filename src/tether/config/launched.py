"""What a launcher such as ``accelerate launch`` or ``torchrun`` tells its processes by environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
    return int(os.environ.get(name) or missing)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"
