"""How a model is decoded: the fastest way that gives the same logits as one forward over the whole text."""

from __future__ import annotations

import logging
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache

from tether.generation.batch import Batch, Decoding, cache_name
from tether.generation.caches import StaticCaches, cuttable
from tether.models.forward import few_tokens, is_half
from tether.types import Request, Sampling

TOLERANCE, TOLERANCE_IN_HALF = 3e-3, 0.1
"""Largest relative difference of mean-free logits from those of a forward over the whole text: float32; half
precision."""
FAULTS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors by which models show that they cannot handle padding or a cache."""
CONSEQUENCES = {
    Decoding.ALIKE: "only prompts of equal length are answered side by side",
    Decoding.KEPT: "only prompts of equal length are answered side by side, and those that have ended are decoded "
    "until the last one ends",
    Decoding.ANEW: "the whole text is reread for every token of an answer, and only prompts of equal length are "
    "answered side by side",
}

logger = logging.getLogger(__name__)


def decoding(model: nn.Module, device: torch.device, *, is_static: bool = False) -> Decoding:
    """How the model is decoded, judged by the cache that it returns for one token and by its logits for a few texts
    decoded that way; anything but ``CUT`` is logged.

    Args:
        is_static: whether a cache of fixed size is wanted, and used if it stands the same test.
    """
    cache, kind = _cache_of_one_token(model, device), type(model).__name__
    ways = [Decoding.CUT, Decoding.ALIKE, Decoding.KEPT, Decoding.ANEW]
    reason = "gives other results for padded or cached text than for the whole text"
    if cache is None:
        ways, reason = ways[3:], "returns no cache that can be used for decoding"
    elif not cuttable(cache):
        ways, reason = ways[1 if isinstance(cache, Cache) else 2 :], "caches more than keys and values"
    way = next(way for way in ways if way is Decoding.ANEW or _is_faithful(model, device, way))
    if way is not Decoding.CUT:
        logger.warning("%s %s: %s", kind, reason, CONSEQUENCES[way])
        if is_static:
            logger.warning("%s: its cache is not one of fixed size", kind)
    elif is_static and not _is_faithful(model, device, Decoding.FIXED):
        logger.warning(
            "%s gives other results in a cache of fixed size than for the whole text: its cache is not one of fixed "
            "size. Its attention may read what no token has filled yet (model.attn_implementation)",
            kind,
        )
    elif is_static:
        logger.info(
            "%s is decoded in a cache of fixed size: answers that have ended stay until the last one ends%s",
            kind,
            "" if device.type == "cpu" else "; its forward of one token is compiled, so the first answers take long",
        )
        return Decoding.FIXED
    return way


def _cache_of_one_token(model: nn.Module, device: torch.device) -> Any:
    """The cache, or None if the model returns none that its forward accepts."""
    if (name := cache_name(model)) is None:
        return None
    try:
        return getattr(model(input_ids=few_tokens(model)[:, :1].to(device), use_cache=True), name, None)
    except torch.OutOfMemoryError:
        raise
    except FAULTS:
        return None


def _is_faithful(model: nn.Module, device: torch.device, way: Decoding) -> bool:
    """Whether three texts, two of which share a query and one of these ends first, get the logits of an unpadded
    forward over the whole text."""
    ids = few_tokens(model)[0].tolist()
    answer, twice, once = ids[-3:], ids[:-4], ids[:2] if way.may_pad else ids[4:]
    queries, said = (twice, twice, once), ([], [], [])
    requests = [(i, Request(query, key=i)) for i, query in enumerate(queries)]
    # a compiled forward gets the same mask; it would have to be compiled for these three texts alone
    batch = Batch(requests, Sampling(max_new_tokens=len(answer)), device, way, StaticCaches(compiles=False))
    try:
        for step, token in enumerate(answer):
            for row, logits in zip(batch.rows, batch.logits(model), strict=True):
                said[row.position].append(logits)
            batch.write(torch.full((len(batch.rows),), token, device=device))
            if step == 1:
                batch.keep([1, 2])
    except torch.OutOfMemoryError:
        raise
    except FAULTS:
        return False
    for query, of_rows in ((twice, said[:2]), (once, said[2:])):
        ids = torch.tensor([[*query, *answer]], device=device)
        wanted = model(input_ids=ids, use_cache=False).logits[0, len(query) - 1 :]
        if not all(_are_close(torch.stack(logits), wanted[: len(logits)]) for logits in of_rows):
            return False
    return True


def _are_close(got: Float[Tensor, "T V"], wanted: Float[Tensor, "T V"]) -> bool:
    """Whether logits differ by rounding at most. NaN logits count as close: drawing from them is reported elsewhere."""
    most = TOLERANCE_IN_HALF if is_half(got) else TOLERANCE
    got, wanted = (x.float() - x.float().mean(dim=1, keepdim=True) for x in (got, wanted))
    return not (got - wanted).norm() > most * wanted.norm()
