"""Reward sources as a run names them, one section a type; the judges of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from tether.config.base import Section


class _Reward(Section):
    weight: float = 1.0
    """Factor of this source in the sum."""
    name: str | None = None
    """Name in metrics and samples; must be unique."""


class ModelReward(_Reward):
    """A sequence classifier with one label."""

    type: Literal["model"]
    """``model``: a sequence classifier with one label."""
    path: str
    """Hub id or folder of the sequence classifier, or of a PEFT adapter of one (loaded on its own base)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; ``auto``: as saved."""
    batch_size: PositiveInt = 16
    """Answers scored in one forward."""
    max_length: PositiveInt | None = None
    """Longest prompt plus answer in the reward model's tokens. Longer ones are an error. Left out: its limit."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class AdapterReward(_Reward):
    """A reward adapter on the policy's own base."""

    type: Literal["adapter"]
    """``adapter``: a LoRA reward adapter with its head, on the policy's own base model."""
    path: str
    """Folder of the PEFT adapter, trained as a sequence classifier with one label on the policy's base."""
    batch_size: PositiveInt = 16
    """Answers scored in one forward."""


class FunctionReward(_Reward):
    """A Python function."""

    type: Literal["function"]
    """``function``: ``f(prompts, completions, **columns) -> list[float]``."""
    path: str
    """File that holds the function (``my_rewards.py``) or an import path (``package.module``)."""
    name: str
    """Name of the function; also its name in metrics and samples."""


RewardConfig = Annotated[ModelReward | AdapterReward | FunctionReward, Field(discriminator="type")]
