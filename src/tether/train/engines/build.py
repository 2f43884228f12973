"""Which engine a launch asked for."""

from __future__ import annotations

from tether.train.distributed import Dist
from tether.train.engines.base import Engine
from tether.train.engines.replicated import Alone, Replicated


def build_engine(dist: Dist) -> Engine:
    """The engine that the launcher's configuration names; DDP where it names none."""
    return Replicated(dist) if dist.num_processes > 1 else Alone()
