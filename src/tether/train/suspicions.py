"""Warnings of a run about itself, from the metrics of each update; ``report.health`` judges all updates together."""

from __future__ import annotations

from collections.abc import Mapping

from tether.config.schema import RunConfig
from tether.report.limits import LIMITS, LOGPROB_GAP, MOST_SHARE, STRETCH, forward_type, scores_alike


class Watch:
    """Watches the metrics of a run, one update after the other.

    Args:
        config: the run's configuration.
    """

    def __init__(self, config: RunConfig) -> None:
        model, train = config.model, config.train
        self._forward_type = forward_type(
            dtype=model.dtype, bf16=train.bf16, fp16=train.fp16, quantization=model.quantization
        )
        self._has_several = train.rollout_batch_size > 1
        self._with_vllm = config.sampling.vllm is not None
        self._has_gap = not (self._with_vllm and config.sampling.is_truncated)
        self._num_alike = 0
        """Number of consecutive updates, up to the last one, in which all answers got the same score."""

    def suspicions(self, metrics: Mapping[str, float]) -> list[str]:
        """The ``suspicions`` of the next update."""
        is_alike = scores_alike(metrics["objective/scores"], metrics["objective/scores_std"])
        self._num_alike = self._num_alike + 1 if is_alike and self._has_several else 0
        return suspicions(
            metrics,
            forward_type=self._forward_type,
            num_alike=self._num_alike,
            with_vllm=self._with_vllm,
            has_gap=self._has_gap,
        )


def suspicions(
    metrics: Mapping[str, float],
    *,
    forward_type: str,
    num_alike: int = 0,
    with_vllm: bool = False,
    has_gap: bool = True,
) -> list[str]:
    """Problems that an update's metrics show: the sampling policy differs from the one being trained, the policy always
    gives the same token or answer, all answers get the same score, or nothing was trained.

    Args:
        forward_type: key of ``LOGPROB_GAP``.
        num_alike: number of consecutive updates, up to this one, in which all answers got the same score.
        with_vllm: whether vLLM generates the answers.
        has_gap: whether ``rollout/logprob_gap`` is that of rounding alone.
    """
    found = []
    if num_alike >= STRETCH:
        found.append(
            f"all answers of an update had the same score, {STRETCH} updates in a row (objective/scores_std), so "
            "nothing is learned. Check the judge, its pattern or its column against the answers in samples.jsonl"
        )
    if metrics.get("val/first_ratio_error", 0.0) > LIMITS["val/first_ratio_error"].warn:
        found.append(
            "the policy ratio is not 1 before the first optimizer step of an update (val/first_ratio_error): scoring "
            "and training give different results with the same weights"
        )
    if has_gap and metrics.get("rollout/logprob_gap", 0.0) > LOGPROB_GAP[forward_type].act:
        differ, way_out = (
            ("vLLM's numbers for this model are not the policy's", "Leaving sampling.vllm out")
            if with_vllm
            else ("this model's cached decoding differs from its forward pass", "Another model.attn_implementation")
        )
        found.append(
            "answers are not sampled from the distribution that they are trained under (rollout/logprob_gap): "
            f"{differ}. {way_out} or train.bf16: false may bring them together"
        )
    if metrics.get("policy/num_overflows", 0.0) > 0 and metrics.get("update/num_steps") == 0:
        found.append(
            "no step of this update was taken: scaled gradients are not finite in float16 (policy/num_overflows). The "
            "scale is halved each time; if this continues, set train.fp16: false"
        )
    elif metrics.get("value/num_overflows", 0.0) > 0 and metrics.get("update/num_steps") == 0:
        found.append(
            "the critic took no step of this update: scaled gradients are not finite in float16 (value/num_overflows). "
            "The scale is halved each time; if this continues, set train.fp16: false, or bring the scores to a smaller "
            "scale (ppo.score_norm, ppo.reward_clip)"
        )
    if metrics.get("update/num_empty", 0.0) > 0 and metrics.get("update/num_steps") == 0:
        found.append(
            "no step of this update was taken: none of its answers ended within sampling.response_length, and "
            "ppo.mask_truncated leaves such answers out (update/num_empty). If this continues, set a larger "
            "sampling.response_length, or ppo.mask_truncated: false"
        )
    if metrics.get("rollout/top_token_share", 0.0) > MOST_SHARE and _could_say_more(metrics):
        found.append(
            "nearly all tokens of the policy's answers are the same (rollout/top_token_share): it has collapsed. "
            "Return to an earlier checkpoint, and raise ppo.kl_coef or lower train.learning_rate"
        )
    elif metrics.get("rollout/top_answer_share", 0.0) > MOST_SHARE and _could_say_more(metrics):
        found.append(
            "the policy nearly always gives the same answer (rollout/top_answer_share): unless the prompts leave no "
            "other, it has collapsed. Raise ppo.kl_coef"
        )
    return found


def _could_say_more(metrics: Mapping[str, float]) -> bool:
    """Whether the policy could have said more: single-token answers ended by themselves, not because
    ``sampling.response_length`` is 1."""
    return metrics["rollout/length_max"] > 1 or metrics["rollout/eos_rate"] == 1
