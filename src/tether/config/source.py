"""Every key of a file of reward sources, which ``tether score`` and ``tether serve-reward`` read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from tether.config import text
from tether.config.base import Section, check_precision
from tether.config.chat import ChatKeys
from tether.config.load import load_config
from tether.config.model import ModelConfig, check_weights
from tether.config.rewards import (
    AdapterReward,
    HttpReward,
    OwnModelReward,
    RewardConfig,
    reward_names,
    sources_of,
)


class QueryConfig(ChatKeys):
    """How prompts become queries, as in a run."""


class SourceConfig(Section):
    """A file with reward sources only. A run's file works too and is checked as a whole; of its other keys,
    ``model``, the chat keys of ``data``, ``train.bf16`` and ``train.fp16`` count."""

    rewards: list[RewardConfig] = Field(min_length=1)
    """Judges of the answers, as in a run; the score is their weighted sum."""
    model: ModelConfig | None = None
    """The policy whose answers are judged, as in a run: its tokenizer and chat template make the queries, and reward
    adapters share its base. Default: the tokenizer of the first reward model is used."""
    data: QueryConfig = QueryConfig()
    """How prompts become queries, as in a run."""
    bf16: bool | None = None
    """bfloat16 autocast of reward adapters, as ``train.bf16`` of their run. Default: on if the hardware is faster that
    way and ``fp16`` is off."""
    fp16: bool = False
    """float16 autocast of reward adapters, as ``train.fp16`` of their run."""

    @property
    def reward_names(self) -> list[str]:
        """Names of the reward sources, unique."""
        return reward_names(self.rewards)

    @model_validator(mode="after")
    def _check_names(self) -> SourceConfig:
        if len(set(self.reward_names)) != len(self.reward_names):
            raise ValueError(f"rewards: names must be unique, got {', '.join(self.reward_names)}")
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> SourceConfig:
        check_precision(self.bf16, self.fp16)
        if self.model is not None:
            check_weights(self.model, fp16=self.fp16)
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> SourceConfig:
        if self.model is not None:
            return self
        sources = list(sources_of(self.rewards))
        for key, reward in sources:
            if isinstance(reward, AdapterReward):
                raise ValueError(f"{key}: type adapter shares the policy's base: set model.path to the policy")
            if isinstance(reward, HttpReward) and reward.protocol != "tether":
                raise ValueError(
                    f"{key}: protocol {reward.protocol} uses the policy's chat template: set model.path to the policy"
                )
        if self.data != QueryConfig() and not any(isinstance(reward, OwnModelReward) for _, reward in sources):
            raise ValueError("data: no source has a tokenizer with a chat template: set model.path to the policy")
        return self


def load_sources(path: str | Path, overrides: Sequence[str] = ()) -> SourceConfig:
    """The reward sources that a file is about, or those of a run's file.

    Args:
        path: a file with the keys of ``SourceConfig``, or a run's, whose other keys are not used.
        overrides: as in ``load_config``.

    Raises:
        ConfigError: names every problem at once.
    """
    if not _is_run(Path(path)):
        return load_config(path, overrides, SourceConfig)
    run = load_config(path, overrides)
    query = QueryConfig(**run.data.chat)
    precision = {"bf16": run.train.bf16, "fp16": run.train.fp16}
    return SourceConfig(rewards=run.rewards, model=run.model, data=query, **precision)


def _is_run(path: Path) -> bool:
    """Whether a file has the section that every run must have; a file that cannot be read does not."""
    try:
        data = text.parse(path.read_text(encoding="utf-8-sig")).data
    except (OSError, UnicodeDecodeError, text.TextError):
        return False
    return isinstance(data, dict) and "train" in data
