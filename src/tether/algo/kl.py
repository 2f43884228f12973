"""Estimates of the KL divergence from the reference, and the controller of its coefficient."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.losses import ratio
from tether.algo.masking import wide

Estimator = Literal["k1", "k2", "k3"]
"""Estimator of the KL at a sampled token; ``kl_estimate`` has the formulas."""

MAX_ERROR = 0.2
"""Bound on the relative error that the adaptive controller acts on."""


def kl_estimate(
    logprobs: Float[Tensor, "B R"], ref_logprobs: Float[Tensor, "B R"], estimator: Estimator
) -> Float[Tensor, "B R"]:
    """Estimate of KL(π ‖ ref) from each token sampled by π, in nats, in float32 or wider.

        r = log ref − log π
        k1 = −r              unbiased, of either sign
        k2 = r² / 2          biased, at least 0
        k3 = exp r − 1 − r   unbiased, at least 0

    In the reward, only k1 gives the gradient of the sequence KL. For a KL in the loss, see ``kl_loss``.

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


def kl_loss(
    new_logprobs: Float[Tensor, "B R"],
    logprobs: Float[Tensor, "B R"],
    ref_logprobs: Float[Tensor, "B R"],
    estimator: Estimator,
) -> Float[Tensor, "B R"]:
    """KL(π_new ‖ ref) at each token as a loss, from tokens sampled by π_old, in nats, in float32 or wider.

        ρ = π_new / π_old
        L = ρ · k1(π_new, ref)           its mean over tokens is the KL, the gradient of its mean that of the KL
        L = ρ · k3(π_new, ref)           the same, with less variance
        L = stop(ρ) · k2(π_new, ref)     its gradient is that of k3, its mean is not the KL

    The KL is that of one token given those before it: a token's effect on the KL of later tokens has no gradient here.
    It has one if k1 is in the reward.

    Args:
        logprobs: log π_old, where π_old is the policy that sampled the tokens.

    Source: Liu et al. 2025, https://arxiv.org/abs/2510.01555
    """
    rho = ratio(new_logprobs, logprobs)
    return (rho.detach() if estimator == "k2" else rho) * kl_estimate(new_logprobs, ref_logprobs, estimator)


def approx_kl(new_logprobs: Float[Tensor, "B R"], logprobs: Float[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Estimate (k3) of KL(π_old ‖ π_new) from each token sampled by π_old, in nats: the drift within an update.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    return kl_estimate(logprobs, new_logprobs, "k3")


def adaptive_kl_coef(
    kl_coef: float, sequence_kl: float, *, target: float, horizon: int, num_episodes: int
) -> float:
    """The next KL coefficient: larger if the policy strayed further than ``target``, smaller if less.

        e = clip(KL / target − 1, −0.2, 0.2)
        β' = β (1 + e · num_episodes / horizon)

    Args:
        kl_coef: β, the coefficient so far.
        sequence_kl: KL, mean over the rollouts since the last change, in nats per sequence.
        target: target KL, in nats per sequence.
        horizon: episodes over which the coefficient reacts; more than a fifth of ``num_episodes``, as β' could be
            negative otherwise.
        num_episodes: rollouts since the last change.

    Source: Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593 (K_β is num_episodes / horizon here, as
        in the published code)
    """
    assert math.isfinite(sequence_kl)
    assert MAX_ERROR * num_episodes < horizon
    error = min(max(sequence_kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return kl_coef * (1 + error * num_episodes / horizon)
