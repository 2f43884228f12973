"""Stops a run early without losing its progress: signals and a time limit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tether.machine.distributed import Dist

T = TypeVar("T")
_WARNING = "Ctrl-C now would end at once, and lose what was done since the last save"


class Stopped(Exception):
    """The run was asked to stop; raised only when the weights are those of the last finished update."""


class _AtOnce(BaseException):
    """Carries a signal out of code that may catch every ``Exception``; becomes ``Stopped`` outside of it."""


class StopRequest:
    """Handles SIGINT, SIGTERM, SIGHUP, SIGUSR1 and the time limit, so that the run stops in a consistent state.

    If SIGHUP was ignored before, as under ``nohup``, it still is. If something else handles SIGUSR1, its handler stays;
    otherwise the signal is taken as a scheduler's warning that time is running out. A second SIGINT raises
    KeyboardInterrupt at once. Processes that are forked meanwhile react to signals as this one did before. In a thread
    other than the main one, only the time limit works. The context is reentrant.

    Args:
        max_runtime: hours after entering, or None.
        dist: the processes, if there may be several, which then stop at a point where all of them know of it.
    """

    def __init__(self, max_runtime: float | None = None, dist: Dist | None = None) -> None:
        self.max_runtime, self._dist = max_runtime, dist
        self.reason: str | None = None
        self._deadline: float | None = None
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._is_waiting = False
        self._depth = 0

    def __enter__(self) -> StopRequest:
        self._depth += 1
        if self._depth > 1:
            return self
        if self.max_runtime is not None:
            self._deadline = time.monotonic() + 3600 * self.max_runtime
        if threading.current_thread() is threading.main_thread():
            for number in _signals():
                self._before[number] = signal.signal(number, self._on_signal)
        if self._dist is not None:
            self._dist.stop_asked, self._dist.interruptible = self.asked, self.interruptible
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()
            if self._dist is not None:
                self._dist.stop_asked, self._dist.interruptible = lambda: None, lambda work: work()
        if kind is _AtOnce:
            raise Stopped(self.reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked process of a reward function, which must not outlive its pool
            signal.signal(number, self._before[number] or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
        if self._is_waiting:
            self._is_waiting = False
            raise _AtOnce
        if self._dist is None or self._dist.is_main:
            with suppress(OSError):  # written past Python's streams, which may be in the middle of a write
                os.write(2, f"\n{self.reason}: stopping at the next safe point. {_WARNING}\n".encode())

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this context, a signal stops the run at any point: for waits that do not change the run's state, and
        may take longer than the time left on the machine. With several processes, only ``interruptible`` does this."""
        try:
            self._is_waiting = self._dist is None or self._dist.num_processes == 1
            self.check()
            yield
        finally:
            self._is_waiting = False

    def interruptible(self, work: Callable[[], T]) -> T:
        """Returns ``work()``, in which this process must not wait for another one; a signal ends it at any point.

        Raises:
            Stopped: there was a signal, which the other processes do not know of yet.
        """
        try:
            try:
                self._is_waiting = True
                if (reason := self.asked()) is not None:
                    raise Stopped(reason)
                return work()
            finally:
                self._is_waiting = False
        except _AtOnce:  # wherever it was raised: outside of these statements, signals raise nothing
            raise Stopped(self.reason) from None

    def check(self) -> None:
        """Raises ``Stopped`` if the run was asked to stop; with several processes, that is left to ``agree``."""
        if self._dist is None or self._dist.num_processes == 1:
            self.agree()

    def agree(self) -> None:
        """Raises ``Stopped`` in all processes if one of them was asked to stop."""
        reason = self.asked()
        if self._dist is not None:
            reason = self._dist.first(reason)
        if reason is not None:
            raise Stopped(reason)

    def asked(self) -> str | None:
        """Why this process was asked to stop, or None."""
        if self.reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self.reason = f"max_runtime of {self.max_runtime:g} h"
        return self.reason


def _signals() -> list[signal.Signals]:
    """The signals that ask a run to stop. Windows has neither SIGHUP nor SIGUSR1."""
    asked = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asked.append(signal.SIGHUP)
    if hasattr(signal, "SIGUSR1") and _is_free(signal.SIGUSR1):
        asked.append(signal.SIGUSR1)
    return asked


def _is_free(number: signal.Signals) -> bool:
    """Whether a signal has no handler, neither in Python nor in C like that of ``faulthandler``, which only Linux
    reports."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else ()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return signal.getsignal(number) is signal.SIG_DFL and not int(caught, 16) >> (number - 1) & 1
