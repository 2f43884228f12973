"""Decoders with a scalar head as reward sources: classifiers, and language models with a separate value head.

If the tokenizer is the policy's, answers are scored on the policy's token ids, exactly as they were sampled, except
ids that belong to no token and for which the model has no embedding. Otherwise they are scored as text: see
``tether.rewards.reading``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.models.fit import ids_with_rows, steady_positions
from tether.models.forward import is_causal, last_token_scores
from tether.models.layers import num_rows
from tether.models.roles import Host, directly
from tether.rewards.base import score_sequences
from tether.rewards.missing import Missing
from tether.rewards.reading import InputFormat, Reader, readable, same_tokenizer, scores_of_read, with_stand_ins
from tether.types import RewardBatch, RewardOutput


class ModelSource:
    """Scores query and answer at their last token.

    Args:
        model: a decoder in eval mode.
        head: hidden states → [..., 1].
        tokenizer: the model's own.
        policy_tokenizer: the tokenizer that made ``query_ids`` and ``response_ids``.
        name: its name in messages.
        input_format: ``auto`` reads the policy's token ids if the tokenizers are the same; see ``Reader``.
        batch_size: number of answers per forward.
        max_length: maximum number of tokens in query and answer. None: the model's own limit.
        special_tokens, now: as in ``Reader``.
        missing: the score of answers that it cannot read. None: they are an error.
        fetched: a context in which the weights are on ``device``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
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
        self.head = head
        self.tokenizer = tokenizer
        self.name = name
        self.batch_size = batch_size
        self.max_length = max_length or steady_positions(model.config)
        self.device = device
        self.missing = missing or Missing(None, name)
        self.fetched = fetched
        with fetched():
            self.causal = is_causal(model.base_model)
        self.through: Host = directly
        """Runs forwards with the weights."""
        self.reader = Reader(tokenizer, input_format, name, special_tokens=special_tokens, now=now)
        self.shares_ids = input_format == "auto" and same_tokenizer(tokenizer, policy_tokenizer)
        self._num_rows = num_rows(model)
        self._known = frozenset(tokenizer.get_vocab().values() if self.shares_ids else ())

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The model's scores; each equals the score of that text alone.

        Raises:
            RewardError: an answer with its prompt is too long for the model, or cannot be put in its chat template.
            RewardResponseError: a score is not finite.
        """
        return self.scored(self.read(batch))

    def read(self, batch: RewardBatch) -> list[Sequence[int] | None]:
        """Prompt and answer as the model's token ids; None if it cannot read them and that is not an error."""
        sequences = self._sequences(batch)
        return readable(sequences, [len(ids) for ids in sequences], self.max_length, self.name, self.missing)

    def scored(self, read: list[Sequence[int] | None]) -> RewardOutput:
        """The model's scores of token ids."""
        options = {"batch_size": self.batch_size, "device": self.device, "through": self.through}
        with self.fetched():
            scores = score_sequences(with_stand_ins(read, self.reader.token_ids), self._score_batch, **options)
        return self.missing.output(scores_of_read(scores, read), f"reward {self.name}")

    def seen(self, batch: RewardBatch) -> list[str]:
        """What the model reads of each answer, special tokens visible."""
        return [self.tokenizer.decode(ids) for ids in self._sequences(batch)]

    def _sequences(self, batch: RewardBatch) -> list[Sequence[int]]:
        """Prompt and answer as the model's token ids."""
        if self.shares_ids:
            return [ids_with_rows(batch.read_ids(row), self._num_rows, self._known) for row in range(len(batch))]
        return [self.reader.token_ids(text) for text in self.reader.texts(batch)]

    def _score_batch(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        return last_token_scores(self.model.base_model, self.head, ids, mask, position_ids, causal=self.causal)
