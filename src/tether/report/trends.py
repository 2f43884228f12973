"""Statistics of metrics over a run: means over stretches, ends, changes, correlation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tether.report.limits import STRETCH
from tether.report.read import Point, Run, Series

MIN_UPDATES = 10
"""Number of updates below which trends are not judged."""


def mean(values: Sequence[float]) -> float:
    """The mean, without rounding loss."""
    return math.fsum(values) / len(values)


def smooth(series: Series) -> list[Point]:
    """(last update, mean) of each stretch of ``STRETCH`` consecutive values; of all values if there are fewer."""
    points = series.points
    width = min(STRETCH, len(points))
    return [
        (points[i + width - 1][0], mean([v for _, v in points[i : i + width]])) for i in range(len(points) - width + 1)
    ]


def worst(series: Series) -> tuple[float, int]:
    """The largest mean of a stretch and its last update."""
    step, value = max(smooth(series), key=lambda p: p[1])
    return value, step


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third."""
    third = max(1, len(values) // 3)
    return mean(values[:third]), mean(values[-third:])


def change(values: Sequence[float], spread: float | None) -> float | None:
    """Change from the first to the last third, in units of ``spread``; None if there are too few values."""
    if len(values) < MIN_UPDATES or not spread:
        return None
    before, after = ends(values)
    return (after - before) / spread


def score_change(run: Run, *, since: float = 0.0) -> float | None:
    """``change`` of the training score over the updates after the fraction ``since`` of the run, in standard deviations
    of the start policy's scores."""
    values = run.series("objective/scores").finite
    return change(values[int(since * len(values)) :], run.score_spread)


def r_squared(run: Run, name: str, other: str) -> float | None:
    """Squared correlation of two metrics over the updates that have both."""
    pairs = dict(run.series(other).points)
    joint = [(value, pairs[step]) for step, value in run.series(name).points if step in pairs]
    if len(joint) < MIN_UPDATES:
        return None
    xs, ys = zip(*joint, strict=True)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    return statistics.correlation(xs, ys) ** 2


def longest_stretch(flags: Sequence[bool]) -> tuple[int, int]:
    """Start and length of the longest run of true flags; the last one if several are equally long."""
    best, start = (0, 0), 0
    for i, flag in enumerate(flags):
        if not flag:
            start = i + 1
        elif i + 1 - start >= best[1]:
            best = (start, i + 1 - start)
    return best
