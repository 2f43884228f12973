"""Tether: PPO-RLHF for Hugging Face language models.

    from tether import load_config, train_policy

    result = train_policy(load_config("run.yaml"))

Names are imported when they are first used, so ``import tether`` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tether.config.load import load_config
    from tether.config.schema import RunConfig
    from tether.errors import TetherError
    from tether.generation.fake import FakeGenerator
    from tether.rewards.fake import FakeRewards
    from tether.train.plan import plan
    from tether.train.run import RunResult, open_trainer, train_policy
    from tether.train.saved import evaluate_path, generate_path
    from tether.types import (
        Completion,
        Generator,
        Request,
        RewardBatch,
        RewardOutput,
        RewardSource,
        Sampling,
    )

__version__ = "0.1.0"

_HOMES = {
    "Completion": "tether.types",
    "FakeGenerator": "tether.generation.fake",
    "FakeRewards": "tether.rewards.fake",
    "Generator": "tether.types",
    "Request": "tether.types",
    "RewardBatch": "tether.types",
    "RewardOutput": "tether.types",
    "RewardSource": "tether.types",
    "RunConfig": "tether.config.schema",
    "RunResult": "tether.train.run",
    "Sampling": "tether.types",
    "TetherError": "tether.errors",
    "evaluate_path": "tether.train.saved",
    "generate_path": "tether.train.saved",
    "load_config": "tether.config.load",
    "open_trainer": "tether.train.run",
    "plan": "tether.train.plan",
    "train_policy": "tether.train.run",
}

__all__ = [
    "Completion",
    "FakeGenerator",
    "FakeRewards",
    "Generator",
    "Request",
    "RewardBatch",
    "RewardOutput",
    "RewardSource",
    "RunConfig",
    "RunResult",
    "Sampling",
    "TetherError",
    "evaluate_path",
    "generate_path",
    "load_config",
    "open_trainer",
    "plan",
    "train_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
