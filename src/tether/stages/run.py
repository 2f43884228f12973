"""A run of a stage, as its parts and its callers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import torch

from tether.config.stage import StageConfig
from tether.machine.distributed import Dist
from tether.models.device import half_dtype
from tether.stages.engine import StageEngine, stage_engine

OnProgress = Callable[[int, int, Mapping[str, float]], None]
"""Called after every optimizer step with its number from 1, the number of steps, and TRL's logs (loss, accuracy, …)."""
Tell = Callable[[str], None]
"""Called with messages for the user, of one or more lines."""
Stop = Callable[[], str | None]
"""Called after every optimizer step; if it returns a reason, the run ends with a checkpoint."""
ConfigT = TypeVar("ConfigT", bound=StageConfig)


@dataclass(frozen=True)
class StageRun(Generic[ConfigT]):
    """A run whose configuration, launch and folder have been checked."""

    dist: Dist
    """The processes, of which only the main one writes files and messages."""
    config: ConfigT
    """The configuration ``as_launched``."""
    tell: Tell
    """Silent in all processes except the main one."""
    checkpoint: Path | None
    """What the run resumes from."""
    is_finished: bool
    """Whether nothing is left to train."""

    @cached_property
    def engine(self) -> StageEngine:
        """Distributes the model over the processes."""
        return stage_engine(self.dist)

    @property
    def precision(self) -> torch.dtype | None:
        """The autocast dtype of forward passes, None for that of the weights."""
        return half_dtype(self.config.train, self.dist.device)
