"""A sequence classifier with one label as a reward source, with its own tokenizer.

Where its tokenizer is the policy's, answers are scored on the policy's token ids, exactly as they were sampled.
Otherwise they are scored as text: in the reward model's chat template where the prompt is a conversation, joined to the
prompt where it is plain text, then encoded by the reward model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.errors import ModelError, RewardError
from tether.models.forward import last_token_scores
from tether.rewards.base import checked, score_sequences
from tether.types import Message, RewardBatch, RewardOutput

_PROBE = "Hello, World!  It's 1234567.89 — naïve café,\n\n\tdef f(x): return x  # 漢字 🙂 <|end|> ."


class ModelSource:
    """Scores query and answer at their last token.

    Args:
        model: a decoder with a ``score`` head of one label, in eval mode.
        tokenizer: the model's own.
        policy_tokenizer: the one that made ``query_ids`` and ``response_ids``.
        name: how messages name it.
        batch_size: answers in one forward.
        max_length: most tokens of query and answer; the model's own limit if None.

    Raises:
        ModelError: the model has no ``score`` head on a decoder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        batch_size: int,
        max_length: int | None,
        device: torch.device | str,
    ) -> None:
        if not hasattr(model, "score"):
            raise ModelError(
                f"reward {name}: {type(model).__name__} has no score head on a decoder; "
                "wanted a decoder saved as a sequence classifier"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.name = name
        self.batch_size = batch_size
        self.max_length = max_length or getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.device = device
        self.shares_ids = same_tokenizer(tokenizer, policy_tokenizer)

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The model's scores; each equals what the model gives for that text alone.

        Raises:
            RewardError: an answer with its prompt is too long for the model, or cannot be put in its chat template.
            RewardResponseError: a score is not finite.
        """
        sequences = [self._sequence(batch, row) for row in range(len(batch))]
        for row, ids in enumerate(sequences):
            if not ids:
                raise RewardError(f"reward {self.name}: answer {row} of {len(batch)} (counted from 0) is an empty text")
            if self.max_length is not None and len(ids) > self.max_length:
                raise RewardError(
                    f"reward {self.name}: answer {row} of {len(batch)} (counted from 0) has {len(ids)} tokens with its "
                    f"prompt, the limit is {self.max_length}; shorten data.max_prompt_length or "
                    "sampling.response_length, or raise the reward's max_length if the model can take more"
                )
        scores = score_sequences(sequences, self._score_batch, batch_size=self.batch_size, device=self.device)
        return RewardOutput(checked(scores, len(batch), f"reward {self.name}"))

    def _sequence(self, batch: RewardBatch, row: int) -> Sequence[int]:
        """Prompt and answer as the model's token ids."""
        if self.shares_ids:
            return batch.query_ids[row] + batch.response_ids[row]
        prompt, response = batch.prompts[row], batch.responses[row]
        messages = batch.conversations[row]
        if messages is None or (isinstance(prompt, str) and not self.tokenizer.chat_template):
            return encode_text(self.tokenizer, prompt + response)
        try:
            return encode_messages(self.tokenizer, [*messages, {"role": "assistant", "content": response}])
        except Exception as error:  # templates raise whatever their authors chose
            raise RewardError(
                f"reward {self.name}: answer {row} of {len(batch)} (counted from 0) does not fit the reward model's "
                f"chat template: {type(error).__name__}: {error}"
            ) from error

    @torch.no_grad()
    def _score_batch(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        return last_token_scores(self.model.base_model, self.model.score, ids, mask, position_ids)


def same_tokenizer(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both write the same conversation as the same token ids; pad tokens may differ, as no text holds one."""
    return _fingerprint(tokenizer) == _fingerprint(other)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text, exactly one beginning-of-sequence token where the tokenizer writes one."""
    ids = tokenizer(text)["input_ids"]
    repeated = len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
    return ids[1:] if repeated else ids


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a whole conversation; the chat template alone decides on the beginning-of-sequence token.

    Raises:
        Exception: the tokenizer has no chat template, or the template refuses the conversation.
    """
    text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    """What decides the token ids of a text."""
    return {
        "vocabulary": tokenizer.get_vocab(),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "chat_template": tokenizer.chat_template,
        "probe": tokenizer(_PROBE)["input_ids"],
    }
