"""A reward adapter on the policy's own base model."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.models.roles import ModelRoles
from tether.rewards.base import checked, score_sequences
from tether.types import RewardBatch, RewardOutput


class AdapterSource:
    """Scores query and answer, as the policy's token ids, at the last answer token.

    The adapter shares the policy's base and so its vocabulary: nothing is decoded or encoded anew.

    Args:
        roles: holds the adapter ``name``.
        name: name of the adapter, also in messages.
        batch_size: answers in one forward.
    """

    def __init__(self, roles: ModelRoles, name: str, *, batch_size: int, device: torch.device | str) -> None:
        self.roles = roles
        self.name = name
        self.batch_size = batch_size
        self.device = device

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The adapter's scores, independent of padding and of the other answers.

        Raises:
            RewardResponseError: a score is not finite.
        """
        sequences = [query + answer for query, answer in zip(batch.query_ids, batch.response_ids, strict=True)]
        scores = score_sequences(sequences, self._score_batch, batch_size=self.batch_size, device=self.device)
        return RewardOutput(checked(scores, len(batch), f"reward adapter {self.name}"))

    def _score_batch(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        return self.roles.reward_scores(self.name, ids, mask, position_ids)
