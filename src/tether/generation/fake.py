"""A generator with predetermined answers, for tests and examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from tether.errors import GenerationError
from tether.types import Completion, Request, Sampling


class FakeGenerator:
    """Returns the answers it was given, under the same rules as a real engine.

    An answer is cut after the first token that ends it and at ``max_new_tokens``. Answers come shortest first, as they
    would finish, and have no log-probabilities.

    Args:
        answers: token ids of the answer to each request, by position, starting over if there are more requests; or a
            function of the request.
    """

    def __init__(self, answers: Sequence[Sequence[int]] | Callable[[Request], Sequence[int]]) -> None:
        self._answers = answers
        self.batch_size = 1
        self.num_syncs = 0
        """How often ``sync_weights`` was called."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer).

        Raises:
            GenerationError: an answer neither ends at a token or in its text nor reaches ``max_new_tokens``; no engine
                writes one.
        """
        completions = [self._completion(i, request, sampling) for i, request in enumerate(requests)]
        yield from sorted(enumerate(completions), key=lambda item: len(item[1].token_ids))

    def sync_weights(self, policy: nn.Module) -> None:
        """Counts the call."""
        self.num_syncs += 1

    def close(self) -> None:
        """Nothing to free."""

    def _completion(self, position: int, request: Request, sampling: Sampling) -> Completion:
        answer = self._answers(request) if callable(self._answers) else self._answers[position % len(self._answers)]
        answer = list(answer)[: sampling.max_new_tokens]
        for end in range(1, len(answer) + 1):
            if sampling.stops(answer[:end], request.before):
                return Completion(answer[:end], "stop")
        if len(answer) < sampling.max_new_tokens:
            raise GenerationError(
                f"request {position}: the answer {answer} has no stop token, no stop string and "
                f"fewer than {sampling.max_new_tokens} tokens"
            )
        return Completion(answer, "length")
