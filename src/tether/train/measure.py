"""Metrics of an update. docs/metrics.md defines each of them by a formula. Names are those of TRL where it has one."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from tether import algo
from tether.config.schema import PPOConfig, RunConfig
from tether.metrics.reduce import Metrics
from tether.train.experience import Outputs, Targets, told_logprobs
from tether.train.rollout import Answers
from tether.types import Experience


def measure_answers(metrics: Metrics, answers: Answers) -> None:
    """Lengths and ends of a rollout batch, and the shares of its most frequent token and answer."""
    lengths, ended = answers.lengths.double(), answers.ended.double()
    metrics.mean("rollout/length", lengths)
    metrics.max("rollout/length_max", lengths)
    metrics.mean("rollout/eos_rate", ended)
    counts = Counter(token for completion in answers.completions for token in completion.token_ids)
    metrics.value("rollout/top_token_share", max(counts.values()) / counts.total())
    said = Counter(tuple(completion.token_ids) for completion in answers.completions)
    metrics.value("rollout/top_answer_share", max(said.values()) / said.total())
    metrics.sum("val/num_eos_tokens", ended)
    metrics.sum("tokens/rollout", lengths)


def measure_objective(
    metrics: Metrics,
    outputs: Outputs,
    scores: Tensor,
    answers: Answers,
    config: RunConfig,
    *,
    kl_coef: float,
) -> None:
    """The objective and its parts at rollout. ``scores`` is [B]."""
    mask, cap = outputs.mask, config.importance_cap
    penalty = -kl_coef * algo.masked_sum(outputs.kl(config.ppo.kl_estimator), mask, dim=1)
    if outputs.ref_logprobs is not None:
        metrics.mean("objective/kl", algo.masked_sum(outputs.kl("k1"), mask, dim=1))
        metrics.mean("objective/kl_k3", algo.masked_sum(outputs.kl("k3"), mask, dim=1))
    metrics.mean("objective/entropy", -algo.masked_sum(outputs.logprobs, mask, dim=1))
    metrics.mean("objective/non_score_reward", penalty)
    metrics.mean("objective/rlhf_reward", scores + penalty)
    if config.ppo.compares_answers:
        equal = algo.equal_groups(scores, num_generations=config.sampling.num_generations)
        metrics.mean("objective/equal_scores", equal.double())
    metrics.mean("policy/entropy_avg", outputs.entropy, mask)
    sampled, told = told_logprobs(answers.completions, mask)
    if told.any():
        metrics.mean("rollout/logprob_gap", (sampled - outputs.logprobs).abs(), told)
        if cap is not None:
            ratio = algo.ratio(outputs.logprobs, sampled)
            metrics.mean("rollout/importance_mean", ratio.clamp(max=cap), told)
            metrics.max("rollout/importance_max", ratio, told)
            metrics.mean("rollout/importance_capped", ratio > cap, told)


def measure_critic(metrics: Metrics, outputs: Outputs, learned: Targets) -> None:
    """How well the critic predicted the returns."""
    if outputs.values is not None:
        metrics.mean("val/values", outputs.values, outputs.mask)
        metrics.var("val/returns_var", learned.returns, outputs.mask)
        metrics.var("val/residual_var", learned.returns - outputs.values, outputs.mask)


def measure_policy(
    metrics: Metrics, new_logprobs: Tensor, old: Experience, ppo: PPOConfig, *, is_first: bool
) -> None:
    """How far the policy has moved from the sampling policy; exactly 0 at an update's first mini-batch.

    Args:
        new_logprobs: [M, R], detached.
        is_first: whether this is the update's first mini-batch.
    """
    mask = old.loss_mask
    ratio = algo.ratio(new_logprobs, old.logprobs)
    low, high = algo.clipped_sides(
        new_logprobs, old.logprobs, old.advantages, cliprange=ppo.cliprange, cliprange_high=ppo.cliprange_high
    )
    metrics.mean("policy/approxkl_avg", algo.approx_kl(new_logprobs, old.logprobs), mask)
    metrics.mean("policy/clipfrac_avg", low | high, mask)
    metrics.mean("policy/clipfrac_low", low, mask)
    metrics.mean("policy/clipfrac_high", high, mask)
    if ppo.dual_clip is not None:
        dual = algo.dual_clipped(new_logprobs, old.logprobs, old.advantages, dual_clip=ppo.dual_clip)
        metrics.mean("policy/dual_clipfrac", dual, mask)
    metrics.mean("val/ratio", ratio, mask)
    metrics.var("val/ratio_var", ratio, mask)
    metrics.max("val/ratio_max", ratio, mask)
    if is_first:
        metrics.max("val/first_ratio_error", (ratio - 1).abs(), mask)


def derived(values: dict[str, float]) -> dict[str, float]:
    """The same metrics, with variances replaced by the metrics derived from them."""
    values = dict(values)
    values["objective/scores_std"] = values.pop("objective/scores_var") ** 0.5
    if "val/returns_var" in values:
        returns_var, residual_var = values.pop("val/returns_var"), values.pop("val/residual_var")
        values["val/explained_variance"] = 1 - residual_var / returns_var if returns_var > 0 else 0.0
    return values
