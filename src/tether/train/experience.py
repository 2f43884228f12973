"""Turns model outputs and scores of a rollout batch into what the update needs for each micro-batch.

Advantages are computed over the whole batch at once, [B, R] in rollout order, so that they do not depend on the
micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether import algo
from tether.config.schema import PPOConfig, RunConfig
from tether.data.collate import pad_numbers
from tether.machine.distributed import Dist
from tether.types import Completion, Experience, MicroBatch


@dataclass(frozen=True)
class Outputs:
    """Model outputs for B rollouts, [B, R], 0 outside ``mask``."""

    mask: Bool[Tensor, "B R"]
    """True on response tokens."""
    logprobs: Float[Tensor, "B R"]
    """log π_old of each response token."""
    entropy: Float[Tensor, "B R"]
    """Entropy of the distribution that each response token was drawn from, in nats."""
    values: Float[Tensor, "B R"] | None
    """Value of the state in which each response token was sampled; None without a critic."""
    ref_logprobs: Float[Tensor, "B R"] | None
    """log π_ref of each response token; None without a reference."""

    def kl(self, estimator: str) -> Float[Tensor, "B R"]:
        """Estimate of KL(π_old ‖ π_ref) of each response token; zeros without a reference."""
        if self.ref_logprobs is None:
            return torch.zeros_like(self.logprobs)
        return algo.kl_estimate(self.logprobs, self.ref_logprobs, estimator)


@dataclass(frozen=True)
class Targets:
    """Training targets of the update, [B, R]."""

    advantages: Float[Tensor, "B R"]
    """Advantages, whitened and clipped as configured."""
    advantage_std: float
    """The divisor used in whitening; 1 without it."""
    returns: Float[Tensor, "B R"] | None
    """Targets of the critic; None without one."""


def told_logprobs(
    completions: Sequence[Completion], mask: Bool[Tensor, "B R"]
) -> tuple[Float[Tensor, "B R"], Bool[Tensor, "B R"]]:
    """What generation told of the log-probability of each response token, and where it told something.

    Args:
        mask: True on response tokens.
    """
    told = [completion.logprobs or [] for completion in completions]
    lengths = torch.tensor([len(row) for row in told])
    width = mask.shape[1]
    return pad_numbers(told, width).to(mask.device), algo.length_mask(lengths, width).to(mask.device)


def importance(
    outputs: Outputs, completions: Sequence[Completion], cap: float | None
) -> Float[Tensor, "B R"] | None:
    """The importance weight of each response token, 1 where generation told no log-probability; None without a cap."""
    if cap is None:
        return None
    sampled, told = told_logprobs(completions, outputs.mask)
    weights = algo.importance_weights(outputs.logprobs, sampled, cap=cap)
    return torch.where(told, weights, torch.ones_like(weights))


def targets(
    outputs: Outputs,
    scores: Float[Tensor, " B"],
    loss_mask: Bool[Tensor, "B R"],
    config: RunConfig,
    *,
    kl_coef: float,
    early_scores: Sequence[Sequence[float]] | None = None,
) -> Targets:
    """Advantages and returns of a rollout batch by the configured estimator.

        r = token_rewards(score, KL)     −β·KL on every token, and the score on the last one
        r = whiten(r)                    if ``whiten_rewards``; the mean is kept
        A, G = gae(r, V)                 or another estimator, which needs no V and gives no G
        A = whiten(A)                    if ``whitens_advantages``
        A = clip(A)                      to ±``advantage_clip``, if that is set

    Args:
        scores: of each answer, with all rules applied.
        loss_mask: True on the tokens that take part in the losses; whitening is over these tokens.
        kl_coef: current KL coefficient.
        early_scores: see ``Judged.early_scores``.
    """
    mask, ppo, num_generations = outputs.mask, config.ppo, config.sampling.num_generations
    coef = kl_coef if ppo.kl_in == "reward" else 0.0
    kl = outputs.kl(ppo.kl_estimator)
    returns = None
    if ppo.advantage_estimator == "grpo":  # normalizes scores but not the KL
        judged = algo.token_rewards(scores, kl, mask, kl_coef=0.0)
        advantages = algo.grpo(judged, mask, num_generations=num_generations, penalties=-coef * kl)
    else:
        early = None
        if early_scores is not None:
            early = pad_numbers(early_scores, mask.shape[1], scores.dtype).to(scores.device)
        rewards = algo.token_rewards(scores, kl, mask, kl_coef=coef, token_scores=early)
        if ppo.whiten_rewards:
            rewards = algo.whiten(rewards, mask, keep_mean=True)
        match ppo.advantage_estimator:
            case "gae":
                advantages, returns = _generalized(rewards, outputs.values, mask, ppo)
            case "rloo":
                advantages = algo.rloo(rewards, mask, num_generations=num_generations)
            case "reinforce_pp":
                advantages = algo.reinforce_pp(rewards, mask, gamma=ppo.gamma)
    std = 1.0
    if ppo.whitens_advantages and bool(loss_mask.any()):
        std = algo.whitening_scale(float(algo.masked_var(advantages, loss_mask)))
        advantages = algo.whiten(advantages, loss_mask, keep_mean=False)
    if ppo.advantage_clip is not None:
        advantages = advantages.clamp(-ppo.advantage_clip, ppo.advantage_clip)
    return Targets(advantages, std, returns)


def _generalized(rewards: Tensor, values: Tensor, mask: Tensor, ppo: PPOConfig) -> tuple[Tensor, Tensor]:
    """Advantages with the policy's λ and returns with the critic's."""
    lam = ppo.lam if ppo.lam_alpha is None else algo.length_adaptive_lam(mask.sum(dim=1), alpha=ppo.lam_alpha)
    advantages, returns = algo.gae(rewards, values, mask, gamma=ppo.gamma, lam=lam)
    if ppo.value_lam is not None or ppo.lam_alpha is not None:
        value_lam = ppo.lam if ppo.value_lam is None else ppo.value_lam
        _, returns = algo.gae(rewards, values, mask, gamma=ppo.gamma, lam=value_lam)
    return advantages, returns


def joined(
    parts: Sequence[Tensor | None], batches: Sequence[MicroBatch], shape: tuple[int, int], dist: Dist
) -> Tensor | None:
    """Joins the [M, R] tensors of all micro-batches of all processes into one [B, R]; None if there are none.

    Narrower tensors are padded with 0.

    Args:
        shape: B, and R of the widest.
    """
    if any(part is None for part in parts):
        return None
    whole = parts[0].new_zeros(shape)
    for part, batch in zip(parts, batches, strict=True):
        if not batch.is_idle:
            whole[list(batch.rows), : part.shape[1]] = part
    return dist.sum(whole)


def experience(
    batches: Sequence[MicroBatch],
    outputs: Outputs,
    learned: Targets,
    loss_mask: Bool[Tensor, "B R"],
    *,
    kl_loss_coef: float,
    weights: Float[Tensor, "B R"] | None,
    dist: Dist,
) -> list[Experience]:
    """Everything the update needs, one record for each of this process's micro-batches.

    Args:
        kl_loss_coef: coefficient of the KL in the loss; 0 if the KL is in the reward.
        weights: ``importance``.
    """

    def of(whole: Tensor | None, batch: MicroBatch) -> Tensor | None:
        return None if whole is None else whole[list(batch.rows), : batch.response_mask.shape[1]]

    own_masks = [of(loss_mask, batch) & (not batch.is_idle) for batch in batches]
    takes_part = dist.sum(torch.stack([mask.any() for mask in own_masks]).float()) > 0

    return [
        Experience(
            batch=batch,
            logprobs=of(outputs.logprobs, batch),
            advantages=of(learned.advantages, batch),
            loss_mask=own_mask,
            values=of(outputs.values, batch),
            returns=of(learned.returns, batch),
            ref_logprobs=of(outputs.ref_logprobs, batch) if kl_loss_coef > 0 else None,
            importance=of(weights, batch),
            kl_loss_coef=kl_loss_coef / learned.advantage_std,
            takes_part=part,
        )
        for batch, own_mask, part in zip(batches, own_masks, takes_part.tolist(), strict=True)
    ]
