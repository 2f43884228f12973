"""An answer while it is being written, by whichever engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tether.errors import GenerationError
from tether.types import Completion, Sampling


@dataclass(frozen=True, eq=False)
class Draft:
    """An answer that is being written, token by token."""

    position: int
    """Position of its request."""
    before: Sequence[int]
    """``Request.before``."""
    token_ids: list[int] = field(default_factory=list)
    """Its tokens so far."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each."""

    def write(self, token: int, logprob: float) -> None:
        """Appends a token.

        Raises:
            GenerationError: its log-probability is not finite.
        """
        if not math.isfinite(logprob):
            raise GenerationError(
                f"request {self.position}: the policy's logits for token {len(self.token_ids)} of the answer are not "
                "finite; its weights may have diverged, or exceed the range of half precision"
            )
        self.token_ids.append(token)
        self.logprobs.append(logprob)

    def is_finished(self, sampling: Sampling) -> bool:
        """Whether its last token ends it, by itself or as the last that it may have."""
        return sampling.stops(self.token_ids, self.before) or len(self.token_ids) == sampling.max_new_tokens

    def completion(self, sampling: Sampling) -> Completion:
        """The finished answer."""
        stopped = sampling.stops(self.token_ids, self.before)
        return Completion(self.token_ids, "stop" if stopped else "length", self.logprobs)
