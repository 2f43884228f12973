"""The event loop that reward sources wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import cache
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def awaited(awaitable: Awaitable[T]) -> T:
    """What the awaitable gives, also where the calling thread already runs an event loop, as notebooks do."""

    async def main() -> T:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(main(), _event_loop()).result()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, so that a client that a function keeps between calls stays usable."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="tether-rewards").start()
    return loop
