"""The scale of a critic that starts as a copy of the first reward source.

Such a critic predicts the source's score. The scores to train on also depend on the source's weight and norm, on other
sources, and on the normalization of the sum, all of which are known when the first rollout batch is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from tether import algo
from tether.machine.distributed import Dist
from tether.models.roles import VALUE, ModelRoles
from tether.rewards.combine import WeightedSum
from tether.train.engines.base import Engine
from tether.train.parts import Parts


def scale_copy(
    parts: Parts, components: Mapping[str, Sequence[float]], moments: algo.ScoreMoments | None
) -> str | None:
    """Puts a critic that is a copy of the first reward source on the scale of the scores to train on. Returns a line
    that describes its start; None if it is not a copy, or already on that scale. All processes must call it.

    Args:
        components: scores of a rollout batch by each source, by its name; empty for the caller's own reward source, of
            which nothing is known.
        moments: of ``ppo.score_norm``; None without it.
    """
    roles, rewards = parts.roles, parts.rewards
    is_copy = roles.has_critic and roles.role(VALUE).copies_reward
    if not is_copy or not isinstance(rewards, WeightedSum) or not components:
        return None
    first, *others = rewards.parts
    beside = sum(fmean(part.counted(score) for score in components[part.name]) for part in others)
    slope, shift = algo.score_scale(weight=first.weight, norm=first.norm, beside=beside, moments=moments)
    if (slope, shift) == (1.0, 0.0):
        return None
    rescale(roles, parts.engine, parts.dist, slope, shift)
    return f"the critic starts at {slope:.3g} times the score of {first.name} plus {shift:.3g}"


def rescale(roles: ModelRoles, engine: Engine, dist: Dist, slope: float, shift: float) -> None:
    """Changes the critic's head so that its value becomes ``slope · V + shift`` instead of V. All processes must call
    it.

    A shift other than 0 needs a head with a bias.
    """
    names = ("head.weight", "head.bias", "score.weight", "score.bias")
    own = {name: p for name, p in roles.role(VALUE).trained.items() if name in names}
    whole = dist.gathered({name: x.cpu() for name, x in engine.full(own).items()})[0]
    assert shift == 0 or any(name.endswith("bias") for name in own), "a shift needs a bias"
    for name, parameter in own.items():
        engine.fill(parameter, slope * whole[name] + (shift if name.endswith("bias") else 0.0))
