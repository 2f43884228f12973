"""Healthy ranges of metrics: one table for the health check, the guides in curves, a run's own warnings, and the docs.

docs/metrics.md shows the same ranges by ``Limits.text``; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tether.report.text import number

STRETCH = 5
"""Number of consecutive updates that are judged together."""
KL_LENGTH = 50
"""Number of tokens in an answer up to which the limits of ``objective/kl`` hold; longer answers may spend the same per
token."""
LOW_EOS_RATE = 0.8
MOST_SHARE = 0.9
"""Share of one token among all tokens, and of one answer among all answers."""
MUCH_MISSING = 0.05
"""Share of answers without a score among all answers."""
GRADIENT_SPIKE = 5.0
"""Multiple of the median gradient norm."""
FEW_STEPS = 0.5
"""Share of an update's optimizer steps that are taken, if ``max_approx_kl`` or ``max_ratio`` may end it early."""
LEAST_PROMPTS = 8
"""Number of held-out prompts from which a change of the score can be told from noise."""
SAME_SCORE = 1e-6
"""Ratio of the scores' standard deviation to the magnitude of their mean up to which they differ only by rounding."""


@dataclass(frozen=True)
class Limits:
    """A usual range, and the values from which to watch and to act."""

    healthy: float
    warn: float
    act: float | None = None
    """None if no value alone is a reason to act."""

    @property
    def is_floor(self) -> bool:
        """Whether small values are the unhealthy ones."""
        return self.warn < self.healthy

    def level(self, value: float) -> str:
        """``ok``, ``warn`` or ``act``."""
        sign = -1 if self.is_floor else 1
        if self.act is not None and sign * value > sign * self.act:
            return "act"
        return "warn" if sign * value > sign * self.warn else "ok"

    def scaled(self, factor: float) -> Limits:
        """The same limits in another unit."""
        return Limits(factor * self.healthy, factor * self.warn, None if self.act is None else factor * self.act)

    def text(self, show: Callable[[float], str] = number) -> str:
        """The range in words, as part of a sentence."""
        within, beyond = ("from", "below") if self.is_floor else ("up to", "above")
        act = "" if self.act is None else f", act {beyond} {show(self.act)}"
        return f"healthy {within} {show(self.healthy)}, watch {beyond} {show(self.warn)}{act}"


LIMITS = {
    "objective/kl": Limits(10.0, 15.0, 25.0),
    "policy/approxkl_avg": Limits(1e-2, 2e-2, 5e-2),
    "policy/clipfrac_avg": Limits(0.1, 0.15, 0.3),
    "policy/dual_clipfrac": Limits(1e-3, 1e-2, 5e-2),
    "val/clipfrac_avg": Limits(0.2, 0.3, 0.6),
    "val/ratio_var": Limits(2e-3, 5e-3),
    "val/ratio_max": Limits(1.5, 1.8, 5.0),
    "val/first_ratio_error": Limits(1e-4, 1e-3, 1e-2),
    "val/explained_variance": Limits(0.3, 0.2, 0.0),
}
"""Limits by metric name; ``objective/kl`` in nats for answers of up to ``KL_LENGTH`` tokens."""

LOGPROB_GAP = {
    "float32": Limits(1e-4, 1e-3, 1e-2),
    "float16": Limits(1e-2, 2e-2, 0.1),
    "bfloat16": Limits(5e-2, 0.1, 0.2),
}
"""Limits of ``rollout/logprob_gap``, in nats per token, by the dtype that forwards run in."""


def forward_type(*, dtype: object, bf16: object, fp16: object, quantization: object) -> str:
    """The key of ``LOGPROB_GAP`` for a run with these settings (``model.dtype``, ``train.bf16``, ``train.fp16``,
    ``model.quantization``). Quantized weights round as coarsely as bfloat16."""
    if bf16 or dtype == "bfloat16" or quantization:
        return "bfloat16"
    return "float16" if fp16 else "float32"


def scores_alike(mean: float, std: float) -> bool:
    """Whether all scores of a batch are equal up to rounding."""
    return std <= SAME_SCORE * abs(mean)
