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
    from tether.config.pipeline import Pipeline, load_pipeline
    from tether.config.reward_stage import RewardStageConfig
    from tether.config.schema import RunConfig
    from tether.config.sft_stage import SftStageConfig
    from tether.config.source import SourceConfig, load_sources
    from tether.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        GenerationError,
        HubError,
        ModelError,
        RewardError,
        TetherError,
        TrainingError,
    )
    from tether.generation.fake import FakeGenerator
    from tether.inference.evaluate import Evaluation, evaluate_path
    from tether.inference.generate import generate_path
    from tether.inference.scoring import Scored, score_file
    from tether.models.saving import merge_adapter
    from tether.pipeline import PipelineResult, run_pipeline
    from tether.report.html import write_report
    from tether.rewards.fake import FakeRewards
    from tether.stages.reward import RewardStageResult, train_reward_model
    from tether.stages.sft import SftResult, train_sft
    from tether.train.display import Display
    from tether.train.plan import Plan, plan
    from tether.train.run import RunResult, open_trainer, train_policy
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
    "CheckpointError": "tether.errors",
    "Completion": "tether.types",
    "ConfigError": "tether.errors",
    "DataError": "tether.errors",
    "Display": "tether.train.display",
    "Evaluation": "tether.inference.evaluate",
    "FakeGenerator": "tether.generation.fake",
    "FakeRewards": "tether.rewards.fake",
    "GenerationError": "tether.errors",
    "Generator": "tether.types",
    "HubError": "tether.errors",
    "ModelError": "tether.errors",
    "Pipeline": "tether.config.pipeline",
    "PipelineResult": "tether.pipeline",
    "Plan": "tether.train.plan",
    "Request": "tether.types",
    "RewardBatch": "tether.types",
    "RewardError": "tether.errors",
    "RewardOutput": "tether.types",
    "RewardSource": "tether.types",
    "RewardStageConfig": "tether.config.reward_stage",
    "RewardStageResult": "tether.stages.reward",
    "RunConfig": "tether.config.schema",
    "RunResult": "tether.train.run",
    "Sampling": "tether.types",
    "Scored": "tether.inference.scoring",
    "SftResult": "tether.stages.sft",
    "SftStageConfig": "tether.config.sft_stage",
    "SourceConfig": "tether.config.source",
    "TetherError": "tether.errors",
    "TrainingError": "tether.errors",
    "evaluate_path": "tether.inference.evaluate",
    "generate_path": "tether.inference.generate",
    "load_config": "tether.config.load",
    "load_pipeline": "tether.config.pipeline",
    "load_sources": "tether.config.source",
    "merge_adapter": "tether.models.saving",
    "open_trainer": "tether.train.run",
    "plan": "tether.train.plan",
    "run_pipeline": "tether.pipeline",
    "score_file": "tether.inference.scoring",
    "train_policy": "tether.train.run",
    "train_reward_model": "tether.stages.reward",
    "train_sft": "tether.stages.sft",
    "write_report": "tether.report.html",
}

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataError",
    "Display",
    "Evaluation",
    "FakeGenerator",
    "FakeRewards",
    "GenerationError",
    "Generator",
    "HubError",
    "ModelError",
    "Pipeline",
    "PipelineResult",
    "Plan",
    "Request",
    "RewardBatch",
    "RewardError",
    "RewardOutput",
    "RewardSource",
    "RewardStageConfig",
    "RewardStageResult",
    "RunConfig",
    "RunResult",
    "Sampling",
    "Scored",
    "SftResult",
    "SftStageConfig",
    "SourceConfig",
    "TetherError",
    "TrainingError",
    "evaluate_path",
    "generate_path",
    "load_config",
    "load_pipeline",
    "load_sources",
    "merge_adapter",
    "open_trainer",
    "plan",
    "run_pipeline",
    "score_file",
    "train_policy",
    "train_reward_model",
    "train_sft",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
