"""Decoding with the policy itself, in plain ``transformers``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig

from tether.errors import ConfigError, GenerationError
from tether.generation.batch import Batch, Decoding
from tether.generation.caches import StaticCaches
from tether.generation.decoding import decoding
from tether.models.fit import steady_positions, steady_positions_told
from tether.types import Completion, Request, Sampling

logger = logging.getLogger(__name__)


class HFGenerator:
    """Answers by the policy's own forward: left-padded batches, a key-value cache, finished rows dropped from it.

    A query shared by several answers of a batch is read once. If a model keeps anything but keys and values, such as
    recurrent states, padding would become part of it: then only queries of equal length share a batch.

    Tokens are drawn by Gumbel-max with noise that depends only on the request's key and the position in the answer:

        y_t = argmax_v  logits_v / temperature − log E_v,      E_v ~ Exp(1), keyed by (key, t)

    so that the other rows of a batch change an answer only if rounding decides between two tokens. At temperature 0 the
    most likely token is taken, and log-probabilities are those at temperature 1.

    If the answers of a batch do not fit into memory side by side, the unfinished ones start over, half as many at a
    time, and so do all later ones.

    Args:
        policy_scope: a context in which the policy is ready to decode (its adapter active, eval mode, autocast). It is
            never open while the caller handles an answer, so that the caller may use the weights for something else.
        batch_size: maximum number of answers decoded side by side.
        device: device of the policy.
        is_static: keep keys and values in a cache of fixed size, if the model has nothing else; on an accelerator the
            forward of a token is then compiled. The cache is freed at the end of a ``generate``: its width follows from
            the requests alone, so that a resumed run repeats it, and the update has the memory.
        phase: a context around all steps of one ``generate``, also while the caller handles an answer.
        limits: what the user sets for shorter queries and answers, for messages.
        smaller: how else the user may save memory, for messages; empty if there is no other way.
    """

    def __init__(
        self,
        policy_scope: Callable[[], AbstractContextManager[nn.Module]],
        *,
        batch_size: int,
        device: torch.device | str,
        is_static: bool = False,
        phase: Callable[[], AbstractContextManager[None]] = nullcontext,
        limits: str = "sampling.response_length or data.max_prompt_length",
        smaller: str = "load the model in fewer bits (model.quantization, model.dtype)",
    ) -> None:
        assert batch_size > 0
        self.batch_size = batch_size
        self._policy_scope, self._phase = policy_scope, phase
        self._device = torch.device(device)
        self._is_static = is_static
        self._decoding: Decoding | None = None
        self._shape: PreTrainedConfig | None = None
        self._limits, self._smaller = limits, smaller

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer) as answers finish; requests of similar length share a batch.

        Raises:
            ConfigError: a query with the longest answer exceeds the model's positions.
            GenerationError: the logits of a request are not finite (names its position), or not even one answer fits
                into memory.
        """
        if not requests:
            return
        with self._phase():
            if self._decoding is None:
                try:
                    with self._policy_scope() as policy, torch.no_grad():
                        self._decoding = decoding(_bare(policy), self._device, is_static=self._is_static)
                        self._shape = _bare(policy).config
                except torch.OutOfMemoryError as error:
                    self._halve(1, error)
            self._check_positions(max(len(request.token_ids) for request in requests), sampling.max_new_tokens)
            static = StaticCaches(compiles=self._device.type != "cpu") if self._is_static else None
            unanswered = dict.fromkeys(range(len(requests)))
            while unanswered:
                for position, completion in self._decoded(requests, list(unanswered), sampling, static):
                    del unanswered[position]
                    yield position, completion

    def _decoded(
        self, requests: Sequence[Request], positions: Sequence[int], sampling: Sampling, static: StaticCaches | None
    ) -> Iterator[tuple[int, Completion]]:
        """Answers to the requests at ``positions``, side by side; ends early once that many do not fit into memory."""
        for rows in batches([requests[i].token_ids for i in positions], self.batch_size, self._decoding):
            asked = [(positions[row], requests[positions[row]]) for row in rows]
            batch = Batch(asked, sampling, self._device, self._decoding, static)
            while batch.rows:
                try:
                    with self._policy_scope() as policy, torch.no_grad():
                        finished = batch.decode_until_one_ends(_bare(policy))
                except torch.OutOfMemoryError as error:
                    self._halve(len(rows), error)
                    return
                yield from finished

    def _check_positions(self, query: int, answer: int) -> None:
        limit = steady_positions(self._shape)
        if limit is not None and query + answer > limit:
            raise ConfigError(
                f"a query of {query} tokens and an answer of up to {answer} need {query + answer} positions, but the "
                f"model has {steady_positions_told(self._shape)}: lower {self._limits}"
            )

    def _halve(self, count: int, error: torch.OutOfMemoryError) -> None:
        """Halves the batch size after a batch of ``count`` answers that did not fit."""
        if count == 1:
            raise GenerationError(
                f"out of memory with one answer being decoded ({error}): lower {self._limits}"
                f"{', or ' if self._smaller else ''}{self._smaller}"
            ) from error
        self.batch_size = -(-count // 2)
        logger.warning(
            "out of memory while decoding: at most %d answers are decoded side by side from now on",
            self.batch_size,
        )

    def sync_weights(self, policy: nn.Module) -> None:
        """Nothing to do: the policy being trained is the one that decodes."""

    def close(self) -> None:
        """Nothing to free: the model is the trainer's."""


def batches(queries: Sequence[Sequence[int]], size: int, decoding: Decoding) -> Iterator[list[int]]:
    """Positions of the queries that are answered side by side; longest first, equal ones next to each other."""
    first = {tuple(query): i for i, query in reversed(list(enumerate(queries)))}
    order = sorted(range(len(queries)), key=lambda i: (-len(queries[i]), first[tuple(queries[i])], i))
    for _, rows in groupby(order, key=lambda i: 0 if decoding.may_pad else len(queries[i])):
        group = list(rows)
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _bare(policy: nn.Module) -> nn.Module:
    """The model itself, its active adapter within it."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy
