"""Every key of ``tether sft``, with its default."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt, model_validator

from tether.config.base import HeldOut
from tether.config.chat import DataKeys, Sources
from tether.config.model import ModelConfig
from tether.config.stage import StageConfig, check_held_out, held_out_fraction


class SftModelConfig(ModelConfig):
    """The model to fine-tune."""

    path: str
    """Hub id or folder of the model to start from. A PEFT adapter is trained further if lora is set, and merged into
    its base if not."""


class DemonstrationsConfig(DataKeys):
    """The demonstrations."""

    demonstrations: Sources
    """Texts to imitate: a .jsonl, .json, .csv or .parquet file, a folder saved by datasets, a hub id, or a list of
    these. Columns ``prompt`` and ``completion`` (text or chat messages), else ``messages``, else plain ``text``, else
    ``chosen``, the better answer of a pair."""
    eval_demonstrations: Sources | None = None
    """Held-out demonstrations, in the same forms."""
    eval_fraction: HeldOut | None = None
    """Share of ``demonstrations`` to hold out instead. Equal prompts stay on the same side. Default: none."""
    split: str = "train"
    """Split of ``demonstrations`` to read if the source has several; parts as ``train[:1000]``,
    ``train[90%:]`` and ``train+test``."""
    subset: str | None = None
    """Subset of ``demonstrations`` to read if the hub dataset or folder has several (``main`` of ``openai/gsm8k``)."""
    revision: str | None = None
    """Branch, tag or commit of ``demonstrations`` on the hub."""
    eval_split: str = "train"
    """The same for ``eval_demonstrations``. If the source has only one split, that is read, whatever its name."""
    eval_subset: str | None = None
    """The same for ``eval_demonstrations``."""
    eval_revision: str | None = None
    """The same for ``eval_demonstrations``."""
    max_length: PositiveInt = 1024
    """Maximum length of prompt plus answer in tokens. Longer demonstrations are dropped and counted, never
    truncated."""
    turns: Literal["all", "last"] = "all"
    """Which assistant turns in ``messages`` to train on; each is trained on with everything before it as context."""

    @property
    def held_out_fraction(self) -> float:
        """Share of ``demonstrations`` that is held out, the default resolved."""
        return held_out_fraction(self.eval_fraction, self.eval_demonstrations, default=0.0)

    @property
    def has_eval(self) -> bool:
        """Whether demonstrations are held out."""
        return self.eval_demonstrations is not None or self.held_out_fraction > 0

    @model_validator(mode="after")
    def _one_held_out_source(self) -> DemonstrationsConfig:
        check_held_out(self, "demonstrations")
        return self


class SftStageConfig(StageConfig):
    """One run of ``tether sft``: a policy from demonstrations."""

    ROWS: ClassVar[str] = "demonstrations"
    EVALUATED: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_mean_token_accuracy")

    model: SftModelConfig
    """The model to fine-tune."""
    data: DemonstrationsConfig
    """The demonstrations."""
