"""From scores to token rewards to advantages."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.masking import wide


def token_rewards(
    scores: Float[Tensor, " B"], kl: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, kl_coef: float
) -> Float[Tensor, "B R"]:
    """The reward of each response token, 0 outside ``mask``.

        r_t = −kl_coef · kl_t            before the last response token
        r_T = −kl_coef · kl_T + score    on it, which is the action that ended the text

    Args:
        kl: per-token estimate of KL(π_old ‖ ref).
        mask: True on response tokens, the end-of-sequence token included.

    Source: Stiennon et al. 2020, section 3.4, https://arxiv.org/abs/2009.01325
    """
    is_last = mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
    penalty = torch.where(mask, -kl_coef * wide(kl), 0.0)
    return torch.where(is_last, penalty + scores.unsqueeze(1), penalty)


def gae(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Generalized advantage estimation over right-padded responses that end inside the batch, in float32 or wider.

        δ_t = r_t + γ V_{t+1} − V_t
        A_t = δ_t + γ λ A_{t+1}
        G_t = A_t + V_t              with V_t = A_t = 0 past the last response token

    Args:
        values: value of the state each response token was sampled in, from the rollout.
        mask: True on response tokens, the end-of-sequence token included.

    Returns:
        Advantages and returns, 0 outside ``mask``.

    Source: Schulman et al. 2016, eq. 11 and 16, https://arxiv.org/abs/1506.02438
    """
    rewards, values = (torch.where(mask, wide(x), 0.0) for x in (rewards, values))
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    return advantages, advantages + values
