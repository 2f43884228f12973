"""Estimates of the KL divergence to the reference, and the controller of its coefficient."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.masking import wide

MAX_ERROR = 0.2
"""Largest relative error that the adaptive controller acts on."""


def kl_estimate(
    logprobs: Float[Tensor, "B R"], ref_logprobs: Float[Tensor, "B R"], estimator: Literal["k1", "k2", "k3"]
) -> Float[Tensor, "B R"]:
    """Estimate of KL(π ‖ ref) from each token sampled by π, in nats, in float32 or wider.

        r = log ref − log π
        k1 = −r              unbiased, of either sign
        k2 = r² / 2          biased, at least 0
        k3 = exp r − 1 − r   unbiased, at least 0

    In the reward only k1 gives the gradient of the sequence KL; k2 and k3 are for looking at.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    log_ratio = wide(ref_logprobs) - wide(logprobs)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.expm1(log_ratio) - log_ratio


def adaptive_kl_coef(
    kl_coef: float, sequence_kl: float, *, target: float, horizon: int, num_episodes: int
) -> float:
    """The next KL coefficient: larger where the policy strayed further than ``target``, smaller where less far.

        e = clip(KL / target − 1, −0.2, 0.2)
        β' = β (1 + e · num_episodes / horizon)

    Args:
        kl_coef: β, the coefficient so far.
        sequence_kl: KL, mean over the rollouts since the last change, in nats a sequence.
        target: nats a sequence.
        horizon: episodes over which the coefficient reacts; more than a fifth of ``num_episodes``, or β' could be
            negative.
        num_episodes: rollouts since the last change.

    Source: Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593 (K_β is num_episodes / horizon here, as
        in the published code)
    """
    assert math.isfinite(sequence_kl)
    assert MAX_ERROR * num_episodes < horizon
    error = min(max(sequence_kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return kl_coef * (1 + error * num_episodes / horizon)
