"""Decoding with the policy itself, in plain transformers."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache, CompileConfig

from tether.data.collate import pad_left
from tether.errors import ConfigError, GenerationError
from tether.generation.caches import StaticCaches, cuttable, fixed_width, give_room
from tether.types import Completion, Request, Sampling

CACHES = ("cache", "past_key_values", "cache_params")
"""What models call the cache that a forward takes and gives."""

logger = logging.getLogger(__name__)


class Decoding(Enum):
    """What a model's cache allows, or ``FIXED``, which is asked for."""

    CUT = "queries are padded; rows are copied and dropped"
    FIXED = "queries are padded; rows stay to the end"
    ALIKE = "queries of equal length alone; rows are copied and dropped"
    KEPT = "queries of equal length alone; rows stay to the end"
    ANEW = "queries of equal length alone; the whole text is read anew for every token"

    @property
    def may_pad(self) -> bool:
        """Whether queries of unequal length share a batch."""
        return self in (Decoding.CUT, Decoding.FIXED)

    @property
    def may_drop(self) -> bool:
        """Whether rows are copied and dropped."""
        return self not in (Decoding.FIXED, Decoding.KEPT)


class HFGenerator:
    """Answers by the policy's own forward: left-padded batches, a key-value cache, finished rows dropped from it.

    A query that several answers of a batch begin with is read once. Where a model keeps anything but keys and values,
    such as recurrent states, padding would be a part of them: then queries of one length alone share a batch.

    Tokens are drawn by Gumbel-max with noise that depends on the request's key and the position in the answer alone:

        y_t = argmax_v  logits_v / temperature − log E_v,      E_v ~ Exp(1), keyed by (key, t)

    so that the other rows of a batch change an answer only where rounding decides between two tokens. At temperature 0
    the most likely token is taken, and log-probabilities are those at temperature 1.

    Where the answers of a batch do not fit into memory side by side, those that have not ended are begun anew, half as
    many at a time, and so are all later ones.

    Args:
        policy_scope: a context in which the policy is ready to decode (its adapter active, eval mode, autocast). It is
            never open while the caller handles an answer, so the caller may use the weights for something else.
        batch_size: most answers decoded side by side.
        device: where the policy is.
        is_static: keep keys and values in a cache of fixed size, where the model has nothing else; on an accelerator
            the forward of a token is compiled then.
    """

    def __init__(
        self,
        policy_scope: Callable[[], AbstractContextManager[nn.Module]],
        *,
        batch_size: int,
        device: torch.device | str,
        is_static: bool = False,
    ) -> None:
        assert batch_size > 0
        self.batch_size = batch_size
        self._policy_scope = policy_scope
        self._device = torch.device(device)
        self._static = StaticCaches() if is_static else None
        self._decoding: Decoding | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer) as answers finish; requests of similar length share a batch.

        Raises:
            ConfigError: a query and the longest answer do not fit into the model's positions.
            GenerationError: the logits of a request are not finite, which names its position; or not even one answer
                fits into memory.
        """
        if not requests:
            return
        if self._decoding is None:
            with self._policy_scope() as policy, torch.no_grad():
                self._decoding = decoding(_bare(policy), self._device, is_static=self._static is not None)
        unanswered = dict.fromkeys(range(len(requests)))
        while unanswered:
            for position, completion in self._decoded(requests, list(unanswered), sampling):
                del unanswered[position]
                yield position, completion

    def _decoded(
        self, requests: Sequence[Request], positions: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """Answers to the requests at ``positions``, side by side; ends early once so many do not fit into memory."""
        for rows in batches([requests[i].token_ids for i in positions], self.batch_size, self._decoding):
            asked = [(positions[row], requests[positions[row]]) for row in rows]
            batch = _Batch(asked, sampling, self._device, self._decoding, self._static)
            while batch.rows:
                try:
                    with self._policy_scope() as policy, torch.no_grad():
                        finished = batch.decode_until_one_ends(_bare(policy))
                except torch.OutOfMemoryError as error:
                    self._halve(len(rows), error)
                    return
                yield from finished

    def _halve(self, count: int, error: torch.OutOfMemoryError) -> None:
        """Makes batches half as large as one of ``count`` answers that did not fit."""
        if count == 1:
            raise GenerationError(
                f"out of memory with one answer being decoded ({error}): lower sampling.response_length or "
                "data.max_prompt_length, or load the model in fewer bits (model.quantization, model.dtype)"
            ) from error
        self.batch_size = -(-count // 2)
        logger.warning(
            "out of memory while decoding: at most %d answers are decoded side by side from now on",
            self.batch_size,
        )

    def sync_weights(self, policy: nn.Module) -> None:
        """Nothing to do: the policy that is trained is the one that decodes."""

    def close(self) -> None:
        """Nothing to free: the model is the trainer's."""


@dataclass(frozen=True, eq=False)
class _Row:
    """An answer being written."""

    position: int
    noise: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _Batch:
    """Answers that are decoded side by side, and the cache they share."""

    def __init__(
        self,
        requests: Sequence[tuple[int, Request]],
        sampling: Sampling,
        device: torch.device,
        decoding: Decoding,
        static: StaticCaches | None,
    ) -> None:
        self.rows = [_Row(i, torch.Generator(device).manual_seed(request.key)) for i, request in requests]
        self._sampling, self._decoding, self._static = sampling, decoding, static
        self._cache: Any = None
        queries, slots = [tuple(request.token_ids) for _, request in requests], list(range(len(requests)))
        if decoding.may_drop:
            places = {query: i for i, query in enumerate(dict.fromkeys(queries))}
            queries, slots = list(places), [places[query] for query in queries]
        self._slots = slots  # where each unfinished row is in the tensors; at first, where its query is
        ids, mask, positions = (x.to(device) for x in pad_left(queries))
        self._inputs, self._positions = ids, positions
        # Columns for the whole answer are there from the start; a forward sees those up to its own token.
        self._seen = self._read = ids.shape[1]
        width = self._read + sampling.max_new_tokens
        columns = (fixed_width(width) if decoding is Decoding.FIXED else width) - self._read
        self._mask = torch.cat([mask, mask.new_ones(len(queries), columns)], dim=1)

    def decode_until_one_ends(self, model: nn.Module) -> list[tuple[int, Completion]]:
        """Writes token after token until an answer ends; returns what ended, the others stay in ``rows``."""
        if not self.rows[0].token_ids:
            self._check_positions(model)
        ended: list[bool] = [False]
        while not any(ended):
            tokens = self._next_tokens(model)
            ended = [
                token in self._sampling.stop_token_ids or len(row.token_ids) == self._sampling.max_new_tokens
                for row, token in zip(self.rows, tokens, strict=True)
            ]
        finished = [row for row, end in zip(self.rows, ended, strict=True) if end]
        kept = [i for i, end in enumerate(ended) if not end]
        self.rows, self._slots = [self.rows[i] for i in kept], [self._slots[i] for i in kept]
        if self.rows and self._decoding.may_drop:
            self._select()
        return [(row.position, self._completion(row)) for row in finished]

    def _next_tokens(self, model: nn.Module) -> list[int]:
        """One forward and one more token for every unfinished row."""
        logits = self._forward(model)[self._slots]
        if len(self.rows) > len(self._mask):  # answers to one query part ways
            self._select()
        tokens, logprobs = drawn_tokens(logits, [row.noise for row in self.rows], self._sampling)
        drawn, scores = tokens.tolist(), logprobs.tolist()
        for row, token, logprob in zip(self.rows, drawn, scores, strict=True):
            if not math.isfinite(logprob):
                raise GenerationError(
                    f"request {row.position}: the policy's logits for token {len(row.token_ids)} of the answer are not "
                    "finite numbers; its weights may have diverged, or hold numbers that half precision does not "
                    "(train.fp16)"
                )
            row.token_ids.append(token)
            row.logprobs.append(logprob)
        added = self._inputs.new_zeros(len(self._mask), 1)
        added[self._slots, 0] = tokens
        if self._decoding is Decoding.ANEW:
            self._inputs = torch.cat([self._inputs, added], dim=1)
            self._positions = torch.cat([self._positions, self._positions[:, -1:] + 1], dim=1)
        else:
            self._inputs, self._positions = added, self._positions[:, -1:] + 1
        self._seen += 1
        return drawn

    def _forward(self, model: nn.Module) -> Float[Tensor, "M V"]:
        """Logits after the last token; the cache, if there is one, then holds every token so far."""
        accepted, call = _parameters(type(model)), model
        name = None if self._decoding is Decoding.ANEW else _cache_name(model)
        is_first = self._seen == self._read
        if self._decoding is Decoding.FIXED:
            if is_first:
                self._cache = self._static.empty(model, *self._mask.shape)
            elif self._mask.device.type != "cpu":
                call = model.get_compiled_call(CompileConfig())
        elif self._seen == self._read + 1:
            give_room(self._cache)
        # an index, not a count: the slice that transformers takes for a count is not contiguous, and the head's matrix
        # product on it can be hundreds of times slower in bfloat16
        optional = {"position_ids": self._positions, "logits_to_keep": torch.tensor([-1])}
        # elsewhere nothing is padded, and Mamba takes a mask beside its cache for one of the single token
        masked = {"attention_mask": self._mask[:, : self._seen]} if self._decoding is Decoding.CUT else {}
        if self._decoding is Decoding.FIXED:
            masked = {"attention_mask": self._mask}  # of one shape, whatever has been read: what follows is not seen
        output = call(
            input_ids=self._inputs,
            use_cache=name is not None,
            **masked,
            **({} if name is None else {name: self._cache}),
            **{name: value for name, value in optional.items() if name in accepted},
        )
        if name is not None:
            self._cache = getattr(output, name)
        return output.logits[:, -1]

    def _select(self) -> None:
        """Makes the tensors and the cache hold the unfinished rows and no others, in their order."""
        indices = torch.tensor(self._slots, device=self._mask.device)
        if self._cache is not None:
            self._cache.reorder_cache(indices)
        self._inputs, self._positions, self._mask = (x[indices] for x in (self._inputs, self._positions, self._mask))
        self._slots = list(range(len(self.rows)))

    def _completion(self, row: _Row) -> Completion:
        stopped = row.token_ids[-1] in self._sampling.stop_token_ids
        return Completion(row.token_ids, "stop" if stopped else "length", row.logprobs)

    def _check_positions(self, model: nn.Module) -> None:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        wanted = self._read + self._sampling.max_new_tokens
        if limit is not None and wanted > limit:
            raise ConfigError(
                f"a query of {self._read} tokens and an answer of up to {self._sampling.max_new_tokens} need {wanted} "
                f"positions, the model has {limit}: lower data.max_prompt_length or sampling.response_length"
            )


def drawn_tokens(
    logits: Float[Tensor, "M V"], generators: Sequence[torch.Generator], sampling: Sampling
) -> tuple[Int[Tensor, " M"], Float[Tensor, " M"]]:
    """One token a row, drawn from softmax(logits / temperature), and its log-probability in float32 or better.

        y = argmax_v  x_v − log E_v = argmax_v  exp(x_v − max x) / E_v,      x = logits / temperature
        E_v = −log(1 − u_v) ~ Exp(1),      u_v = (k_v + ½) / 2³¹,      k_v from the row's generator
        log π(y) = x_y − log Σ_v exp x_v

    −log E is Gumbel noise, so the argmax is a sample; the second form needs the exponentials of the sum and no others.
    At temperature 0: y = argmax_v logits_v and x = logits. With top-k or top-p the argmax is over the tokens that they
    keep, the sum over all. The log-probability of a row is not finite if any of its logits is NaN or +∞.

    Source: Gumbel 1954; Maddison, Tarlow and Minka 2014, eq. 2, https://arxiv.org/abs/1411.0030
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        tokens = scaled.argmax(dim=-1)
        return tokens, scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(dim=-1)
    scaled = scaled if sampling.temperature == 1 else scaled / sampling.temperature
    largest = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - largest).exp_()
    normaliser = largest[:, 0] + weights.sum(dim=-1).log_()
    if (kept := _truncated(scaled, sampling)) is not scaled:
        weights.masked_fill_(kept.isneginf(), 0.0)
    integers = torch.empty(scaled.shape, dtype=torch.int32, device=scaled.device)
    for row, generator in zip(integers, generators, strict=True):
        row.random_(generator=generator)  # below 2³¹
    # In float32 a u near 0, which decides, is as exact as any other.
    negated = integers.float().add_(0.5).mul_(-(2.0**-31)).log1p_()
    tokens = weights.div_(negated).argmin(dim=-1)
    return tokens, scaled.gather(1, tokens[:, None])[:, 0] - normaliser


def _truncated(scaled: Float[Tensor, "M V"], sampling: Sampling) -> Float[Tensor, "M V"]:
    """The logits of the tokens that top-k and then top-p keep, −∞ elsewhere; a row's most likely token is kept."""
    if sampling.top_k is not None:
        least = scaled.topk(min(sampling.top_k, scaled.shape[-1]), dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = torch.empty_like(before, dtype=torch.bool).scatter_(1, order, before >= sampling.top_p)
        scaled = scaled.masked_fill(dropped, -torch.inf)
    return scaled


def batches(queries: Sequence[Sequence[int]], size: int, decoding: Decoding) -> Iterator[list[int]]:
    """Positions of the queries that are answered side by side, longest first, equal ones next to each other."""
    first = {tuple(query): i for i, query in reversed(list(enumerate(queries)))}
    order = sorted(range(len(queries)), key=lambda i: (-len(queries[i]), first[tuple(queries[i])], i))
    for _, rows in groupby(order, key=lambda i: 0 if decoding.may_pad else len(queries[i])):
        group = list(rows)
        yield from (group[start : start + size] for start in range(0, len(group), size))


def decoding(model: nn.Module, device: torch.device, *, is_static: bool = False) -> Decoding:
    """How the model is decoded, by the cache that it makes of one token; anything but ``CUT`` is told in the log.

    Args:
        is_static: whether a cache of fixed size is wanted.
    """
    name = _cache_name(model)
    output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=name is not None)
    cache, kind = None if name is None else getattr(output, name, None), type(model).__name__
    if cuttable(cache):
        if is_static:
            logger.info(
                "%s is decoded in a cache of fixed size: answers that have ended stay until the last one ends%s",
                kind,
                "" if device.type == "cpu" else "; its forward of a token is compiled, so the first answers take long",
            )
        return Decoding.FIXED if is_static else Decoding.CUT
    if is_static:
        logger.warning("%s keeps more than keys and values of what it read: its cache is not one of fixed size", kind)
    if cache is None:
        logger.warning(
            "%s hands out no cache that could be decoded with: the whole text is read anew for every token of an "
            "answer, and only prompts of equal length are answered side by side",
            kind,
        )
        return Decoding.ANEW
    logger.warning(
        "%s keeps more than keys and values of what it read: only prompts of equal length are answered side by side%s",
        kind,
        "" if isinstance(cache, Cache) else ", and those that have ended are decoded until the last one ends",
    )
    return Decoding.ALIKE if isinstance(cache, Cache) else Decoding.KEPT


def _bare(policy: nn.Module) -> nn.Module:
    """The model itself, its active adapter within it."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy


def _cache_name(model: nn.Module) -> str | None:
    """The argument that takes the model's cache; None if it has none."""
    return next((name for name in CACHES if name in _parameters(type(model))), None)


@lru_cache
def _parameters(model_class: type) -> frozenset[str]:
    """Names that the forward of a model takes; they differ between architectures and releases of transformers."""
    return frozenset(inspect.signature(model_class.forward).parameters)
