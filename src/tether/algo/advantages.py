"""From scores to token rewards to advantages."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algo.masking import masked_sum, wide

GROUP_EPSILON = 1e-4
"""Added to the standard deviation of the scores of a prompt's answers, so that equal scores give advantages of 0."""


def token_rewards(
    scores: Float[Tensor, " B"],
    kl: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    kl_coef: float,
    token_scores: Float[Tensor, "B R"] | None = None,
) -> Float[Tensor, "B R"]:
    """The reward of each response token, 0 outside ``mask``.

        r_t = −kl_coef · kl_t + s_t                       before the last response token
        r_T = −kl_coef · kl_T + score − Σ_{t<T} s_t       on it, which is the action that ended the text

    The rewards of an answer thus add up to its score and the KL penalty, wherever its judge places the score.

    Args:
        kl: per-token estimate of KL(π_old ‖ ref).
        mask: True on response tokens, the end-of-sequence token included.
        token_scores: s, the part of the score assigned to each token; the entry of the last token is not read. None:
            0.

    Source: Stiennon et al. 2020, section 3.4, https://arxiv.org/abs/2009.01325
    """
    is_last = mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
    rewards = torch.where(mask, -kl_coef * wide(kl), 0.0)
    if token_scores is not None:
        early = torch.where(mask & ~is_last, wide(token_scores), 0.0)
        rewards, scores = rewards + early, scores - early.sum(dim=1)
    return torch.where(is_last, rewards + scores.unsqueeze(1), rewards)


def gae(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " B"],
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Generalized advantage estimation over right-padded responses that end inside the batch, in float32 or wider.

        δ_t = r_t + γ V_{t+1} − V_t
        A_t = δ_t + γ λ A_{t+1}
        G_t = A_t + V_t              with V_t = A_t = 0 past the last response token

    Args:
        values: value of the state each response token was sampled in, from the rollout.
        mask: True on response tokens, the end-of-sequence token included.
        lam: λ, one for all answers or one per answer.

    Returns:
        Advantages and returns, 0 outside ``mask``.

    Source: Schulman et al. 2016, eq. 11 and 16, https://arxiv.org/abs/1506.02438
    """
    rewards, values = (torch.where(mask, wide(x), 0.0) for x in (rewards, values))
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * next_values - values
    decay = (gamma * lam).cpu() if isinstance(lam, Tensor) else gamma * lam
    columns = list(deltas.cpu().unbind(dim=1))  # an accelerator takes longer to begin an operation than this loop
    for t in reversed(range(len(columns) - 1)):
        columns[t] = columns[t] + decay * columns[t + 1]
    advantages = torch.stack(columns, dim=1).to(deltas.device)
    return advantages, advantages + values


def length_adaptive_lam(lengths: Int[Tensor, " B"], *, alpha: float) -> Float[Tensor, " B"]:
    """The λ of each answer for which the weights of its TD errors add up to ``alpha`` times its length.

        λ = max(0, 1 − 1 / (α l))        as Σ_k λ^k = 1 / (1 − λ) = α l

    Args:
        lengths: l, response tokens.
        alpha: α, above 0.

    Source: Yue et al. 2025, section 4.2, https://arxiv.org/abs/2504.05118
    """
    return (1 - 1 / (alpha * lengths)).clamp(min=0.0)


def rloo(
    rewards: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, num_generations: int
) -> Float[Tensor, "B R"]:
    """Each answer's return minus the mean return of the other answers to its prompt, on every token, 0 outside
    ``mask``.

        R_i = Σ_t r_it
        A_it = R_i − Σ_{j≠i} R_j / (n − 1)        over the n answers to the prompt of i

    Args:
        mask: True on response tokens, the end-of-sequence token included.
        num_generations: n, at least 2. The rows of a prompt are adjacent.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
    """
    assert num_generations > 1
    gaps = _return_gaps(rewards, mask, num_generations)
    return _on_tokens(gaps.sum(dim=2) / (num_generations - 1), mask)


def grpo(
    rewards: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    num_generations: int,
    penalties: Float[Tensor, "B R"] | None = None,
) -> Float[Tensor, "B R"]:
    """Each answer's score minus its prompt's mean, in standard deviations of that prompt's scores, on every token, 0
    outside ``mask``.

        R_i = Σ_t r_it,  P_i = Σ_t p_it
        A_it = (R_i − mean R) / (std R + 1e-4) + P_i − mean P        over the n answers to the prompt of i

    The std is the sample standard deviation: the sum of squares is divided by n − 1. Dividing by it weights each prompt
    by the inverse of the spread of its scores: unlike with ``rloo``, the expected gradient is not that of the mean
    return.

    The penalty −β·kl is added to the normalized score, as in the source, where it is in the loss. It is not normalized
    itself: answers with equal scores differ only by their KL, whose noise, divided by its own std, would weigh as much
    as any score, whatever β is.

    Args:
        rewards: r, from the judge alone.
        mask: True on response tokens, the end-of-sequence token included.
        num_generations: n, at least 2. The rows of a prompt are adjacent.
        penalties: p, added to the rewards without normalization. None: 0.

    Source: Shao et al. 2024, eq. 3 and section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    assert num_generations > 1
    centred = _return_gaps(rewards, mask, num_generations).sum(dim=2) / num_generations
    std = (centred.square().sum(dim=1, keepdim=True) / (num_generations - 1)).sqrt()
    advantages = centred / (std + GROUP_EPSILON)
    if penalties is not None:
        advantages = advantages + _return_gaps(penalties, mask, num_generations).sum(dim=2) / num_generations
    return _on_tokens(advantages, mask)


def equal_groups(scores: Float[Tensor, " B"], *, num_generations: int) -> Bool[Tensor, " G"]:
    """Whether the answers to a prompt all score the same, so that nothing is learned from their scores.

    Args:
        num_generations: number of answers per prompt; their rows are adjacent.
    """
    groups = scores.reshape(-1, num_generations)
    return (groups == groups[:, :1]).all(dim=1)


def reinforce_pp(rewards: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, gamma: float) -> Float[Tensor, "B R"]:
    """The return from each token onwards, 0 outside ``mask``; REINFORCE++ whitens it over the whole batch.

        A_t = r_t + γ A_{t+1}        with A_t = 0 past the last response token

    Args:
        mask: True on response tokens, the end-of-sequence token included.

    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262
    """
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return advantages


def _return_gaps(
    rewards: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], num_generations: int
) -> Float[Tensor, "G n n"]:
    """R_i − R_j for every pair of answers to the same prompt: exactly 0 where they are equal."""
    returns = masked_sum(wide(rewards), mask, dim=1).reshape(-1, num_generations)
    return returns.unsqueeze(2) - returns.unsqueeze(1)


def _on_tokens(advantages: Float[Tensor, "G n"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    return torch.where(mask, advantages.reshape(-1, 1), 0.0)
