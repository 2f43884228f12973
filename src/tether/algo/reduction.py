"""From per-token losses to the loss of an optimizer step, in parts whose sum does not depend on the micro-batches.

    loss = Σ reduced / Σ normaliser        both sums over the micro-batches of the step, on all ranks
"""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.masking import masked_sum, wide

LossReduction = Literal["token_mean", "sequence_mean", "fixed_length"]
"""Weight of a token: the same everywhere, one over the length of its answer, or one over a fixed length."""


def reduced(
    losses: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, how: LossReduction
) -> Float[Tensor, ""]:
    """A micro-batch's part of the numerator of the loss, in float32 or wider.

        token_mean       Σ_i Σ_t l_it
        sequence_mean    Σ_i (Σ_t l_it) / n_i        n_i response tokens of answer i
        fixed_length     Σ_i Σ_t l_it

    Args:
        mask: True on the response tokens that take part. An answer without any adds 0.

    Source: ``sequence_mean`` Shao et al. 2024, eq. 3, https://arxiv.org/abs/2402.03300; ``token_mean`` Yu et al. 2025,
        eq. 12, https://arxiv.org/abs/2503.14476; ``fixed_length`` Liu et al. 2025, section 3.2,
        https://arxiv.org/abs/2503.20783
    """
    sums = masked_sum(wide(losses), mask, dim=1)
    if how == "sequence_mean":
        sums = sums / mask.sum(dim=1).clamp(min=1)
    return sums.sum()


def normaliser(mask: Bool[Tensor, "B R"], *, how: LossReduction, max_length: int) -> Float[Tensor, ""]:
    """A micro-batch's part of the denominator of the loss.

        token_mean       number of response tokens
        sequence_mean    number of answers
        fixed_length     number of answers · max_length

    Args:
        mask: True on the response tokens that take part. An answer without any is not counted.
        max_length: maximum number of tokens in a response.
    """
    match how:
        case "token_mean":
            count = mask.sum()
        case "sequence_mean":
            count = mask.any(dim=1).sum()
        case "fixed_length":
            count = mask.any(dim=1).sum() * max_length
    return count.float()
