"""Ending a run early without losing it: signals and a time limit."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The run was asked to stop; raised where the weights are those of the last finished update."""


class StopRequest:
    """Notices SIGINT, SIGTERM and the time limit, so that the run stops where its state is whole.

    A second SIGINT raises KeyboardInterrupt at once. Inside a thread other than the main one only the time limit works.

    Args:
        max_runtime: hours after entering, or None.
    """

    def __init__(self, max_runtime: float | None = None) -> None:
        self.max_runtime = max_runtime
        self.reason: str | None = None
        self._deadline: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if self.max_runtime is not None:
            self._deadline = time.monotonic() + 3600 * self.max_runtime
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def check(self) -> None:
        """Raises ``Stopped`` if the run was asked to stop."""
        if self.reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self.reason = f"max_runtime of {self.max_runtime:g} h"
        if self.reason is not None:
            raise Stopped(self.reason)
