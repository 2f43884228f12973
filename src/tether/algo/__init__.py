"""The algorithm as pure tensor functions. Imports torch and jaxtyping only."""

from tether.algo.advantages import gae, token_rewards
from tether.algo.kl import adaptive_kl_coef, kl_estimate
from tether.algo.logprobs import logprobs_from_logits, selected_logprobs
from tether.algo.losses import approx_kl, clipped, policy_loss, ratio, value_clipped, value_loss
from tether.algo.masking import length_mask, masked_mean, masked_sum, masked_var, whiten
from tether.algo.scores import missing_eos_scores

__all__ = [
    "adaptive_kl_coef",
    "approx_kl",
    "clipped",
    "gae",
    "kl_estimate",
    "length_mask",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "missing_eos_scores",
    "policy_loss",
    "ratio",
    "selected_logprobs",
    "token_rewards",
    "value_clipped",
    "value_loss",
    "whiten",
]
