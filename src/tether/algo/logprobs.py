"""Log-probabilities and entropy of chosen tokens, without ever holding the logits of all of them."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tether.algo.masking import wide

LOGITS_AT_ONCE = 2**24
"""Logits of a chunk that are few enough for memory, 64 MiB, and enough for products of matrices to be fast.

Not fewer: tensors of up to 32 MiB come from glibc's heap, where one seldom fits into the place of another, and a pass
over many chunks then takes as much memory as all logits at once.
"""


def logprobs_from_logits(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], *, temperature: float, with_entropy: bool = False
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """The log-probability of each target and, if wanted, the entropy of the distribution it was drawn from, in nats.

        z = logits / temperature
        log π(v) = z_v − log Σ_u exp z_u
        H = −Σ_u π(u) log π(u)

    Computed in float32, or float64 if the logits are. A logit of −∞ is a token of probability 0.

    Args:
        temperature: above 0; the one that the targets were sampled with.
    """
    return _FromLogits.apply(logits, targets, temperature, with_entropy)


class _FromLogits(torch.autograd.Function):
    """``logprobs_from_logits``, and its gradient with the logarithms of all probabilities as the one large tensor kept.

        ∂ log π(y) / ∂z_v = [v = y] − π_v        ∂H / ∂z_v = −π_v (log π_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        scaled = wide(logits)
        all_logprobs = (scaled if temperature == 1 else scaled / temperature).log_softmax(dim=-1)
        logprobs, entropy = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), None
        # A probability of 0 times −∞ would be NaN, in the gradient too; the clamp makes it 0.
        all_logprobs.clamp_(min=torch.finfo(all_logprobs.dtype).min)
        if with_entropy:
            entropy = all_logprobs.exp().mul_(all_logprobs).sum(dim=-1).neg_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(all_logprobs, targets, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        all_logprobs, targets, entropy = ctx.saved_tensors
        if of_logprobs is None and of_entropy is None:
            return None, None, None, None
        grad = all_logprobs.exp()
        if of_entropy is None:
            grad.mul_(-of_logprobs.unsqueeze(-1))
        else:
            factors = (all_logprobs + entropy.unsqueeze(-1)).mul_(-of_entropy.unsqueeze(-1))
            grad.mul_(factors if of_logprobs is None else factors.sub_(of_logprobs.unsqueeze(-1)))
        if of_logprobs is not None:
            grad.scatter_add_(-1, targets.unsqueeze(-1), of_logprobs.unsqueeze(-1))
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None


def selected_logprobs(
    hidden: Float[Tensor, "N D"],
    head: Callable[[Tensor], Tensor],
    targets: Int[Tensor, " N"],
    *,
    temperature: float,
    chunk_size: int = 128,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """``logprobs_from_logits`` of ``head(hidden)``, with the logits of ``chunk_size`` tokens in memory at a time.

    The backward pass computes each chunk's logits again, so that neither pass holds [N, V].

    Args:
        hidden: the state that each target was sampled in, whatever the rows they come from.
        head: hidden states → logits, [n, D] → [n, V], everything the model does to its logits included.
        targets: token ids.
        temperature: as in ``logprobs_from_logits``.
    """

    def of_chunk(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return logprobs_from_logits(head(rows), ids, temperature=temperature, with_entropy=with_entropy)

    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    outputs = [checkpoint(of_chunk, rows, ids, use_reentrant=False) for rows, ids in chunks]
    logprobs = torch.cat([logprobs for logprobs, _ in outputs])
    return logprobs, torch.cat([entropy for _, entropy in outputs]) if with_entropy else None
