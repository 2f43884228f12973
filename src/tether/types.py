"""The records that cross module borders, and the two protocols.

Index convention: entry t of a [B, R] (or [M, R]) tensor belongs to response token t. ``logprobs[:, t]`` and
``values[:, t]`` come from the model output one position earlier, the state in which token t was sampled. The shift
happens once, in ``models/forward.py``.

    B  rollouts in a batch        P  query tokens                     T  P + R at most
    M  rows of a micro-batch      R  response tokens, right-padded    V  vocabulary
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Message = Mapping[str, Any]
"""One chat message: at least ``role`` and ``content``."""


def noise_key(seed: int, stream: str, prompt: int, sample: int) -> int:
    """The key of one answer's sampling noise, a number in [0, 2**63).

    Two answers share their noise only if all four arguments are equal, so the text for a seed depends neither on the
    batch that an answer is decoded in nor on what was sampled before it.

    Args:
        seed: the run's seed.
        stream: what the answer is for, ``"train"`` or ``"eval"``.
        prompt: number of the prompt in its dataset.
        sample: how often this prompt was answered before in this stream.
    """
    digest = hashlib.blake2b(f"{seed}/{stream}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt dataset, ready to be answered."""

    row: int
    """Number of the row in its dataset, from 0, counted before any row was dropped."""
    source: str | Sequence[Message]
    """The prompt as the dataset had it: text, or chat messages."""
    text: str
    """The query as text: the chat template applied where there is one, special tokens visible."""
    token_ids: tuple[int, ...]
    """The query as token ids, without padding."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, handed to reward functions."""
    conversation: Sequence[Message] | None = None
    """The chat messages that the query was rendered from, the run's system message among them; None for plain text."""


@dataclass(frozen=True, slots=True)
class Request:
    """One answer that is wanted from a generator."""

    token_ids: Sequence[int]
    """The query, without padding."""
    key: int
    """Key of this answer's sampling noise, from ``noise_key``."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn."""

    max_new_tokens: int
    """Most tokens an answer may have, its end token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer; the first one drawn is the answer's last token."""
    top_p: float = 1.0
    """Only the most likely tokens whose probabilities add up to this are drawn; log-probabilities are not affected."""
    top_k: int | None = None
    """Only this many most likely tokens are drawn, before ``top_p``; log-probabilities are not affected."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. Example: ``Completion(token_ids=[713, 284, 2], finish_reason="stop")``."""

    token_ids: list[int]
    """The answer without padding, its end token included; at least one token."""
    finish_reason: Literal["stop", "length"]
    """``stop``: the last token is a stop token. ``length``: the answer was cut at ``max_new_tokens``."""
    logprobs: list[float] | None = None
    """Log-probabilities that the engine sampled with, one a token, or None where it keeps none."""


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """What a reward source is given: B answers with their prompts, in the order that the scores are wanted in."""

    prompts: list[str | Sequence[Message]]
    """Prompts as the dataset had them."""
    queries: list[str]
    """Prompts as text, the policy's chat template applied."""
    responses: list[str]
    """Answers as text, without special tokens."""
    query_ids: list[list[int]]
    """Prompts as the policy's token ids."""
    response_ids: list[list[int]]
    """Answers as the policy's token ids, the end token included."""
    conversations: list[Sequence[Message] | None]
    """The chat messages that each query was rendered from, the run's system message among them; None for plain text.
    What a judge with a chat template of its own puts into it."""
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """The dataset's other columns, one entry an answer."""
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)
    """Text of the first tokens of an answer, without special tokens. None where no tokenizer is known: then there are
    no token ids either, and the characters of an answer stand in for its tokens."""

    def __len__(self) -> int:
        return len(self.responses)


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """What a reward source says of B answers."""

    scores: list[float]
    """One finite score an answer, in the order of the batch."""
    components: Mapping[str, list[float]] = field(default_factory=dict)
    """Named parts of the score, unweighted, one entry an answer."""
    token_scores: list[list[float]] | None = None
    """Where on each answer its score falls: one number a response token, which add up to the score. None: all of it on
    the last token."""


@dataclass(frozen=True)
class MicroBatch:
    """M rollouts as one padded forward: the response right behind its query, padding behind both.

    Formed once a rollout; the old, reference, value and update passes all use the same one, so that equal weights give
    bitwise equal outputs.
    """

    rows: tuple[int, ...]
    """Positions of these rollouts in the rollout batch."""
    token_ids: Int[Tensor, "M T"]
    """Query and response; padding is id 0, which is never attended to nor scored."""
    attention_mask: Bool[Tensor, "M T"]
    """True on real tokens."""
    position_ids: Int[Tensor, "M T"]
    """Position of each real token in its own row, from 0, and counted on over the padding behind it."""
    response_mask: Bool[Tensor, "M R"]
    """True on response tokens, the end token included; a row's first one is its first column."""
    group: int | None = None
    """Number of the micro-batch that it is a part of, where that did not fit into memory or is divided over processes:
    the update shuffles its parts together, so that mini-batches hold the same answers. None: it is whole."""
    group_size: int | None = None
    """Answers of that micro-batch; None: as many as there are rows."""
    is_idle: bool = False
    """Whether it only keeps this process in step with others that have more to do: nothing of it counts."""

    @property
    def lengths(self) -> Int[Tensor, " M"]:
        """Response lengths, the end token included."""
        return self.response_mask.sum(dim=1)

    @property
    def response_columns(self) -> Bool[Tensor, "M T"]:
        """True on response tokens among the columns of ``token_ids``: the last real ones of each row."""
        real = self.attention_mask.cumsum(dim=1)
        return self.attention_mask & (real > real[:, -1:] - self.lengths[:, None])

    @property
    def num_response_tokens(self) -> int:
        """Response tokens in this micro-batch."""
        return int(self.response_mask.sum())

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device."""
        names = ("token_ids", "attention_mask", "position_ids", "response_mask")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class Experience:
    """What the update needs of one micro-batch. All tensors are [M, R], detached, 0 outside ``batch.response_mask``."""

    batch: MicroBatch
    """The rollouts."""
    logprobs: Float[Tensor, "M R"]
    """log π_old of each response token, from the policy's own forward at rollout."""
    advantages: Float[Tensor, "M R"]
    """Advantages, whitened over the whole rollout batch if that is on."""
    loss_mask: Bool[Tensor, "M R"]
    """True on the response tokens that take part in the losses."""
    values: Float[Tensor, "M R"] | None = None
    """Value of the state each response token was sampled in, at rollout; None without a critic."""
    returns: Float[Tensor, "M R"] | None = None
    """Targets of the critic; None without one."""
    ref_logprobs: Float[Tensor, "M R"] | None = None
    """log π_ref of each response token; None where the loss does not hold the KL."""
    kl_loss_coef: float = 0.0
    """Weight of the KL in the loss."""
    takes_part: bool = True
    """Whether its micro-batch, in any process, holds a token of the losses: not where all of its answers were cut and
    are left out."""


@runtime_checkable
class Generator(Protocol):
    """Turns queries into answers. Knows token ids and nothing of text."""

    batch_size: int
    """Most answers written side by side; an engine lowers it where so many do not fit into memory."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer) for every request once, in the order in which answers finish."""
        ...

    def sync_weights(self, policy: nn.Module) -> None:
        """Makes later answers come from these weights."""
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """Scores answers. A source returns one finite score for every answer or raises ``RewardError``."""

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Scores in the order of the batch; the score of an answer does not depend on the others."""
        ...
