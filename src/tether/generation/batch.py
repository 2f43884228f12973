"""Answers decoded side by side with the policy itself, in plain transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import CompileConfig

from tether.data.collate import pad_left
from tether.generation.caches import StaticCaches, give_room
from tether.generation.draft import Draft
from tether.types import Completion, Request, Sampling

CACHES = ("cache", "past_key_values", "cache_params")
"""Names that models give the cache which a forward takes and returns."""


class Decoding(Enum):
    """What a model's cache allows, or ``FIXED``, which must be requested."""

    CUT = "queries are padded; rows are copied and dropped"
    FIXED = "queries are padded; rows stay to the end"
    ALIKE = "queries of equal length alone; rows are copied and dropped"
    KEPT = "queries of equal length alone; rows stay to the end"
    ANEW = "queries of equal length alone; the whole text is reread for every token"

    @property
    def may_pad(self) -> bool:
        """Whether queries of unequal length share a batch."""
        return self in (Decoding.CUT, Decoding.FIXED)

    @property
    def may_drop(self) -> bool:
        """Whether rows may be copied and dropped."""
        return self not in (Decoding.FIXED, Decoding.KEPT)


class Batch:
    """Answers that are decoded side by side, and the cache they share."""

    def __init__(
        self,
        requests: Sequence[tuple[int, Request]],
        sampling: Sampling,
        device: torch.device,
        decoding: Decoding,
        static: StaticCaches | None,
    ) -> None:
        self.rows = [Draft(i, request.before) for i, request in requests]
        self._noise = [torch.Generator(device).manual_seed(request.key) for _, request in requests]
        self._sampling, self._decoding, self._static = sampling, decoding, static
        self._cache: Any = None
        queries, slots = [tuple(request.token_ids) for _, request in requests], list(range(len(requests)))
        if decoding.may_drop:
            places = {query: i for i, query in enumerate(dict.fromkeys(queries))}
            queries, slots = list(places), [places[query] for query in queries]
        ids, mask, positions = (x.to(device) for x in pad_left(queries))
        self._inputs, self._positions = ids, positions
        # Columns for the whole answer exist from the start; a forward sees those up to its own token.
        self._seen = self._read = ids.shape[1]
        width = self._read + sampling.max_new_tokens
        if decoding is Decoding.FIXED:
            width = static.width(len(queries), width)
        self._mask = torch.cat([mask, mask.new_ones(len(queries), width - self._read)], dim=1)
        self._last_column = torch.tensor([-1], device=device)
        self._place(slots)

    def decode_until_one_ends(self, model: nn.Module) -> list[tuple[int, Completion]]:
        """Writes token after token until an answer ends; returns the finished answers, the others stay in ``rows``."""
        ended: list[bool] = [False]
        while not any(ended):
            self._next_tokens(model)
            ended = [row.is_finished(self._sampling) for row in self.rows]
        finished = [row for row, end in zip(self.rows, ended, strict=True) if end]
        self.keep([i for i, end in enumerate(ended) if not end])
        return [(row.position, row.completion(self._sampling)) for row in finished]

    def keep(self, kept: Sequence[int]) -> None:
        """Keeps only these of the unfinished rows."""
        self.rows, self._noise = [self.rows[i] for i in kept], [self._noise[i] for i in kept]
        if self.rows:
            self._place([self._slots[i] for i in kept])
            if self._decoding.may_drop:
                self._select()

    def logits(self, model: nn.Module) -> Float[Tensor, "M V"]:
        """The logits of the next token of every unfinished row."""
        logits = self._forward(model)
        if self._index is not None:
            logits = logits[self._index]
        if len(self.rows) > len(self._mask):  # answers to one query diverge
            self._select()
        return logits

    def write(self, tokens: Int[Tensor, " M"]) -> None:
        """Makes these the next tokens of the unfinished rows."""
        added = tokens[:, None]
        if self._index is not None:
            added = self._inputs.new_zeros(len(self._mask), 1)
            added[self._index, 0] = tokens
        if self._decoding is Decoding.ANEW:
            self._inputs = torch.cat([self._inputs, added], dim=1)
            self._positions = torch.cat([self._positions, self._positions[:, -1:] + 1], dim=1)
        else:
            self._inputs, self._positions = added, self._positions[:, -1:] + 1
        self._seen += 1

    def _next_tokens(self, model: nn.Module) -> None:
        """One forward and one more token for every unfinished row."""
        tokens, logprobs = drawn_tokens(self.logits(model), self._noise, self._sampling)
        # one copy, since each waits for the device; float32 holds all integers up to 2²⁴
        drawn, scores = torch.stack([tokens.to(logprobs.dtype), logprobs]).tolist()
        for row, token, logprob in zip(self.rows, drawn, scores, strict=True):
            row.write(int(token), logprob)
        self.write(tokens)

    def _forward(self, model: nn.Module) -> Float[Tensor, "M V"]:
        """Logits after the last token; the cache, if there is one, then holds every token so far."""
        accepted, call = parameters(type(model)), model
        name = None if self._decoding is Decoding.ANEW else cache_name(model)
        is_first = self._seen == self._read
        if self._decoding is Decoding.FIXED:
            if is_first:
                self._cache = self._static.empty(model, *self._mask.shape)
            elif self._static.compiles:
                call = model.get_compiled_call(CompileConfig())
        elif self._seen == self._read + 1:
            give_room(self._cache)
        # an index, not a count: the slice that transformers takes for a count is not contiguous, and the head's matrix
        # product on it can be hundreds of times slower in bfloat16
        optional, padded = {"logits_to_keep": self._last_column}, {}
        # elsewhere nothing is padded: Mamba takes a mask next to its cache for that of one token alone, and models
        # whose positions do not begin at 0 (RoBERTa) compute them best themselves
        if self._decoding.may_pad:
            # in a cache of fixed size it has one shape, whatever has been read: what follows is not seen
            end = self._seen if self._decoding is Decoding.CUT else None
            padded, optional["position_ids"] = {"attention_mask": self._mask[:, :end]}, self._positions
        output = call(
            input_ids=self._inputs,
            use_cache=name is not None,
            **padded,
            **({} if name is None else {name: self._cache}),
            **{name: value for name, value in optional.items() if name in accepted},
        )
        if name is not None:
            self._cache = getattr(output, name)
        return output.logits[:, -1]

    def _place(self, slots: Sequence[int]) -> None:
        """Notes where each unfinished row is in the tensors; at first, where its query is."""
        self._slots = list(slots)
        is_each = self._slots == list(range(len(self._mask)))
        # made once: indexing by a list copies it to the device, and waits for that, for every token
        self._index = None if is_each else torch.tensor(self._slots, device=self._mask.device)

    def _select(self) -> None:
        """Makes the tensors and the cache hold the unfinished rows and no others, in their order."""
        if (indices := self._index) is None:
            return
        if self._cache is not None:
            self._cache.reorder_cache(indices)
        self._inputs, self._positions, self._mask = (x[indices] for x in (self._inputs, self._positions, self._mask))
        self._place(range(len(self.rows)))


def drawn_tokens(
    logits: Float[Tensor, "M V"], generators: Sequence[torch.Generator], sampling: Sampling
) -> tuple[Int[Tensor, " M"], Float[Tensor, " M"]]:
    """One token per row, drawn from softmax(logits / temperature), and its log-probability in float32 or better.

        y = argmax_v  x_v − log E_v = argmax_v  exp(x_v − max x) / E_v,      x = logits / temperature
        E_v = −log(1 − u_v) ~ Exp(1),      u_v = (k_v + ½) / 2³¹,      k_v from the row's generator
        log π(y) = x_y − log Σ_v exp x_v

    −log E is Gumbel noise, so the argmax is a sample; the second form needs no exponentials but those of the sum. At
    temperature 0: y = argmax_v logits_v and x = logits. With top-k or top-p the argmax is over the tokens that they
    keep, the sum over all tokens. The log-probability of a row is not finite if any of its logits is NaN or +∞.

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


def cache_name(model: nn.Module) -> str | None:
    """The argument that takes the model's cache; None if it has none."""
    return next((name for name in CACHES if name in parameters(type(model))), None)


@lru_cache
def parameters(model_class: type) -> frozenset[str]:
    """Names of the arguments of a model's forward; they differ between architectures and releases of transformers."""
    return frozenset(inspect.signature(model_class.forward).parameters)
