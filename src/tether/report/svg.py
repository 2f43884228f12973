"""A small chart kit: line charts, a path through a plane, stacked bars. Inline SVG, colors from the page's CSS.

Series longer than ``MAX_POINTS`` are drawn as the means of equal groups with the range of each group behind them, so
that neither the visibility of a spike nor the size of the file depends on the length of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tether.report.markup import Html, element, join
from tether.report.text import number

WIDTH, HEIGHT = 400, 232
MAX_POINTS = 120
_TOP, _RIGHT, _BOTTOM = 10, 12, 38
_MARK, _LINE, _LETTER = 5, 14, 6.4  # radius of a mark; height of a line of its name, and at most of a letter's width
_MARKED = 40  # up to this many, every point gets a dot


@dataclass(frozen=True)
class Line:
    """One series of a line chart."""

    label: str
    xs: Sequence[int]
    ys: Sequence[float]
    """Values; NaN leaves a gap."""
    spread: Sequence[float] | None = None
    """Half the height of a band around the line."""
    color: int = 1
    """Number of the CSS color, from 1."""
    dots: bool = False
    """Whether to mark every value, for series with few values."""


@dataclass(frozen=True)
class Guide:
    """A horizontal threshold, drawn if the data come near it."""

    value: float
    label: str
    level: str
    """CSS class: ``warn`` or ``act``."""


@dataclass(frozen=True)
class Mark:
    """A labeled point of a path chart."""

    x: float
    y: float
    name: str
    """Text next to it; may be empty."""
    title: str
    """Hover text."""
    color: int = 1


@dataclass(frozen=True)
class Bucket:
    """A group of consecutive updates drawn as one point."""

    first: int
    last: int
    x: float
    mean: float
    low: float
    high: float

    def steps(self, noun: str = "update") -> str:
        """The updates in it, in words, with ``noun`` as their name."""
        return f"{noun} {self.first}" if self.first == self.last else f"{noun}s {self.first}–{self.last}"


@dataclass(frozen=True)
class Scale:
    """A linear map from data to drawing units."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def buckets(xs: Sequence[int], ys: Sequence[float], limit: int = MAX_POINTS) -> list[Bucket]:
    """At most ``limit`` groups of consecutive points of about equal size; the mean of a group without finite values is
    NaN."""
    count = min(limit, len(xs))
    groups = []
    for i in range(count):
        here = slice(i * len(xs) // count, (i + 1) * len(xs) // count)
        part, finite = xs[here], [y for y in ys[here] if math.isfinite(y)]
        mean = math.fsum(finite) / len(finite) if finite else math.nan
        low, high = (min(finite), max(finite)) if finite else (math.nan, math.nan)
        groups.append(Bucket(part[0], part[-1], (part[0] + part[-1]) / 2, mean, low, high))
    return groups


def axis(low: float, high: float) -> tuple[float, float]:
    """A range with some margin around the values, but none beyond a bound of 0."""
    if low == high == 0:
        return 0.0, 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = 0.1 * max(abs(low), abs(high))
        return low - pad, high + pad
    pad = 0.06 * (high - low)
    return low - pad if low else low, high + pad if high else high


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About ``count`` round values within a range, at least two; optionally whole numbers."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= 0.999 * raw and not (whole and m == 2.5))
    step = max(step, 1.0) if whole else step
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of ticks, with as many decimals as their spacing needs."""
    step, size = values[1] - values[0], max(abs(v) for v in values)
    if size >= 1e6 or step < 1e-4:
        return [number(v) for v in values]
    if size >= 1e4 and step >= 100:
        values, suffix, step = [v / 1000 for v in values], "k", step / 1000
    else:
        suffix = ""
    decimals = next(d for d in range(9) if abs(round(step, d) - step) < 1e-6 * step)
    return [f"{v:.{decimals}f}{suffix if v else ''}".replace("-", "−") for v in values]


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    show: Callable[[float], str] = number,
    include: Sequence[float] = (),
    limits: tuple[float, float] | None = None,
    guides: Sequence[Guide] = (),
    noun: str = "update",
) -> Html:
    """Series over the updates of a run.

    Args:
        label: what the chart shows, for screen readers.
        show: formats a value.
        include: values that the vertical axis must contain.
        limits: vertical range; values beyond it are drawn at the edge, and their hover text has the true value.
        guides: horizontal thresholds.
        noun: name of an update.
    """
    drawn = [(line, buckets(line.xs, line.ys), _spreads(line)) for line in lines]
    heights = [v for _, groups, spreads in drawn for v in _extent(groups, spreads)]
    low, high = limits or axis(min([*heights, *include]), max([*heights, *include]))
    y_ticks = ticks(low, high)
    xs = [x for line in lines for x in line.xs]
    labels = tick_labels(y_ticks) if show is number else [show(v) for v in y_ticks]
    left = _left_margin(labels)
    x = Scale(*_widened(min(xs), max(xs)), left, WIDTH - _RIGHT)
    y = Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x, y, _update_ticks(x), y_ticks, labels, noun), *_guides(guides, x, y)]
    parts += [_band(groups, spreads, line.color, x, y) for line, groups, spreads in drawn]
    parts += [_curve(groups, line, x, y) for line, groups, _ in drawn]
    parts.append(_hover_columns(drawn, x, y, show, noun))
    return _svg(label, parts)


def path_chart(
    points: Sequence[tuple[float, float]],
    titles: Sequence[str],
    marks: Sequence[Mark],
    *,
    label: str,
    x_label: str,
) -> Html:
    """A path through a plane, fainter at its start; ``titles`` are the hover texts of its points."""
    xs, ys = [p[0] for p in points] + [m.x for m in marks], [p[1] for p in points] + [m.y for m in marks]
    x_range, y_range = axis(min(0.0, *xs), max(xs)), axis(min(ys), max(ys))
    labels = tick_labels(ticks(*y_range))
    x = Scale(*x_range, _left_margin(labels), WIDTH - _RIGHT)
    y = Scale(*y_range, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x, y, ticks(*x_range), ticks(*y_range), labels, x_label)]
    if points:
        parts.append(element("path", d=_polyline([(x(a), y(b)) for a, b in points]), class_="line c1 faint"))
    for i, ((a, b), title) in enumerate(zip(points, titles, strict=True)):
        opacity = f"{0.25 + 0.75 * (i + 1) / len(points):.2f}"
        dot = element("circle", cx=_fmt(x(a)), cy=_fmt(y(b)), r=3, class_="dot c1", opacity=opacity)
        parts.append(element("g", dot, element("title", title), class_="h"))
    parts += [_mark(mark, x, y) for mark in marks]
    parts += _mark_names(marks, x, y)
    return _svg(label, parts)


def stacked_bars(
    xs: Sequence[int], layers: Sequence[tuple[str, int, Sequence[float]]], *, label: str, unit: str
) -> Html:
    """Layers (name, color number, values) on top of each other, one bar per group of updates.

    Values that are not finite, or are negative, count as 0.
    """
    groups = [buckets(xs, [y if math.isfinite(y) else 0.0 for y in ys], 60) for *_, ys in layers]
    columns = list(zip(*groups, strict=True))
    totals = [math.fsum(max(0.0, b.mean) for b in column) for column in columns]
    top = axis(0.0, max(totals))[1]
    labels = tick_labels(ticks(0.0, top))
    left = _left_margin(labels)
    x = Scale(min(xs) - 0.5, max(xs) + 0.5, left, WIDTH - _RIGHT)
    y = Scale(0.0, top, HEIGHT - _BOTTOM, _TOP)
    width = (WIDTH - _RIGHT - left) / len(columns)
    gap = min(2.0, 0.25 * width)
    parts = [_frame(x, y, _update_ticks(x), ticks(0.0, top), labels, "update")]
    for i, (column, total) in enumerate(zip(columns, totals, strict=True)):
        at, top, bars = left + i * width + gap / 2, 0.0, []
        for (_, color, _), bucket in zip(layers, column, strict=True):
            bottom, top = top, top + max(0.0, bucket.mean)
            if (height := y(bottom) - y(top)) > 0.05:
                box = {"x": _fmt(at), "y": _fmt(y(top)), "width": _fmt(width - gap), "height": _fmt(height)}
                bars.append(element("rect", **box, class_=f"bar c{color}"))
        rows = [f"{name}: {number(bucket.mean)} {unit}" for (name, *_), bucket in zip(layers, column, strict=True)]
        title = "\n".join([f"{column[0].steps()}: {number(total)} {unit}", *rows])
        parts.append(element("g", *bars, element("title", title), class_="h"))
    return _svg(label, parts)


# Pieces


def _svg(label: str, parts: Sequence[Html | None]) -> Html:
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def _frame(
    x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], y_labels: Sequence[str], x_label: str
) -> Html:
    """Grid, tick labels and the name of the horizontal axis."""
    parts = []
    for value, text in zip(y_ticks, y_labels, strict=True):
        at = _fmt(y(value))
        kind = "grid zero" if value == 0 else "grid"
        parts.append(element("line", x1=_fmt(x.start), x2=_fmt(x.end), y1=at, y2=at, class_=kind))
        parts.append(element("text", text, x=_fmt(x.start - 6), y=_fmt(y(value) + 4), class_="tick", text_anchor="end"))
    bottom = y.start
    for value, text in zip(x_ticks, tick_labels(x_ticks) if len(x_ticks) > 1 else [number(x_ticks[0])], strict=True):
        at = x(value)
        parts.append(element("line", x1=_fmt(at), x2=_fmt(at), y1=_fmt(bottom), y2=_fmt(bottom + 4), class_="axis"))
        anchor = "end" if at > WIDTH - _RIGHT - 8 else "middle"
        shift = 6 if anchor == "end" else 0
        parts.append(element("text", text, x=_fmt(at + shift), y=_fmt(bottom + 17), class_="tick", text_anchor=anchor))
    parts.append(element("line", x1=_fmt(x.start), x2=_fmt(x.end), y1=_fmt(bottom), y2=_fmt(bottom), class_="axis"))
    middle = (x.start + x.end) / 2
    parts.append(element("text", x_label, x=_fmt(middle), y=HEIGHT - 5, class_="name", text_anchor="middle"))
    return join(*parts)


def _guides(guides: Sequence[Guide], x: Scale, y: Scale) -> list[Html]:
    """Thresholds inside the frame, each named at its right end."""
    parts = []
    for guide in guides:
        if y.low < guide.value < y.high:
            at, above = _fmt(y(guide.value)), _fmt(y(guide.value) - 4)
            rule = element("line", x1=_fmt(x.start), x2=_fmt(x.end), y1=at, y2=at, class_=f"guide {guide.level}")
            name = element("text", guide.label, x=_fmt(x.end), y=above, class_=f"note {guide.level}", text_anchor="end")
            parts += [rule, name]
    return parts


def _spreads(line: Line) -> list[Bucket] | None:
    return buckets(line.xs, line.spread) if line.spread is not None else None


def _edges(groups: Sequence[Bucket], spreads: Sequence[Bucket] | None) -> list[tuple[float, float]]:
    """Lower and upper edge of the band at each group: the spread if known, else the group's range."""
    if spreads is None:
        return [(b.low, b.high) for b in groups]
    halves = [s.mean if math.isfinite(s.mean) else 0.0 for s in spreads]
    return [(b.mean - half, b.mean + half) for b, half in zip(groups, halves, strict=True)]


def _extent(groups: Sequence[Bucket], spreads: Sequence[Bucket] | None) -> list[float]:
    return [v for edge in _edges(groups, spreads) for v in edge if math.isfinite(v)]


def _runs(points: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """Contiguous stretches of points without NaN."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if all(math.isfinite(v) for v in point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _band(groups: Sequence[Bucket], spreads: Sequence[Bucket] | None, color: int, x: Scale, y: Scale) -> Html | None:
    edges = [(b.x, *edge) for b, edge in zip(groups, _edges(groups, spreads), strict=True)]
    areas = []
    for run in _runs(edges):
        if len(run) > 1 and any(high > low for _, low, high in run):
            upper = [(x(a), y(high)) for a, _, high in run]
            lower = [(x(a), y(low)) for a, low, _ in reversed(run)]
            areas.append(_polyline(upper + lower) + "z")
    return element("path", d="".join(areas), class_=f"band c{color}") if areas else None


def _curve(groups: Sequence[Bucket], line: Line, x: Scale, y: Scale) -> Html:
    runs = _runs([(b.x, b.mean) for b in groups])
    path = "".join(_polyline([(x(a), y(b)) for a, b in run]) for run in runs)
    marked = line.dots or len(groups) <= _MARKED
    dots = [point for run in runs if marked or len(run) == 1 for point in run]
    look = {"r": 3.5 if line.dots else 2.2, "class_": f"dot c{line.color}"}
    return join(
        element("path", d=path, class_=f"line c{line.color}"),
        *(element("circle", cx=_fmt(x(a)), cy=_fmt(y(b)), **look) for a, b in dots),
    )


def _hover_columns(
    drawn: Sequence[tuple[Line, list[Bucket], list[Bucket] | None]],
    x: Scale,
    y: Scale,
    show: Callable[[float], str],
    noun: str,
) -> Html:
    """An invisible column over each group of updates that names the values there."""
    rows: dict[float, list[str]] = {}
    heads: dict[float, str] = {}
    for line, groups, spreads in drawn:
        for i, bucket in enumerate(groups):
            if not math.isfinite(bucket.mean):
                continue
            text = f"{line.label}: {show(bucket.mean)}"
            if spreads is not None and math.isfinite(spreads[i].mean):
                text += f" ± {show(spreads[i].mean)}"
            elif bucket.high > bucket.low:
                text += f" ({show(bucket.low)} to {show(bucket.high)})"
            rows.setdefault(bucket.x, []).append(text)
            heads.setdefault(bucket.x, bucket.steps(noun) if bucket.last else f"before the first {noun}")
    places = sorted(rows)
    centers = [x(place) for place in places]
    bounds = [x.start, *((a + b) / 2 for a, b in pairwise(centers)), x.end]
    parts = []
    for i, (place, center) in enumerate(zip(places, centers, strict=True)):
        width = max(0.5, bounds[i + 1] - bounds[i])
        box = {"x": _fmt(bounds[i]), "y": _TOP, "width": _fmt(width), "height": _fmt(y.start - _TOP)}
        area = element("rect", **box, class_="catch")
        rule = element("line", x1=_fmt(center), x2=_fmt(center), y1=_TOP, y2=_fmt(y.start), class_="rule")
        parts.append(element("g", area, rule, element("title", "\n".join([heads[place], *rows[place]])), class_="h"))
    return join(*parts)


def _mark(mark: Mark, x: Scale, y: Scale) -> Html:
    circle = element("circle", cx=_fmt(x(mark.x)), cy=_fmt(y(mark.y)), r=_MARK, class_=f"mark c{mark.color}")
    title = f"{mark.title}\nKL: {number(mark.x)}\nscore: {number(mark.y)}"
    return element("g", circle, element("title", title), class_="h")


def _mark_names(marks: Sequence[Mark], x: Scale, y: Scale) -> list[Html]:
    """The names of marks, each at the first place beside its mark where it covers no mark and no name before it."""
    places = [(x(mark.x), y(mark.y)) for mark in marks]
    taken = [_Box(at - _MARK, height - _MARK, at + _MARK, height + _MARK) for at, height in places]
    parts = []
    for mark, (at, height) in zip(marks, places, strict=True):
        if not mark.name:
            continue
        boxes = _name_boxes(mark.name, at, height, x, y)
        box = next((box for box in boxes if not any(box.covers(other) for other in taken)), boxes[0])
        taken.append(box)
        is_left = box.right < at
        place = {"x": _fmt(box.right if is_left else box.left), "y": _fmt(box.bottom - 3)}
        parts.append(element("text", mark.name, class_="note", text_anchor="end" if is_left else "start", **place))
    return parts


def _name_boxes(name: str, at: float, height: float, x: Scale, y: Scale) -> list[_Box]:
    """Where the name of a mark may stand: towards the middle before outwards, above before below, near before far."""
    width, gap = _LETTER * len(name), _MARK + 4
    sides = [at + gap, at - gap - width]
    if at > (x.start + x.end) / 2:
        sides.reverse()
    bottoms = [height + step for far in range(4) for step in (-_MARK - far * _LINE, 20 + far * _LINE)]
    boxes = [_Box(left, bottom - _LINE, left + width, bottom) for bottom in bottoms for left in sides]
    top, bottom = _TOP - 4, y.start
    return [b for b in boxes if b.left >= x.start and b.right <= WIDTH and b.top >= top and b.bottom <= bottom]


class _Box(NamedTuple):
    """A rectangle of the drawing."""

    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: _Box) -> bool:
        """Whether the two share more than an edge."""
        apart = other.right <= self.left or self.right <= other.left
        return not apart and other.top < self.bottom and self.top < other.bottom


def _update_ticks(x: Scale) -> list[float]:
    """Whole updates, at least 0, within a range; the first one if there is no other."""
    return [v for v in ticks(x.low, x.high, whole=True) if v >= 0]


def _widened(first: int, last: int) -> tuple[float, float]:
    return (first, last) if last > first else (first - 1, last + 1)


def _left_margin(labels: Sequence[str]) -> float:
    return min(74.0, 14.0 + 6.6 * max(len(text) for text in labels))


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_fmt(a)} {_fmt(b)}" for a, b in points)


def _fmt(value: float) -> str:
    """Drawing units to a tenth, without trailing zeros."""
    return f"{value:.1f}".removesuffix(".0")
