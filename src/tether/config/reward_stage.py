"""Every key of ``tether reward``, with its default."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tether.config.base import Section
from tether.config.schema import Fraction, ModelConfig


class RewardModelConfig(ModelConfig):
    """The model that becomes the judge."""

    path: str
    """Hub id or folder of the full model to start from. A language model gets a new head; a sequence classifier with
    one label keeps its own. For a reward adapter that shares the policy's base: the same path as the policy's."""


class PairsConfig(Section):
    """The preference pairs."""

    pairs: str
    """Pairs to train on: a .jsonl, .json, .csv or .parquet file, a folder saved by datasets, or a hub id. Columns
    ``chosen`` and ``rejected`` hold answers to the column ``prompt``, or whole texts or conversations where there is
    no ``prompt``; each is text or chat messages."""
    eval_pairs: str | None = None
    """Held-out pairs, in the same forms."""
    eval_fraction: Fraction | None = None
    """Share of ``pairs`` that is held out instead, all pairs of a prompt on the same side. Left out: 0.1 without
    ``eval_pairs``; 0 holds out none."""
    split: str = "train"
    """Split that is read where the source has several, for ``pairs``."""
    eval_split: str = "train"
    """The same for ``eval_pairs``; left alone where the source has one split only."""
    max_length: PositiveInt = 1024
    """Longest prompt plus answer in tokens. Pairs with a longer one are dropped and counted."""
    chat_template: Literal["auto", "none"] = "auto"
    """``auto``: a text prompt for a tokenizer that has a chat template is wrapped as a user turn. ``none``: text is
    taken as it is."""
    system_prompt: str | None = None
    """System message put before prompts that bring none; needs a chat template. Give what PPO will run with."""

    @property
    def held_out_fraction(self) -> float:
        """Share of ``pairs`` that is held out, the default resolved."""
        if self.eval_fraction is not None:
            return self.eval_fraction
        return 0.0 if self.eval_pairs else 0.1

    @model_validator(mode="after")
    def _one_held_out_source(self) -> PairsConfig:
        if self.eval_pairs is not None and self.eval_fraction is not None:
            raise ValueError(
                f"eval_pairs ({self.eval_pairs}) and eval_fraction ({self.eval_fraction}) both name held-out pairs: "
                "set one of them"
            )
        if self.eval_fraction == 1.0:
            raise ValueError("eval_fraction 1 leaves nothing to train on; 0.1 is usual")
        return self


class RewardTrainConfig(Section):
    """Batches and optimizer."""

    num_train_epochs: PositiveFloat = 1.0
    """Passes over the pairs."""
    batch_size: PositiveInt = 16
    """Pairs an optimizer step."""
    micro_batch_size: PositiveInt = 8
    """Pairs in one forward and backward pass."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate. Left out: 1e-4 with LoRA, 1e-5 otherwise."""
    lr_scheduler_type: str = "linear"
    """Any schedule of transformers that needs no further arguments: linear, cosine, constant, …"""
    warmup_ratio: Fraction = 0.0
    """Share of the optimizer steps over which the learning rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """The gradient's norm is clipped to it; null turns clipping off."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's rewards in the loss, which keeps rewards near mean 0; 0.01 is usual."""
    bf16: bool | None = None
    """bfloat16 autocast of all forwards. Left out: on where the hardware has it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    seed: int = 42
    """Seed of the new head, the adapter, the held-out share and the data order."""

    @model_validator(mode="after")
    def _cross_checks(self) -> RewardTrainConfig:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} must divide batch_size {self.batch_size}: "
                f"set batch_size to {self.micro_batch_size * max(1, self.batch_size // self.micro_batch_size)}"
            )
        return self


class RewardStageConfig(Section):
    """One run of ``tether reward``: a judge from preference pairs."""

    model: RewardModelConfig
    """The model that becomes the judge."""
    data: PairsConfig
    """The preference pairs."""
    train: RewardTrainConfig = RewardTrainConfig()
    """Batches and optimizer."""
    output_dir: Path
    """Folder for the trained reward model: a sequence classifier, or a PEFT adapter of one."""
    overwrite_output_dir: bool = False
    """Replace what ``output_dir`` holds."""

    @property
    def learning_rate(self) -> float:
        """The peak learning rate, the default resolved."""
        return self.train.learning_rate or (1e-4 if self.model.lora else 1e-5)
