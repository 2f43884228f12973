"""Normalization of reward sources by statistics that are measured once: ``norm: auto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tether import algo
from tether.rewards.combine import AUTO, Part, WeightedSum
from tether.rewards.ensemble import Ensemble
from tether.types import RewardBatch, RewardSource


def unmeasured(source: RewardSource) -> list[str]:
    """Names of the parts of a source whose norm is to be measured, members of ensembles as ``NAME/MEMBER``."""
    names = []
    for part in _parts(source):
        names += [f"{part.name}/{name}" for name in unmeasured(part.source)]
        names += [part.name] if part.norm == AUTO else []
    return names


def measured(source: RewardSource, batch: RewardBatch) -> dict[str, algo.ScoreMoments]:
    """Moments of the scores that each of these parts gives the batch, by name.

    Members of an ensemble come first, as its scores are made from their counted scores.

    Raises:
        RewardError: a part could not score an answer.
    """
    moments = {}
    for part in _parts(source):
        inner = measured(part.source, batch)
        moments |= {f"{part.name}/{name}": of_member for name, of_member in inner.items()}
        if part.norm == AUTO:
            scores = normalised(part.source, inner).score(batch).scores
            moments[part.name] = algo.merged_moments(algo.ScoreMoments(), torch.tensor(scores, dtype=torch.float64))
    return moments


def normalised(source: RewardSource, moments: Mapping[str, algo.ScoreMoments]) -> RewardSource:
    """The source with the moments of ``measured`` as the norms of these parts: (score − mean) / √(var + 1e-8)."""
    parts = [_normalised(part, moments) for part in _parts(source)]
    match source:
        case WeightedSum():
            return WeightedSum(parts)
        case Ensemble():
            return Ensemble(parts, source.reduce, source.name)
    return source


def _normalised(part: Part, moments: Mapping[str, algo.ScoreMoments]) -> Part:
    prefix = f"{part.name}/"
    inner = {name.removeprefix(prefix): of_it for name, of_it in moments.items() if name.startswith(prefix)}
    norm = part.norm
    if norm == AUTO:
        own = moments[part.name]
        norm = own.mean, algo.score_std(own)
    return replace(part, source=normalised(part.source, inner), norm=norm)


def _parts(source: RewardSource) -> Sequence[Part]:
    match source:
        case WeightedSum(parts=parts) | Ensemble(members=parts):
            return parts
    return ()
