"""Classifiers that do not pool at the last token, such as BERT, as reward sources."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.errors import ModelError
from tether.models.fit import positions
from tether.models.roles import Host, directly
from tether.rewards.base import scores_in_batches
from tether.rewards.missing import Missing
from tether.rewards.reading import (
    LETTER,
    InputFormat,
    JudgedText,
    Reader,
    readable,
    scores_of_read,
    with_stand_ins,
)
from tether.types import RewardBatch, RewardOutput

logger = logging.getLogger(__name__)

LETTERS = 12
"""Maximum number of words of the text beside which another is padded for a test."""


class EncoderSource:
    """Scores prompt and answer, always as text, by the classifier's own forward with its own pooling.

    Texts are padded as the classifier's tokenizer pads. They are read one at a time if it has no pad token that the
    classifier knows, if padding changes the classifier's scores (FNet, …), or if they may hold several of the end
    tokens that the classifier pools at, of which transformers wants equally many in texts that are read together.

    Args:
        model: a sequence classifier with one label, in eval mode.
        tokenizer: the model's own.
        name: how messages name it.
        batch_size: number of answers per forward.
        max_length: maximum number of tokens in prompt and answer, special tokens included. None: the model's own limit.
        special_tokens, now: as in ``Reader``.
        missing: the score of answers that it cannot read. None: they are an error.
        fetched: a context in which the weights are on ``device``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        input_format: InputFormat,
        batch_size: int,
        max_length: int | None,
        device: torch.device | str,
        special_tokens: bool = False,
        now: str | None = None,
        missing: Missing | None = None,
        fetched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.max_length = max_length or position_limit(model)
        self.device = device
        self.missing = missing or Missing(None, name)
        self.fetched = fetched
        self.through: Host = directly
        """Runs forwards with the weights."""
        end_id = pools_at(model, name)
        self.reader = Reader(tokenizer, input_format, name, special_tokens=special_tokens, now=now, end_id=end_id)
        has_ends = end_id is not None and (special_tokens or tokenizer.chat_template is not None)
        with fetched():
            self.batch_size = 1 if batch_size == 1 or has_ends or not self._ignores_padding() else batch_size

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The classifier's scores; each equals the score of that text alone.

        Raises:
            RewardError: an answer with its prompt is too long for the model, or cannot be put in its chat template.
            RewardResponseError: a score is not finite.
        """
        return self.scored(self.read(batch))

    def read(self, batch: RewardBatch) -> list[dict[str, list[int]] | None]:
        """Prompt and answer as the classifier's tokenizer encodes them; None if it cannot read them and that is not an
        error."""
        encoded = self._encoded(batch)
        lengths = [len(each["input_ids"]) for each in encoded]
        return readable(encoded, lengths, self.max_length, self.name, self.missing)

    def scored(self, read: list[dict[str, list[int]] | None]) -> RewardOutput:
        """The classifier's scores of encoded texts."""
        encoded = with_stand_ins(read, self.reader.features)
        with self.fetched():
            scores = scores_in_batches(
                [len(each["input_ids"]) for each in encoded],
                lambda rows: self._scores([encoded[row] for row in rows]).tolist(),
                batch_size=self.batch_size,
                through=self.through,
            )
        return self.missing.output(scores_of_read(scores, read), f"reward {self.name}")

    def seen(self, batch: RewardBatch) -> list[str]:
        """What the classifier reads of each answer, special tokens visible."""
        return [self.tokenizer.decode(each["input_ids"]) for each in self._encoded(batch)]

    def _encoded(self, batch: RewardBatch) -> list[dict[str, list[int]]]:
        """Prompt and answer as the classifier's tokenizer encodes them."""
        return [self.reader.features(text) for text in self.reader.texts(batch)]

    def _scores(self, encoded: list[dict[str, Any]], device: torch.device | str | None = None) -> Tensor:
        """One number for each text."""
        padded = self.tokenizer.pad(encoded, padding=len(encoded) > 1, return_tensors="pt")
        return self.model(**padded.to(device or self.device)).logits.squeeze(-1).float()

    @torch.no_grad()
    def _ignores_padding(self) -> bool:
        """Whether a text can be padded without a change of its score. Tested on a short text beside a longer one."""
        known = getattr(self.model.config.get_text_config(), "vocab_size", math.inf)  # CANINE reads any character
        if self.tokenizer.pad_token is None or self.tokenizer.pad_token_id >= known:
            return False
        room = (self.max_length or LETTERS) - len(self.reader.features(JudgedText(LETTER))["input_ids"])
        words = (1, max(min(LETTERS, room // 2), 2))  # a word and its blank may be two tokens
        short, long = (self.reader.features(JudgedText(" ".join([LETTER] * count))) for count in words)
        device = self.model.device  # where an engine that will shard it has left it
        try:
            (alone,), (other,) = (self._scores([each], device).tolist() for each in (short, long))
            beside = self._scores([short, long], device)[0].item()
        except (IndexError, RuntimeError, ValueError):  # it refuses several texts, or short ones
            return False
        of_spread, of_score = (0.05, 0.02) if self.model.dtype.itemsize < 4 else (1e-3, 1e-5)
        ignores = not abs(beside - alone) > of_spread * abs(other - alone) + of_score * abs(alone)  # NaN is told later
        if not ignores:
            logger.warning(
                "reward %s: padding changes the scores of %s, so texts are scored one at a time: batch_size has no "
                "effect", self.name, type(self.model).__name__
            )  # fmt: skip
        return ignores


def pools_at(model: PreTrainedModel, name: str) -> int | None:
    """The token that a classifier pools at: the last end token of a text if it has an encoder and a decoder (BART, T5,
    …); None for any other.

    Raises:
        ModelError: its configuration does not say which token that is.
    """
    if not model.config.is_encoder_decoder:
        return None
    if not isinstance(model.config.eos_token_id, int):
        raise ModelError(
            f"reward {name}: {type(model).__name__} scores a text at its end token, and config.json has eos_token_id "
            f"{model.config.eos_token_id}; wanted the id of that token"
        )
    return model.config.eos_token_id


def position_limit(model: PreTrainedModel) -> int | None:
    """Maximum number of tokens by the classifier's positions; None if there is no limit.

    RoBERTa and its relatives number positions from the pad token's id on, so that they have fewer positions than rows
    in their table.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return positions(model.config)
