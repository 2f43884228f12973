"""Selects the engine that a launch asks for."""

from __future__ import annotations

import torch

from tether.config.launched import uses_deepspeed, uses_fsdp
from tether.machine.distributed import Dist
from tether.train.engines.base import Engine
from tether.train.engines.deepspeed import Zero
from tether.train.engines.fsdp import FullySharded
from tether.train.engines.replicated import Alone, Replicated


def build_engine(dist: Dist) -> Engine:
    """The engine named in the launcher's configuration; DDP for several processes if it names none.

    Raises:
        ConfigError: the launcher's configuration does not fit.
    """
    if uses_deepspeed():
        return Zero(dist)
    if uses_fsdp() and torch.distributed.is_initialized():
        return FullySharded(dist)
    return Replicated(dist) if dist.num_processes > 1 else Alone()
