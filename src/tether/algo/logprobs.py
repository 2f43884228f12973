"""Log-probabilities and entropy of chosen tokens, without ever holding the logits of all of them."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tether.algo.masking import wide


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
    scaled = wide(logits) / temperature
    normaliser = scaled.logsumexp(dim=-1)
    logprobs = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
    if not with_entropy:
        return logprobs, None
    all_logprobs = scaled - normaliser.unsqueeze(-1)
    # A probability of 0 times −∞ would be NaN, in the gradient too; the clamp makes it 0.
    finite = all_logprobs.clamp(min=torch.finfo(scaled.dtype).min)
    return logprobs, -(all_logprobs.exp() * finite).sum(dim=-1)


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
