"""Code of users cannot change how the rest of the process computes and stops.

Reward files and functions run in the process that trains. What they set for the whole process or thread, and what a run
depends on, is set back after them and reported once. The global random generators are left to them: nothing else draws
from them, and checkpoints keep their states. So are logging and filters that hide warnings: they change no result.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from tether.errors import RewardError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Setting:
    """Something that code can set for the whole process or thread."""

    name: str
    """Its name in messages."""
    read: Callable[[], Any]
    """Returns its value."""
    write: Callable[[Any], object]
    """Sets it to a value that was read."""
    is_of_main_thread: bool = False
    """Whether other threads leave it alone, as the main thread may change it meanwhile."""


def _folder() -> str | None:
    with suppress(OSError):  # it has been removed
        return os.getcwd()


def _enter(folder: str | None) -> None:
    with suppress(OSError):
        os.chdir(folder or os.curdir)


def _raising() -> list[Any]:
    """Filters that turn warnings into exceptions, which would end training."""
    return [each for each in warnings.filters if each[0] == "error"]


def _keep_raising(wanted: list[Any]) -> None:
    warnings.filters[:] = [each for each in warnings.filters if each[0] != "error" or each in wanted]


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _product_precision() -> str | None:
    with suppress(RuntimeError):  # it was set for one backend alone
        return torch.get_float32_matmul_precision()


def _set_product_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _cudnn() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def _set_cudnn(flags: tuple[bool, bool]) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = flags


def _autocast() -> tuple[int, list[tuple[str, bool, torch.dtype]]]:
    """How many autocast contexts are open, and its state for each type of device."""
    torch.autocast_increment_nesting()
    kinds = {"cpu"} | ({torch.accelerator.current_accelerator().type} if torch.accelerator.is_available() else set())
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)]
    return torch.autocast_decrement_nesting(), states


def _set_autocast(before: tuple[int, list[tuple[str, bool, torch.dtype]]]) -> None:
    for _ in range(_autocast()[0] - before[0]):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()  # which holds casts of weights, until no context is open
    for kind, is_enabled, dtype in before[1]:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)


def _has_gradients() -> bool:
    """Torch's grad mode, in inference mode that which returns after it."""
    return torch.is_grad_enabled() or torch.is_inference_mode_enabled()


def _set_inference_mode(mode: bool) -> None:
    if _state.mode is not None:  # its end sets back much of the thread's state, which is compared after this
        _state.mode.__exit__(None, None, None)
    _state.mode = torch.inference_mode(mode)
    _state.mode.__enter__()


def _streams() -> tuple[Any, Any]:
    return sys.stdout, sys.stderr


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _handlers() -> list[tuple[int, Any]]:
    """The handlers of signals that may stop a run."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    return [(number, signal.getsignal(number)) for name in names if (number := getattr(signal, name, None)) is not None]


def _set_handlers(handlers: list[tuple[int, Any]]) -> None:
    for number, handler in handlers:
        if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
            signal.signal(number, handler)


_SETTINGS = (
    _Setting("torch's inference mode", torch.is_inference_mode_enabled, _set_inference_mode),
    _Setting("torch's autocast", _autocast, _set_autocast),
    _Setting("torch's grad mode", _has_gradients, torch.set_grad_enabled),
    _Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting(
        "torch's default device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    _Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "torch's deterministic algorithms",
        _deterministic,
        lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
    ),
    _Setting("torch's precision of float32 products", _product_precision, _set_product_precision),
    _Setting("the flags of cuDNN", _cudnn, _set_cudnn),
    _Setting("torch's anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Setting("the current folder", _folder, _enter),
    _Setting("filters that make warnings exceptions", _raising, _keep_raising),
    _Setting("the handlers of signals that stop a run", _handlers, _set_handlers, is_of_main_thread=True),
    _Setting("sys.stdout or sys.stderr", _streams, _set_streams, is_of_main_thread=True),
)


class _State(threading.local):
    """What is kept in a thread: several coroutines may run in turns in one."""

    depth = 0
    before: dict[_Setting, Any]
    mode: torch.inference_mode | None = None
    """What inference mode was last set back by; it lasts only as long as this is referred to."""


_state = _State()
_told: set[str] = set()


@contextmanager
def undisturbed(who: str) -> Iterator[None]:
    """A context after which everything is as it was before. Contexts of one thread may overlap; the last one that ends
    sets back what they changed.

    Args:
        who: whose code runs in it, in messages.

    Raises:
        RewardError: it closed ``sys.stdout`` or ``sys.stderr``, which cannot be opened again.
    """
    if _state.depth == 0:
        is_main = threading.current_thread() is threading.main_thread()
        _state.before = {each: each.read() for each in _SETTINGS if is_main or not each.is_of_main_thread}
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        if _state.depth == 0:
            _set_back(_state.before, who)
        closed = _replaced_streams()
    if closed:
        raise RewardError(f"{who} closed sys.{closed[0]}, which the run writes to; wanted it left open")


def _set_back(before: dict[_Setting, Any], who: str) -> None:
    changed = []
    for each, value in before.items():
        if each.read() != value:
            each.write(value)
            changed.append(each)
    if changed and who not in _told:
        _told.add(who)
        logger.warning(
            "%s changed %s for the whole process. That is set back every time, as training depends on it; change it "
            "for its own code only, as with torch.no_grad()",
            who, ", ".join(each.name for each in changed),
        )  # fmt: skip


def _replaced_streams() -> list[str]:
    """Names of the process's streams that are closed; what is written to them from now on is lost."""
    closed = [name for name in ("stdout", "stderr") if getattr(getattr(sys, name), "closed", False)]
    for name in closed:
        setattr(sys, name, io.StringIO())
    return closed
