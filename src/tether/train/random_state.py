"""The global random generators, which reward functions and callbacks may use.

Tether itself never does: its random draws have keys (``types.noise_key``).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, as tensors, strings, numbers and lists only."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restores the result of ``random_states``; for accelerators, as far as they are available."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
