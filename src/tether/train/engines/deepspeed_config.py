"""Checks the launcher's DeepSpeed configuration against a PPO run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tether.config.schema import RunConfig
from tether.machine.deepspeed_config import check_deepspeed
from tether.train.engines.base import refuse_few_bits

NOT_OURS = {
    "optimizer": "train.optim, train.learning_rate and related keys set it",
    "scheduler": "train.lr_scheduler_type, train.warmup_ratio and train.lr_scheduler_kwargs set it",
    "hybrid_engine": "answers are decoded with weights that are gathered once per rollout",
}
"""Sections of a DeepSpeed configuration that are decided by other keys of a run."""
BATCHES = {
    "train_batch_size": "train.rollout_batch_size and ppo.num_mini_batches set it",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size sets it",
    "gradient_accumulation_steps": "train.micro_batch_size sets it",
}
"""Sizes that follow from a run's own."""


def check(deepspeed: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ``ConfigError`` if a DeepSpeed configuration contradicts that of the run, or configures something that
    Tether does itself."""
    check_deepspeed(deepspeed, config, sections=NOT_OURS, batches=BATCHES)
    refuse_few_bits(config, "ZeRO")
