"""The heap of the C library, where tensors of a process on a CPU are; nothing here has an effect but with glibc.

By itself glibc gives the end of its heap back to the system as soon as it is free. Tensors that are made and forgotten
again and again, those of drawing a token or the activations of a pass, are then given to the process page by page each
time. That takes as long as drawing a token, and on a virtual machine up to a quarter of an update. On the other side
glibc seldom fits a new tensor into the place of an old one: between phases, when most is forgotten, the heap is twice
as large as what is in it, which counts where every phase has to be small.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT, LARGEST = 2**31 - 1, 2**25
"""Bytes at the end of the heap that may be free, and of the largest tensor that is on the heap: the most that glibc
allows. Larger tensors are given back one by one."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of the settings, by glibc's malloc.h."""


def keep(num_bytes: int = KEPT) -> None:
    """Lets the process keep what it is about to need again, unless its environment says how much."""
    own = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if (libc := _glibc()) is not None and not any(name in os.environ for name in own):
        libc.mallopt(_M_TRIM_THRESHOLD, num_bytes)
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST)


def trim() -> None:
    """Gives free pages back to the system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
