"""Sums, means and moments over the entries where a mask is True.

Entries outside a mask are replaced before any arithmetic, never multiplied by zero: a NaN there changes nothing.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

WHITEN_EPSILON = 1e-8
"""Added to the variance, so that constant entries whiten to zeros."""


def wide(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """``x`` in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def length_mask(lengths: Int[Tensor, " B"], width: int) -> Bool[Tensor, "B R"]:
    """True on the first ``lengths[b]`` of ``width`` entries of row b."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def masked_sum(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], dim: int | None = None) -> Float[Tensor, "..."]:
    """The sum of ``x`` where ``mask`` is True, over all entries or along ``dim``."""
    return torch.where(mask, x, torch.zeros_like(x)).sum(dim)


def masked_mean(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]) -> Float[Tensor, ""]:
    """The mean of ``x`` where ``mask`` is True: Σ x / count. NaN if ``mask`` is True nowhere."""
    return masked_sum(x, mask) / mask.sum()


def masked_var(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]) -> Float[Tensor, ""]:
    """The biased variance of ``x`` where ``mask`` is True: Σ (x − mean)² / count. NaN if ``mask`` is True nowhere."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def whiten(x: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, keep_mean: bool) -> Float[Tensor, "B R"]:
    """``x`` scaled to unit variance over the entries where ``mask`` is True, in float32 or wider.

        y = (x − mean) / √(var + 1e−8)           keep_mean False: the result has mean 0
        y = (x − mean) / √(var + 1e−8) + mean    keep_mean True: the result has the mean of x

    Args:
        mask: True on response tokens.

    Returns:
        The whitened entries, 0 outside ``mask``.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, ``whiten`` in the published code
    """
    x = wide(x)
    mean, var = masked_mean(x, mask), masked_var(x, mask)
    white = (x - mean) * torch.rsqrt(var + WHITEN_EPSILON)
    return torch.where(mask, white + mean if keep_mean else white, torch.zeros_like(x))
