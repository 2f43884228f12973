"""A reward adapter on the policy's own base model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tether.models.fit import steady_positions
from tether.models.roles import ModelRoles
from tether.rewards.base import checked, score_sequences
from tether.rewards.missing import Missing
from tether.rewards.reading import readable
from tether.types import RewardBatch, RewardOutput


class AdapterSource:
    """Scores query and answer, as the policy's token ids, at the last answer token.

    The adapter shares the policy's base and thus its vocabulary: nothing is decoded or encoded again.

    Args:
        roles: models that include the adapter ``name``.
        name: name of the adapter, also in messages.
        tokenizer: the policy's, to show what is scored.
        batch_size: number of answers per forward.
    """

    def __init__(
        self,
        roles: ModelRoles,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        device: torch.device | str,
    ) -> None:
        self.roles = roles
        self.name = name
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.device = device

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The adapter's scores, independent of padding and of the other answers.

        Raises:
            RewardError: an answer with its prompt is too long for the base.
            RewardResponseError: a score is not finite.
        """
        return self.scored(self.read(batch))

    def read(self, batch: RewardBatch) -> list[list[int]]:
        """Query and answer as the policy's token ids.

        Raises:
            RewardError: they exceed the base's positions.
        """
        read = [batch.read_ids(row) for row in range(len(batch))]
        limit = steady_positions(self.roles.policy.config)
        return readable(read, [len(ids) for ids in read], limit, self.name, Missing(None, self.name))

    def scored(self, read: list[list[int]]) -> RewardOutput:
        """The adapter's scores of token ids."""
        with self.roles.switched_to(f"reward/{self.name}"):
            scores = score_sequences(read, self._score_batch, batch_size=self.batch_size, device=self.device)
        return RewardOutput(checked(scores, len(read), f"reward adapter {self.name}"))

    def seen(self, batch: RewardBatch) -> list[str]:
        """What the adapted base reads of each answer, special tokens visible."""
        return [self.tokenizer.decode(ids) for ids in self.read(batch)]

    def _score_batch(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        return self.roles.reward_scores(self.name, ids, mask, position_ids)
