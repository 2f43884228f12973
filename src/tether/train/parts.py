"""The components of a run, built from its configuration."""

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
    """The components of a trainer; ``build`` functions have chosen every implementation."""

    roles: ModelRoles
    """Policy, reference, critic and shared reward adapters."""
    generator: Generator
    """Answers prompts with the policy."""
    rewards: RewardSource
    """Scores answers."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    sampling: Sampling
    """How answers are sampled."""
    prompts: Sequence[Prompt]
    """Prompts to train on."""
    eval_prompts: Sequence[Prompt]
    """Held-out prompts; may be empty."""
    demonstrations: Sequence[Demonstration] = ()
    """Demonstrations of the SFT loss; empty without one."""
    dist: Dist = field(default_factory=Dist)
    """This process, and the others of the run."""
    engine: Engine = field(default_factory=Alone)
    """Distributes weights and gradients over the processes."""
