"""Who made the processor: some instructions are worth using on the processors of one maker only."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

INFORMATION = Path("/proc/cpuinfo")
"""Where Linux says it."""


@cache
def is_intel() -> bool:
    """Whether the processor is Intel's, as the system says it."""
    told = INFORMATION.read_text(encoding="utf-8") if INFORMATION.exists() else platform.processor()
    return "Intel" in told
