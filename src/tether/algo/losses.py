"""Per-token losses of policy and critic, and statistics of how far an update has moved.

Losses are not reduced here, but by ``reduction``, over all micro-batches of an optimizer step.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.masking import wide


def ratio(new_logprobs: Float[Tensor, "B R"], logprobs: Float[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """How much more likely each token is under the new policy: ρ = exp(log π_new − log π_old), in float32 or wider.

    The difference is clamped to ±20, beyond anything that an update should reach, so that ρ stays finite.
    """
    return (wide(new_logprobs) - wide(logprobs)).clamp(-20, 20).exp()


def policy_loss(
    new_logprobs: Float[Tensor, "B R"],
    logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> Float[Tensor, "B R"]:
    """The clipped surrogate objective of each token, negated to be minimized, in float32 or wider.

        ρ = exp(log π_new − log π_old)
        L = max(−A ρ, −A clip(ρ, 1 − ε, 1 + ε_high))    ε = cliprange
        L = min(L, −A dual_clip)                        where A < 0, if ``dual_clip`` is set

    Its gradient is 0 where A > 0 and ρ > 1 + ε_high, where A < 0 and ρ < 1 − ε, and where A < 0 and ρ > dual_clip.

    Args:
        cliprange_high: ε_high, the clip range upwards. Default: ``cliprange``.
        dual_clip: the ratio beyond which a token with A < 0 no longer moves the policy; above 1.

    Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; ε_high: Yu et al. 2025, eq. 10,
        https://arxiv.org/abs/2503.14476; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729
    """
    rho, advantages = ratio(new_logprobs, logprobs), wide(advantages)
    high = cliprange if cliprange_high is None else cliprange_high
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(1 - cliprange, 1 + high))
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def importance_weights(
    logprobs: Float[Tensor, "B R"], rollout_logprobs: Float[Tensor, "B R"], *, cap: float
) -> Float[Tensor, "B R"]:
    """The weight of each token's policy loss if another engine drew it, in float32 or wider.

        w = min(exp(log π_old − log π_rollout), cap)

    In expectation over tokens of π_rollout, weighted losses are those over tokens of π_old wherever w is below the cap.

    Args:
        logprobs: log π_old, by the forward pass that is trained through.
        rollout_logprobs: log π_rollout, of the distribution that the token was drawn from.
        cap: at least 1.

    Source: Yao et al. 2025, truncated importance sampling, https://fengyao.notion.site/off-policy-rl
    """
    return ratio(logprobs, rollout_logprobs).clamp(max=cap)


def clipped_sides(
    new_logprobs: Float[Tensor, "B R"],
    logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    *,
    cliprange: float,
    cliprange_high: float | None = None,
) -> tuple[Bool[Tensor, "B R"], Bool[Tensor, "B R"]]:
    """Where ``policy_loss`` is clipped, on the low and on the high side: tokens that no longer move the policy.

        low:   A < 0 and ρ < 1 − cliprange
        high:  A > 0 and ρ > 1 + cliprange_high

    Args:
        cliprange_high: upper clip range. Default: ``cliprange``.

    Source: as ``policy_loss``
    """
    rho = ratio(new_logprobs, logprobs)
    high = cliprange if cliprange_high is None else cliprange_high
    return (advantages < 0) & (rho < 1 - cliprange), (advantages > 0) & (rho > 1 + high)


def dual_clipped(
    new_logprobs: Float[Tensor, "B R"],
    logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    *,
    dual_clip: float,
) -> Bool[Tensor, "B R"]:
    """True where the dual clip of ``policy_loss`` applies: A < 0 and ρ > dual_clip.

    Source: as ``policy_loss``
    """
    return (advantages < 0) & (ratio(new_logprobs, logprobs) > dual_clip)


def value_loss(
    new_values: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    returns: Float[Tensor, "B R"],
    *,
    cliprange_value: float | None,
) -> Float[Tensor, "B R"]:
    """Half the squared error of each value, the larger of unclipped and clipped, in float32 or wider.

        V_clip = clip(V_new, V_old − ε, V_old + ε)       ε = cliprange_value
        L = ½ max((V_new − G)², (V_clip − G)²)           or ½ (V_new − G)² if cliprange_value is None

    Source: Schulman et al. 2017, eq. 9, https://arxiv.org/abs/1707.06347, for the squared error; the clip is that of
        its published code (Huang et al. 2022, detail 9, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details)
    """
    plain, limited = _value_branches(new_values, values, returns, cliprange_value)
    return torch.maximum(plain, limited) / 2


def value_clipped(
    new_values: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    returns: Float[Tensor, "B R"],
    *,
    cliprange_value: float | None,
) -> Bool[Tensor, "B R"]:
    """True where the clipped branch of ``value_loss`` is larger; nowhere if ``cliprange_value`` is None."""
    plain, limited = _value_branches(new_values, values, returns, cliprange_value)
    return limited > plain


def _value_branches(
    new_values: Tensor, values: Tensor, returns: Tensor, cliprange_value: float | None
) -> tuple[Tensor, Tensor]:
    new_values, values, returns = wide(new_values), wide(values), wide(returns)
    plain = (new_values - returns).square()
    if cliprange_value is None:
        return plain, plain
    near = new_values.clamp(values - cliprange_value, values + cliprange_value)
    return plain, (near - returns).square()
