"""The heap of the C library, which holds the tensors of a process on a CPU. Has an effect only with glibc.

By default, glibc returns the end of its heap to the system as soon as it is free. Tensors that are created and freed
again and again, such as those of sampling a token or the activations of a pass, then get their memory page by page each
time. That takes as long as sampling a token, and on a virtual machine up to a quarter of an update. On the other hand,
glibc seldom fits a new tensor into the place of an old one: between phases, when most tensors are freed, the heap is
twice as large as its contents, which matters if every phase has to be small.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT, LARGEST = 2**31 - 1, 2**25
"""Maximum number of free bytes at the end of the heap, and of bytes of a tensor on the heap: the most that glibc
allows. Larger tensors are returned to the system one by one."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Constants from glibc's malloc.h."""


def keep(num_bytes: int = KEPT) -> None:
    """Lets the process keep memory that it will soon need again, unless its environment configures this."""
    own = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if (libc := _glibc()) is not None and not any(name in os.environ for name in own):
        libc.mallopt(_M_TRIM_THRESHOLD, num_bytes)
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST)


def trim() -> None:
    """Returns free pages to the system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
