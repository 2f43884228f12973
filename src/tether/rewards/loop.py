"""The event loop that reward sources wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from functools import cache
from threading import Thread
from typing import TypeVar

import torch

T = TypeVar("T")


def awaited(awaitable: Awaitable[T]) -> T:
    """The result of the awaitable, even if the calling thread already runs an event loop, as in notebooks."""
    return started(awaitable).result()


def started(awaitable: Awaitable[T]) -> Future[T]:
    """A future of the awaitable's result; it runs from now on, whatever the calling thread does."""

    async def main() -> T:
        try:
            return await awaitable
        except (KeyboardInterrupt, SystemExit) as error:  # either would end the loop, and with it everything that waits
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return asyncio.run_coroutine_threadsafe(main(), event_loop())


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, so that clients that functions keep between calls stay usable."""
    loop = asyncio.new_event_loop()
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        if index is not None:  # each thread has its own, which would be the first: that of another process
            torch.accelerator.set_device_index(index)
        loop.run_forever()

    Thread(target=run, daemon=True, name="tether-rewards").start()
    return loop
