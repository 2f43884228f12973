"""The scale of a critic that starts as a copy of the first reward source.

Such a critic foresees what the source says. What is trained on is made of that by the source's weight and norm, beside
other sources, and by the normalisation of the sum, which are all known when the first rollout batch is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from tether import algo
from tether.algo.masking import WHITEN_EPSILON
from tether.machine.distributed import Dist
from tether.models.roles import VALUE, ModelRoles
from tether.rewards.combine import Part
from tether.train.engines.base import Engine


def score_scale(
    parts: Sequence[Part], components: Mapping[str, Sequence[float]], moments: algo.ScoreMoments | None
) -> tuple[float, float]:
    """Slope and shift that make of what the first source says what is trained on, the others at their mean.

        slope = w / (σ S)
        shift = (−w μ / σ + Σ_{j>1} mean of what source j counts − M) / S

    Clips, and rules for ends and lengths, are left out. Scores without any spread have no scale: S is 1.

    Args:
        parts: the sources; w, μ and σ are weight and norm of the first.
        components: scores that each source gave a rollout batch, by its name.
        moments: of ``ppo.score_norm``, with mean M and standard deviation S; None: 0 and 1.
    """
    first, *others = parts
    mean, std = first.norm or (0.0, 1.0)
    total_mean, total_std = 0.0, 1.0
    if moments is not None:
        total_mean, total_std = moments.mean, algo.score_std(moments) if moments.var > WHITEN_EPSILON else 1.0
    beside = sum(fmean(part.counted(score) for score in components[part.name]) for part in others)
    return first.weight / (std * total_std), (beside - first.weight * mean / std - total_mean) / total_std


def rescale(roles: ModelRoles, engine: Engine, dist: Dist, slope: float, shift: float) -> None:
    """Makes the critic say ``slope · V + shift`` where it said V, by its head. All processes call it alike.

    A shift other than 0 needs a head with a bias.
    """
    names = ("head.weight", "head.bias", "score.weight", "score.bias")
    own = {name: p for name, p in roles.role(VALUE).trained.items() if name in names}
    whole = dist.gathered({name: x.cpu() for name, x in engine.full(own).items()})[0]
    assert shift == 0 or any(name.endswith("bias") for name in own), "a shift needs a bias"
    for name, parameter in own.items():
        engine.fill(parameter, slope * whole[name] + (shift if name.endswith("bias") else 0.0))
