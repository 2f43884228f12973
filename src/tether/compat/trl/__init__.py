"""TRL's PPO under its own names: a script runs with ``from tether.compat.trl import PPOConfig, PPOTrainer`` in place of
its import.

TRL itself is not needed. docs/from_trl.md lists the differences.
"""

from __future__ import annotations

from typing import NoReturn

from tether.compat.trl.config import PPOConfig
from tether.compat.trl.former import missing
from tether.compat.trl.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]


def __getattr__(name: str) -> NoReturn:
    raise missing(name)
