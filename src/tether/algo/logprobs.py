"""Log-probabilities and entropy of chosen tokens, without ever holding all their logits at once."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tether.algo.masking import wide

LOGITS_AT_ONCE, LOGITS_ON_ACCELERATOR = 2**24, 2**26
"""Logits per chunk: few enough for memory (64 MiB; 256 MiB), and enough for fast matrix products, as an accelerator
reads the whole head for every chunk.

Not fewer: tensors of up to 32 MiB come from glibc's heap, where one rarely fits into the space of another, so a
pass over many chunks takes as much memory as all logits at once.
"""
SUMMED_AT_ONCE = 2**22
"""Elements of a product that is added to a total, 16 MiB, where the product cannot be accumulated in place."""


def logits_at_once(device: torch.device) -> int:
    """Number of logits in a chunk on a device; a token has one per entry of the vocabulary."""
    return LOGITS_AT_ONCE if device.type == "cpu" else LOGITS_ON_ACCELERATOR


def _even_chunks(num_tokens: int, most: int) -> list[slice]:
    """Tokens in the fewest possible chunks of at most ``most``, as even as possible: the tensors of one chunk fit into
    the space of another's, and the last chunk, which is not computed twice, is not a small remainder."""
    count = -(-num_tokens // most)
    ends = [num_tokens * number // count for number in range(count + 1)] if count else []
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def logprobs_from_logits(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], *, temperature: float, with_entropy: bool = False
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """The log-probability of each target and, if requested, the entropy of the distribution it was drawn from, in nats.

        z = logits / temperature
        log π(v) = z_v − log Σ_u exp z_u
        H = −Σ_u π(u) log π(u)

    Computed in float32, or float64 if the logits are. A logit of −∞ is a token of probability 0.

    Args:
        temperature: the temperature that the targets were sampled with; above 0.
    """
    return _FromLogits.apply(logits, targets, temperature, with_entropy)


class _FromLogits(torch.autograd.Function):
    """``logprobs_from_logits`` and its gradient, with the log-probabilities of a chunk of tokens in memory at a time.

    Keeps the logits, as the model that changed them often does; the backward pass computes log-probabilities anew.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = logits.new_empty(len(logits), dtype=wide(logits[:0]).dtype)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for chunk in _chunks_of(logits):
            of_chunk = _all_logprobs(logits[chunk], temperature)
            logprobs[chunk] = of_chunk.gather(-1, targets[chunk].unsqueeze(-1)).squeeze(-1)
            if with_entropy:
                entropy[chunk] = _finite(of_chunk).exp().mul_(of_chunk).sum(dim=-1).neg_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits, targets, entropy = ctx.saved_tensors
        if of_logprobs is None and of_entropy is None:
            return None, None, None, None
        grad = torch.empty_like(logits)
        for chunk in _chunks_of(logits):
            of_chunk, factors = _finite(_all_logprobs(logits[chunk], ctx.temperature)), None
            probs = of_chunk.exp()
            if of_entropy is not None:
                factors = of_chunk.add_(entropy[chunk].unsqueeze(-1)).mul_(-of_entropy[chunk].unsqueeze(-1))
            of_chosen = None if of_logprobs is None else of_logprobs[chunk]
            grad[chunk] = _gradient_over(probs, targets[chunk], of_chosen, factors).div_(ctx.temperature)
        return grad, None, None, None


def _chunks_of(logits: Float[Tensor, "N V"]) -> list[slice]:
    return _even_chunks(len(logits), max(1, logits_at_once(logits.device) // max(1, logits.shape[-1])))


def _all_logprobs(logits: Float[Tensor, "n V"], temperature: float) -> Float[Tensor, "n V"]:
    scaled = wide(logits)
    return (scaled if temperature == 1 else scaled / temperature).log_softmax(dim=-1)


def _finite(logprobs: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """Log-probabilities, changed in place, whose product with a probability of 0 is 0 instead of NaN."""
    return logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)


def _gradient_over(
    probs: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    of_logprobs: Float[Tensor, " N"] | None,
    entropy_factors: Float[Tensor, "N V"] | None,
) -> Float[Tensor, "N V"]:
    """The gradient of a loss with respect to z, written over ``probs``, given those for log-probabilities and
    entropies.

        ∂ log π(y) / ∂z_v = [v = y] − π_v        ∂H / ∂z_v = −π_v (log π_v + H)

    Args:
        entropy_factors: −∂loss/∂H (log π + H), overwritten; at least one of the two gradients is given.
    """
    if of_logprobs is None:
        return probs.mul_(entropy_factors)
    chosen = of_logprobs.unsqueeze(-1)
    probs.mul_(-chosen if entropy_factors is None else entropy_factors.sub_(chosen))
    return probs.scatter_add_(-1, targets.unsqueeze(-1), chosen)


def selected_logprobs(
    hidden: Float[Tensor, "N D"],
    head: Callable[[Tensor], Tensor],
    targets: Int[Tensor, " N"],
    *,
    temperature: float,
    chunk_size: int = 128,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """``logprobs_from_logits`` of ``head(hidden)``, with the logits of at most ``chunk_size`` tokens in memory
    at a time.

    The backward pass recomputes each chunk's logits, so that neither pass holds [N, V].

    Args:
        hidden: hidden state that each target was sampled from, whichever rows they belong to.
        head: hidden states → logits, [n, D] → [n, V], including everything the model does to its logits.
        targets: token ids.
        temperature: as in ``logprobs_from_logits``.
    """

    def of_chunk(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return logprobs_from_logits(head(rows), ids, temperature=temperature, with_entropy=with_entropy)

    chunks = _even_chunks(len(hidden), chunk_size) or [slice(0)]  # no tokens: a single empty chunk
    outputs = [checkpoint(of_chunk, hidden[chunk], targets[chunk], use_reentrant=False) for chunk in chunks]
    logprobs = torch.cat([logprobs for logprobs, _ in outputs])
    return logprobs, torch.cat([entropy for _, entropy in outputs]) if with_entropy else None


class LinearHead(NamedTuple):
    """A head that is a matrix product and nothing else, logits = states · weightᵀ + bias."""

    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None = None
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = nn.functional.linear
    """x, weight, bias → x · weightᵀ + bias, [n, K], [N, K], [N] → [n, N], for any strides; needs no gradient."""


def linear_logprobs(
    hidden: Float[Tensor, "N D"],
    head: LinearHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float,
    chunk_size: int = 128,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """``selected_logprobs`` of a linear head, with one tensor of a chunk's logits for each of forward and backward.

    The gradient of the weights is accumulated in one tensor. Unless entropy is requested, the backward pass starts from
    the last chunk's probabilities, which the forward pass kept, and recomputes the logits of the others. The dtypes are
    those that autocast would choose.

    Args:
        hidden: hidden state that each target was sampled from, whichever rows they belong to.
        targets: token ids.
        temperature: as in ``logprobs_from_logits``.
    """
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    how = _How(head.multiply, dtype, temperature, chunk_size, with_entropy, keeps_last=learns and not with_entropy)
    return _OfLinear.apply(hidden, head.weight, head.bias, targets, how)


class _How(NamedTuple):
    """The options of ``linear_logprobs``."""

    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    dtype: torch.dtype
    """Dtype of the matrix products."""
    temperature: float
    chunk_size: int
    with_entropy: bool
    keeps_last: bool
    """Whether the probabilities of the last chunk are kept for the backward pass."""

    def scaled(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """z = logits / temperature of some tokens, in float32 or float64: a new tensor."""
        z = wide(self.multiply(rows, weight, bias))
        return z if self.temperature == 1 else z.div_(self.temperature)


class _OfLinear(torch.autograd.Function):
    """``linear_logprobs``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor | None]:
        ctx.how, ctx.kept = how, None
        logprobs, log_sums = (hidden.new_empty(len(hidden), dtype=_sum_type(how)) for _ in range(2))
        entropy = torch.empty_like(logprobs) if how.with_entropy else None
        with torch.autocast(hidden.device.type, enabled=False):
            rows, columns, shift = (None if x is None else x.to(how.dtype) for x in (hidden, weight, bias))
            for chunk in _even_chunks(len(hidden), how.chunk_size):
                z = how.scaled(rows[chunk], columns, shift)
                highest = z.amax(dim=-1, keepdim=True)
                chosen = z.sub_(highest).gather(-1, targets[chunk].unsqueeze(-1)).squeeze(-1)
                # A probability of 0 times −∞ would be NaN; the clamp makes it 0.
                odds = z.clamp_(min=torch.finfo(z.dtype).min).exp() if how.with_entropy else z.exp_()
                total = odds.sum(dim=-1)
                if how.with_entropy:
                    entropy[chunk] = total.log() - odds.mul_(z).sum(dim=-1) / total
                elif how.keeps_last and chunk.stop == len(hidden):
                    ctx.kept = odds.div_(total.unsqueeze(-1))
                logprobs[chunk] = chosen - total.log()
                log_sums[chunk] = highest.squeeze(-1) + total.log()
                del z, odds  # before the next chunk's logits exist
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if of_logprobs is None and of_entropy is None:
            return None, None, None, None, None
        hidden, weight, bias, targets, log_sums, entropy = ctx.saved_tensors
        how: _How = ctx.how
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(bias) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            rows, columns, shift = (None if x is None else x.to(how.dtype) for x in (hidden, weight, bias))
            for chunk in reversed(_even_chunks(len(hidden), how.chunk_size)):
                probs, ctx.kept, factors = ctx.kept, None, None  # overwritten: there is only one first backward pass
                if probs is None:
                    z = how.scaled(rows[chunk], columns, shift).sub_(log_sums[chunk].unsqueeze(-1))
                    if of_entropy is None:
                        probs = z.exp_()
                    else:
                        probs = z.clamp_(min=torch.finfo(z.dtype).min).exp()
                        factors = z.add_(entropy[chunk].unsqueeze(-1)).mul_(-of_entropy[chunk].unsqueeze(-1))
                    del z
                of_chosen = None if of_logprobs is None else of_logprobs[chunk]
                grad = _gradient_over(probs, targets[chunk], of_chosen, factors).div_(how.temperature).to(how.dtype)
                del probs, factors
                if wants_hidden:
                    of_hidden[chunk] = how.multiply(grad, columns.t(), None)
                if wants_weight:
                    _add_product(of_weight, grad.t(), rows[chunk].t(), how.multiply)
                if wants_bias:
                    of_bias += grad.sum(dim=0)
                del grad  # before the next chunk's logits exist
        return of_hidden, of_weight, of_bias, None, None


def _sum_type(how: _How) -> torch.dtype:
    return torch.promote_types(how.dtype, torch.float32)


def _add_product(total: Tensor, x: Tensor, weight: Tensor, multiply: Callable[..., Tensor]) -> None:
    """total += x · weightᵀ, [N, K], [D, K] → [N, D]."""
    if total.dtype != x.dtype:
        total += multiply(x, weight, None)
    elif multiply is nn.functional.linear:
        total.addmm_(x, weight.t())
    else:
        step = max(1, SUMMED_AT_ONCE // total.shape[1])
        for rows in (slice(start, start + step) for start in range(0, len(total), step)):
            total[rows] += multiply(x[rows], weight, None)
