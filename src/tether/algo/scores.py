"""What becomes of a score before it is a reward."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def missing_eos_scores(
    scores: Float[Tensor, " B"], ended: Bool[Tensor, " B"], *, penalty: float | None, replacement: float | None
) -> Float[Tensor, " B"]:
    """Scores with the rule for answers that did not end by themselves.

        s'_i = s_i                    if the answer ended, or neither rule is set
        s'_i = s_i − penalty          otherwise, if ``penalty`` is set
        s'_i = replacement            otherwise, if ``replacement`` is set

    Args:
        ended: True where the response's last token is a stop token. Judged on the response alone: an end token inside
            the query does not count.
        penalty: subtracted, at least 0; at most one of the two is set.
        replacement: the score of every answer that did not end.

    Source: ``missing_eos_penalty`` of TRL (subtracted); Ziegler et al. 2019, section 3.1.2 (a fixed score),
        https://arxiv.org/abs/1909.08593
    """
    assert penalty is None or replacement is None
    if replacement is not None:
        return torch.where(ended, scores, torch.full_like(scores, replacement))
    return torch.where(ended, scores, scores - (penalty or 0.0))
