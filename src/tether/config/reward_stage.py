"""Every key of ``tether reward``, with its default."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from tether.config.base import HeldOut
from tether.config.chat import DataKeys, Sources
from tether.config.model import ModelConfig
from tether.config.stage import StageConfig, StageTrainConfig, check_held_out, held_out_fraction


class RewardModelConfig(ModelConfig):
    """The model that becomes the reward model."""

    path: str
    """Hub id or folder of the model to start from. A language model gets a new head; a sequence classifier with one
    label keeps its own. A PEFT adapter is trained further as a reward adapter on its base if lora is set, and merged
    into its base if not. For a reward adapter that shares the policy's base, use the policy's path."""


class PairsConfig(DataKeys):
    """The preference pairs."""

    pairs: Sources
    """Pairs to train on: a .jsonl, .json, .csv or .parquet file, a folder saved by datasets, a hub id, or a list of
    these. The columns ``chosen`` and ``rejected`` hold answers to the column ``prompt``; without ``prompt`` they hold
    whole texts, conversations or transcripts (as in HH-RLHF). Each is text or chat messages."""
    eval_pairs: Sources | None = None
    """Held-out pairs, in the same forms."""
    eval_fraction: HeldOut | None = None
    """Share of ``pairs`` to hold out instead. All pairs of a prompt stay on the same side. Default: 0.1 without
    ``eval_pairs``; 0 holds out none."""
    split: str = "train"
    """Split of ``pairs`` to read if the source has several; parts as ``train[:1000]``, ``train[90%:]`` and
    ``train+test``."""
    subset: str | None = None
    """Subset of ``pairs`` to read if the hub dataset or folder has several (``main`` of ``openai/gsm8k``)."""
    revision: str | None = None
    """Branch, tag or commit of ``pairs`` on the hub."""
    eval_split: str = "train"
    """The same for ``eval_pairs``. If the source has only one split, that is read, whatever its name."""
    eval_subset: str | None = None
    """The same for ``eval_pairs``."""
    eval_revision: str | None = None
    """The same for ``eval_pairs``."""
    max_length: PositiveInt = 1024
    """Maximum length of prompt plus answer in tokens. Pairs with a longer text are dropped and counted."""

    @property
    def held_out_fraction(self) -> float:
        """Share of ``pairs`` that is held out, the default resolved."""
        return held_out_fraction(self.eval_fraction, self.eval_pairs, default=0.1)

    @property
    def has_eval(self) -> bool:
        """Whether pairs are held out."""
        return self.eval_pairs is not None or self.held_out_fraction > 0

    @model_validator(mode="after")
    def _one_held_out_source(self) -> PairsConfig:
        check_held_out(self, "pairs")
        return self


class RewardTrainConfig(StageTrainConfig):
    """Batches, optimizer, evaluation, saving."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's two rewards in the loss, which keeps rewards near mean 0; usually 0.01."""


class RewardStageConfig(StageConfig):
    """One run of ``tether reward``: a reward model from preference pairs."""

    ROWS: ClassVar[str] = "pairs"
    EVALUATED: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_accuracy", "eval_margin")

    model: RewardModelConfig
    """The model that becomes the reward model."""
    data: PairsConfig
    """The preference pairs."""
    train: RewardTrainConfig = RewardTrainConfig()
    """Batches, optimizer, evaluation, saving."""
