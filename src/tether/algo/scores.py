"""How a score is changed before it becomes a reward."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algo.masking import WHITEN_EPSILON, wide


def missing_eos_scores(
    scores: Float[Tensor, " B"], ended: Bool[Tensor, " B"], *, penalty: float | None, replacement: float | None
) -> Float[Tensor, " B"]:
    """Scores after the rule for answers that did not end by themselves.

        s'_i = s_i                    if the answer ended, or neither rule is set
        s'_i = s_i − penalty          otherwise, if ``penalty`` is set
        s'_i = replacement            otherwise, if ``replacement`` is set

    Args:
        ended: True where the response's last token is a stop token. Judged on the response alone: an end token inside
            the query does not count.
        penalty: amount subtracted, at least 0; at most one of the two is set.
        replacement: score given to every answer that did not end.

    Source: ``missing_eos_penalty`` of TRL (subtracted); Ziegler et al. 2019, section 3.1.2 (a fixed score),
        https://arxiv.org/abs/1909.08593
    """
    assert penalty is None or replacement is None
    if replacement is not None:
        return torch.where(ended, scores, torch.full_like(scores, replacement))
    return torch.where(ended, scores, scores - (penalty or 0.0))


def overlong_penalties(lengths: Int[Tensor, " B"], *, max_length: int, buffer: int) -> Float[Tensor, " B"]:
    """The penalty of each answer for approaching the maximum length: from 0 down to −1 over the last tokens.

        p = 0                                    l ≤ max_length − buffer
        p = (max_length − buffer − l) / buffer   between
        p = −1                                   l ≥ max_length

    Args:
        lengths: l, response tokens.
        buffer: tokens over which the penalty grows, from 1 to ``max_length``.

    Source: Yu et al. 2025, eq. 13, https://arxiv.org/abs/2503.14476
    """
    assert 0 < buffer <= max_length
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class ScoreMoments:
    """Count, mean and biased variance of the scores seen so far; without arguments, of no scores."""

    count: float = 0.0
    mean: float = 0.0
    var: float = 0.0


def merged_moments(moments: ScoreMoments, scores: Float[Tensor, " B"]) -> ScoreMoments:
    """The moments of the scores so far and the new ones together, in float64, independent of how they are split.

        n = n_a + n_b
        δ = mean_b − mean_a
        mean = mean_a + δ n_b / n
        var = (n_a var_a + n_b var_b + δ² n_a n_b / n) / n

    Args:
        moments: a, the moments of the scores so far.
        scores: b, the new scores; finite.

    Source: Chan et al. 1983, https://doi.org/10.1080/00031305.1983.10483115
    """
    values = scores.tolist()
    if not values:
        return moments
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    count = moments.count + len(values)
    gap = mean - moments.mean
    squares += moments.count * moments.var + gap**2 * moments.count * len(values) / count
    return ScoreMoments(count, moments.mean + gap * len(values) / count, squares / count)


def normalised_scores(scores: Float[Tensor, " B"], moments: ScoreMoments) -> Float[Tensor, " B"]:
    """Scores in standard deviations from the mean of ``moments``, in float32 or wider.

        s'_i = (s_i − mean) / √(var + 1e-8)

    Args:
        moments: those of the reference's scores, frozen, or of all scores so far. Not those of the batch: as its spread
            falls, the reward would gain weight against the KL.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593
    """
    return (wide(scores) - moments.mean) / score_std(moments)


def score_std(moments: ScoreMoments) -> float:
    """The divisor of ``normalised_scores``: √(var + 1e-8)."""
    return math.sqrt(moments.var + WHITEN_EPSILON)


def whitening_scale(var: float) -> float:
    """The standard deviation that whitening divides by; 1 if there is no spread, and thus no scale.

        S = √(var + 1e-8)    if var > 1e-8
        S = 1                otherwise
    """
    return math.sqrt(var + WHITEN_EPSILON) if var > WHITEN_EPSILON else 1.0


def score_scale(
    *, weight: float, norm: tuple[float, float] | None, beside: float, moments: ScoreMoments | None
) -> tuple[float, float]:
    """Slope and shift that turn the score of one source into the one trained on, with the other sources at their mean.

        slope = w / (σ S)
        shift = (−w μ / σ + b − M) / S

    Clips, and rules for ends and lengths, are left out.

    Args:
        weight: w, the weight of the source.
        norm: μ and σ, mean and standard deviation that its scores are normalized by; None: 0 and 1.
        beside: b, mean contribution of the other sources together.
        moments: of the sum of all sources, which is normalized by their mean M and by S, ``whitening_scale`` of their
            variance; None: 0 and 1.
    """
    mean, std = norm or (0.0, 1.0)
    total_mean, total_std = (0.0, 1.0) if moments is None else (moments.mean, whitening_scale(moments.var))
    return weight / (std * total_std), (beside - weight * mean / std - total_mean) / total_std
