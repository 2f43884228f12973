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
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Message = Mapping[str, Any]
"""One chat message: at least ``role`` and ``content``."""


def noise_key(seed: int, stream: str, prompt: int, sample: int) -> int:
    """The key of one answer's sampling noise, a number in [0, 2**63).

    Two answers share their noise only if all four arguments are equal, so the text for a seed depends neither on the
    other answers of its batch nor on what was sampled before.

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
    """Index of the row in its dataset, from 0, counted before any row was dropped."""
    source: str | Sequence[Message]
    """The prompt as in the dataset: text, or chat messages."""
    text: str
    """The query as text, with any chat template applied and special tokens visible."""
    token_ids: tuple[int, ...]
    """The query as token ids, without padding."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, passed to reward functions."""
    conversation: Sequence[Message] | None = None
    """The chat messages that the query was rendered from, including the run's system message; None for plain text."""

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens whose text an answer continues: the query, if it is plain text. None in a conversation, where an
        answer is a message of its own."""
        return self.token_ids if self.conversation is None else ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one answer from a generator."""

    token_ids: Sequence[int]
    """The query, without padding."""
    key: int
    """Key of this answer's sampling noise, from ``noise_key``."""
    before: Sequence[int] = ()
    """``Prompt.before``."""


@runtime_checkable
class TextEnds(Protocol):
    """Ends answers by their text; ``models.stop_strings`` has the one of a run. ``before``: ``Prompt.before``."""

    def ends(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> bool:
        """Whether an answer that has just got its last token ends with it; asked after every token."""
        ...

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """A whole answer as text, without special tokens and without what ended it."""
        ...

    def closed(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """A whole answer as judges that read token ids are given it: an end token in place of the text that ended it;
        as sampled if a token or the length did."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are sampled."""

    max_new_tokens: int
    """Maximum number of tokens of an answer, including its end token."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer; the first one drawn is the answer's last token."""
    top_p: float = 1.0
    """Samples only from the most likely tokens that add up to this probability; does not affect log-probabilities."""
    top_k: int | None = None
    """Samples only from this many most likely tokens, before ``top_p``; does not affect log-probabilities."""
    text_ends: TextEnds | None = field(default=None, compare=False, repr=False)
    """Ends answers by their text, besides ``stop_token_ids``. None: no text ends them."""

    def stops(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> bool:
        """Whether an answer that has just got its last token ends with it, whatever its length.

        Args:
            before: ``Request.before``.
        """
        if token_ids[-1] in self.stop_token_ids:
            return True
        return self.text_ends is not None and self.text_ends.ends(token_ids, before)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. Example: ``Completion(token_ids=[713, 284, 2], finish_reason="stop")``."""

    token_ids: list[int]
    """The answer without padding, including the token or the text that ended it; at least one token."""
    finish_reason: Literal["stop", "length"]
    """``stop``: a stop token or its text ended it. ``length``: the answer was cut at ``max_new_tokens``."""
    logprobs: list[float] | None = None
    """The log-probability of each token that the engine sampled with, or None if it keeps none."""


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Input of a reward source: B answers with their prompts. Scores are returned in the same order."""

    prompts: list[str | Sequence[Message]]
    """Prompts as in the dataset."""
    queries: list[str]
    """Prompts as text, with the policy's chat template applied."""
    responses: list[str]
    """Answers as text, without special tokens and without the token or string that ended them."""
    query_ids: list[list[int]]
    """Prompts as the policy's token ids."""
    response_ids: list[list[int]]
    """Answers as the policy's token ids, including the token or the text that ended them."""
    conversations: list[Sequence[Message] | None]
    """The chat messages that each query was rendered from, including the run's system message; None for plain text.
    Used by judges with their own chat template."""
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """The dataset's other columns, one entry per answer."""
    decode: Callable[[Sequence[int], Sequence[int]], str] | None = field(default=None, compare=False, repr=False)
    """Decodes the first tokens of an answer that continues the text of others, without special tokens. None if there is
    no tokenizer: then there are no token ids either, and the characters of an answer take the place of its tokens."""
    closed: Callable[[Sequence[int], Sequence[int]], Sequence[int]] | None = field(
        default=None, compare=False, repr=False
    )
    """``TextEnds.closed``; None if no text ends answers."""

    def __len__(self) -> int:
        return len(self.responses)

    def read_ids(self, row: int) -> list[int]:
        """Prompt and answer as judges that read the policy's token ids are given them: an answer that a stop string
        ended has an end token in its place."""
        answer = self.response_ids[row]
        return [*self.query_ids[row], *(answer if self.closed is None else self.closed(answer, self._before(row)))]

    def text_of(self, row: int, count: int) -> str:
        """The text of an answer's first tokens."""
        return self.decode(self.response_ids[row][:count], self._before(row))

    def _before(self, row: int) -> Sequence[int]:
        """``Prompt.before``."""
        return self.query_ids[row] if self.conversations[row] is None else ()


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """Output of a reward source for B answers."""

    scores: list[float]
    """One finite score per answer, in the order of the batch."""
    components: Mapping[str, list[float]] = field(default_factory=dict)
    """Named parts of the score, unweighted, one entry per answer."""
    token_scores: list[list[float]] | None = None
    """How each answer's score is distributed over its response tokens: one number per token, which add up to the score.
    None: all of it is on the last token."""


@dataclass(frozen=True)
class MicroBatch:
    """M rollouts padded for one forward: each response directly after its query, with padding after both.

    Built once per rollout batch. The old, reference, value and update passes all use it, so that equal weights give
    bitwise equal outputs.
    """

    rows: tuple[int, ...]
    """Positions of these rollouts in the rollout batch."""
    token_ids: Int[Tensor, "M T"]
    """Query and response; padding is id 0, which is neither attended to nor scored."""
    attention_mask: Bool[Tensor, "M T"]
    """True on real tokens."""
    position_ids: Int[Tensor, "M T"]
    """Position of each real token in its row, from 0, continued over the padding after it."""
    response_mask: Bool[Tensor, "M R"]
    """True on response tokens, including the end token; the first one is always in column 0."""
    group: int | None = None
    """Number of the micro-batch that this is a part of, if that did not fit into memory or is divided among processes.
    The update shuffles its parts together, so that mini-batches hold the same answers. None: not divided."""
    group_size: int | None = None
    """Number of answers in that micro-batch; None: the number of rows."""
    is_idle: bool = False
    """Whether it only keeps this process in step with others that have more micro-batches; it does not count."""

    @property
    def lengths(self) -> Int[Tensor, " M"]:
        """Response lengths, including the end token."""
        return self.response_mask.sum(dim=1)

    @property
    def response_columns(self) -> Bool[Tensor, "M T"]:
        """True on the columns of ``token_ids`` that hold response tokens: the last real ones of each row."""
        real = self.attention_mask.cumsum(dim=1)
        return self.attention_mask & (real > real[:, -1:] - self.lengths[:, None])

    @cached_property
    def response_index(self) -> Int[Tensor, " N"]:
        """Where the response tokens are in the flattened ``token_ids``, one row after the other."""
        return self.response_columns.flatten().nonzero()[:, 0]

    @cached_property
    def response_places(self) -> Int[Tensor, " N"]:
        """Where the same tokens are in a flattened [M, R]."""
        return self.response_mask.flatten().nonzero()[:, 0]

    @cached_property
    def sampled_columns(self) -> Int[Tensor, " K"]:
        """The columns of ``token_ids`` in which any response token was sampled: one before its own."""
        return self.response_columns[:, 1:].any(dim=0).nonzero()[:, 0]

    @cached_property
    def has_padding_before(self) -> bool:
        """Whether a row begins with padding; none does that ``collate`` made."""
        return not bool(self.attention_mask[:, 0].all())

    @property
    def num_response_tokens(self) -> int:
        """Number of response tokens in this micro-batch."""
        return int(self.response_mask.sum())

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device, with all indices: an accelerator would have to be waited for, as
        their number is not known in advance."""
        names = ("token_ids", "attention_mask", "position_ids", "response_mask")
        moved = replace(self, **{name: getattr(self, name).to(device) for name in names})
        indices = ("response_index", "response_places", "sampled_columns")
        cached = {name: getattr(self, name).to(device) for name in indices}
        vars(moved).update(cached, has_padding_before=self.has_padding_before)  # where cached properties are kept
        return moved


@dataclass(frozen=True)
class Experience:
    """Data of one micro-batch for the update. All tensors are [M, R], detached, 0 outside ``batch.response_mask``."""

    batch: MicroBatch
    """The rollouts."""
    logprobs: Float[Tensor, "M R"]
    """log π_old of each response token, from the policy's own forward at rollout."""
    advantages: Float[Tensor, "M R"]
    """Advantages, whitened over the whole rollout batch if enabled."""
    loss_mask: Bool[Tensor, "M R"]
    """True on the response tokens that contribute to the losses."""
    values: Float[Tensor, "M R"] | None = None
    """Value of the state that each response token was sampled in, at rollout; None without a critic."""
    returns: Float[Tensor, "M R"] | None = None
    """Targets of the critic; None without one."""
    ref_logprobs: Float[Tensor, "M R"] | None = None
    """log π_ref of each response token; None if the loss has no KL term."""
    importance: Float[Tensor, "M R"] | None = None
    """Importance weight of each response token's policy loss; None if the policy itself generated."""
    kl_loss_coef: float = 0.0
    """Weight of the KL in the loss."""
    takes_part: bool = True
    """Whether any token of its micro-batch, in any process, contributes to the losses; False if all of its answers were
    cut and are left out."""


@runtime_checkable
class Generator(Protocol):
    """Turns queries into answers. Works on token ids, never on text."""

    batch_size: int
    """Maximum number of answers generated side by side; an engine lowers it if they do not fit into memory."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer) once for every request, in the order in which answers finish."""
        ...

    def sync_weights(self, policy: nn.Module) -> None:
        """Generates later answers with these weights."""
        ...

    def close(self) -> None:
        """Frees the engine's resources."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """Scores answers. A source returns one finite score for every answer, or raises ``RewardError``."""

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Returns scores in the order of the batch; an answer's score does not depend on the other answers."""
        ...
