"""The algorithm as pure tensor functions. Imports torch and jaxtyping only."""

from tether.algo.advantages import equal_groups, gae, grpo, length_adaptive_lam, reinforce_pp, rloo, token_rewards
from tether.algo.kl import adaptive_kl_coef, approx_kl, kl_estimate, kl_loss
from tether.algo.logprobs import (
    LinearHead,
    linear_logprobs,
    logits_at_once,
    logprobs_from_logits,
    selected_logprobs,
)
from tether.algo.losses import (
    clipped_sides,
    dual_clipped,
    importance_weights,
    policy_loss,
    ratio,
    value_clipped,
    value_loss,
)
from tether.algo.masking import length_mask, masked_mean, masked_sum, masked_var, whiten
from tether.algo.reduction import LossReduction, normaliser, reduced
from tether.algo.scores import (
    ScoreMoments,
    merged_moments,
    missing_eos_scores,
    normalised_scores,
    overlong_penalties,
    score_scale,
    score_std,
    whitening_scale,
)

__all__ = [
    "LinearHead",
    "LossReduction",
    "ScoreMoments",
    "adaptive_kl_coef",
    "approx_kl",
    "clipped_sides",
    "dual_clipped",
    "equal_groups",
    "gae",
    "grpo",
    "importance_weights",
    "kl_estimate",
    "kl_loss",
    "length_adaptive_lam",
    "length_mask",
    "linear_logprobs",
    "logits_at_once",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "merged_moments",
    "missing_eos_scores",
    "normalised_scores",
    "normaliser",
    "overlong_penalties",
    "policy_loss",
    "ratio",
    "reduced",
    "reinforce_pp",
    "rloo",
    "score_scale",
    "score_std",
    "selected_logprobs",
    "token_rewards",
    "value_clipped",
    "value_loss",
    "whiten",
    "whitening_scale",
]
