import math
import re
from itertools import pairwise

import pytest

from tether.report.svg import (
    HEIGHT,
    MAX_POINTS,
    WIDTH,
    Guide,
    Line,
    Mark,
    axis,
    buckets,
    line_chart,
    path_chart,
    stacked_bars,
    tick_labels,
    ticks,
)

NAN = math.nan


def test_buckets_keep_the_mean_the_range_and_every_update():
    xs, ys = list(range(1, 1001)), [math.sin(x) for x in range(1, 1001)]
    ys[499] = 50.0
    groups = buckets(xs, ys)
    assert len(groups) == MAX_POINTS
    assert groups[0].first == 1 and groups[-1].last == 1000
    assert all(a.last + 1 == b.first for a, b in pairwise(groups))
    assert sum(g.mean * (g.last - g.first + 1) for g in groups) == pytest.approx(sum(ys))
    assert max(g.high for g in groups) == 50.0


def test_few_points_are_drawn_as_they_are():
    assert [(g.x, g.mean) for g in buckets([3, 5, 9], [1.0, NAN, 2.0])][::2] == [(3, 1.0), (9, 2.0)]
    assert math.isnan(buckets([3, 5, 9], [1.0, NAN, 2.0])[1].mean)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (-0.013, 0.0021), (3, 3), (0, 0), (1e-7, 2e-7), (-4e99, 7e99), (1e6, 1e6 + 1e-9), (-5, -5)],
)
def test_an_axis_has_a_few_round_ticks_inside_and_contains_its_values(low, high):
    bottom, top = axis(low, high)
    marks = ticks(bottom, top)
    assert bottom <= low <= high <= top
    assert 2 <= len(marks) <= 7
    assert all(bottom - 1e-6 * (top - bottom) <= m <= top + 1e-6 * (top - bottom) for m in marks)
    if 1e-6 < high < 1e6 and high - low > 1e-3:
        assert len(set(tick_labels(marks))) == len(marks)


def test_an_axis_of_positive_values_from_zero_does_not_go_below():
    assert axis(0.0, 10.0)[0] == 0.0
    assert axis(-10.0, 0.0)[1] == 0.0
    assert axis(1.0, 10.0)[0] < 1.0


def test_whole_ticks_are_whole():
    assert all(v == int(v) for v in ticks(1, 3, whole=True))
    assert ticks(0, 25, whole=True) == [0, 5, 10, 15, 20, 25]


def test_tick_labels_share_their_decimals():
    assert tick_labels([0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert tick_labels([-1, 0, 1]) == ["−1", "0", "1"]
    assert tick_labels([0, 20000, 40000]) == ["0", "20k", "40k"]


def _path(svg: str, kind: str) -> str:
    return re.search(rf'<path d="([^"]*)" class="{kind} c1"', svg).group(1)


def test_a_gap_breaks_the_line_and_a_lonely_point_gets_a_dot():
    svg = line_chart([Line("score", [1, 2, 3, 4, 5], [1.0, 2.0, NAN, 4.0, NAN])], label="x")
    assert _path(svg, "line").count("M") == 2
    many = [1.0 if i == 50 else NAN for i in range(100)]
    assert line_chart([Line("score", list(range(100)), many)], label="x").count("<circle") == 1


def test_heights_follow_the_values():
    svg = line_chart([Line("score", [0, 1, 2], [0.0, 1.0, 0.5])], label="x", limits=(0.0, 1.0))
    ys = [float(p.split()[1]) for p in _path(svg, "line")[1:].split("L")]
    assert ys[1] < ys[2] < ys[0]
    assert ys[2] == pytest.approx((ys[0] + ys[1]) / 2, abs=0.1)


def test_a_band_shows_the_spread_of_the_batch_and_hover_texts_name_it():
    svg = line_chart([Line("training", [1, 2], [1.0, 2.0], [0.5, 0.25])], label="x")
    assert "band c1" in svg
    assert "<title>update 2\ntraining: 2 ± 0.25</title>" in svg


def test_long_series_show_the_range_of_each_group():
    ys = [float(i % 2) for i in range(1200)]
    svg = line_chart([Line("kl", list(range(1, 1201)), ys)], label="x")
    assert "band c1" in svg
    assert "<title>updates 1–10\nkl: 0.5 (0 to 1)</title>" in svg


def test_values_beyond_fixed_limits_stay_in_the_frame_and_keep_their_hover_text():
    svg = line_chart([Line("ev", [1, 2], [-70.0, 0.5])], label="x", limits=(-1.0, 1.0))
    assert "ev: −70" in svg
    ys = [float(v) for v in re.findall(r'(?:y|y1|cy)="([-\d.]+)"', svg)]
    assert all(0 <= v <= HEIGHT for v in ys)


def test_guides_are_drawn_only_near_the_data():
    near = line_chart([Line("kl", [1, 2], [0.0, 20.0])], label="x", guides=[Guide(15.0, "warn 15", "warn")])
    far = line_chart([Line("kl", [1, 2], [0.0, 2.0])], label="x", guides=[Guide(15.0, "warn 15", "warn")])
    assert "warn 15" in near and "warn 15" not in far


def test_one_update_is_a_chart():
    svg = line_chart([Line("score", [1], [0.7])], label="x")
    assert "<title>update 1\nscore: 0.7</title>" in svg
    assert 'cx="' in svg


def test_bars_stack_to_the_total():
    svg = stacked_bars([1, 2], [("a", 1, [3.0, NAN]), ("b", 2, [1.0, -2.0])], label="x", unit="s")
    heights = [float(v) for v in re.findall(r'height="([\d.]+)" class="bar', svg)]
    assert len(heights) == 2 and heights[0] == pytest.approx(3 * heights[1], abs=0.2)
    assert "<title>update 1: 4 s\na: 3 s\nb: 1 s</title>" in svg
    assert stacked_bars([1], [("a", 1, [0.0])], label="x", unit="s")


def test_a_path_needs_neither_points_nor_marks_of_both_kinds():
    mark = Mark(1.0, 2.0, "start", "update 0")
    assert "start" in path_chart([], [], [mark], label="x", x_label="KL")
    assert '<path d="M"' not in path_chart([], [], [mark], label="x", x_label="KL")
    assert path_chart([(1.0, 1.0)], ["only"], [], label="x", x_label="KL").count("<title>only") == 1


@pytest.mark.parametrize("end", [(0.1, 1.05), (0.0, 1.0), (0.3, 1.0), (0.05, 0.9), (3.0, 1.0)])
@pytest.mark.parametrize("kept", [None, (0.15, 1.1), (0.0, 1.0)])
@pytest.mark.parametrize("offset", [0.0, 4.0])
def test_names_of_marks_do_not_cover_each_other(end, kept, offset):
    """In a short run, all evaluations may be close."""
    placed = [((0.0, 1.0), "start"), *([(kept, "kept")] if kept else []), (end, "end"), ((5.0, 2.0), "")]
    marks = [Mark(kl + offset, score, name, name) for (kl, score), name in placed]
    svg = path_chart([], [], [*marks, Mark(0.0, 0.0, "", "")], label="x", x_label="KL")
    shown = re.findall(r'<text class="note" text-anchor="(start|end)" x="([\d.]+)" y="([\d.]+)">(\w+)<', svg)
    assert [name for *_, name in shown] == [name for _, name in placed if name]
    boxes = []
    for anchor, x, y, name in shown:
        left, baseline = float(x) - (6 * len(name) if anchor == "end" else 0), float(y)
        boxes.append((left, baseline - 10, left + 6 * len(name), baseline + 2))
        assert left >= 0 and left + 6 * len(name) <= WIDTH and 8 <= baseline <= HEIGHT - 30
    circles = [tuple(map(float, at)) for at in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5"', svg)]
    assert len(circles) == len(marks) + 1
    boxes += [(cx - 4, cy - 4, cx + 4, cy + 4) for cx, cy in set(circles)]
    for i, (left, top, right, bottom) in enumerate(boxes[: len(shown)]):
        for other in boxes[i + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top, (shown, circles)


def test_everything_lies_inside_the_drawing():
    xs = list(range(0, 300))
    svg = line_chart([Line("long", xs, [1e5 * math.cos(x) for x in xs])], label="x")
    numbers = [tuple(map(float, p.split())) for p in re.findall(r"(?<=[ML])[-\d.]+ [-\d.]+", svg)]
    assert numbers and all(0 <= a <= WIDTH and 0 <= b <= HEIGHT for a, b in numbers)
