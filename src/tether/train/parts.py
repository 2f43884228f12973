"""What a run is made of once its configuration is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from tether.data.demonstrations import Demonstration
from tether.machine.distributed import Dist
from tether.models.roles import ModelRoles
from tether.train.engines.base import Engine
from tether.train.engines.replicated import Alone
from tether.types import Generator, Prompt, RewardSource, Sampling


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of; every variant was chosen before, in a ``build`` function."""

    roles: ModelRoles
    """Policy, reference, critic and shared reward adapters."""
    generator: Generator
    """Answers prompts with the policy."""
    rewards: RewardSource
    """Judges answers."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    sampling: Sampling
    """How answers are drawn."""
    prompts: Sequence[Prompt]
    """Prompts to train on."""
    eval_prompts: Sequence[Prompt]
    """Held-out prompts; may be empty."""
    demonstrations: Sequence[Demonstration] = ()
    """What the SFT loss beside PPO is on; empty without one."""
    dist: Dist = field(default_factory=Dist)
    """This process, and the others of the run."""
    engine: Engine = field(default_factory=Alone)
    """What spreads weights and gradients over them."""
