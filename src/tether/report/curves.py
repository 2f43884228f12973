"""The curves that a report shows, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tether.report import health
from tether.report.limits import LIMITS, Limits
from tether.report.markup import Html
from tether.report.read import MISSING, STAGES, Run, Series, is_missing_share
from tether.report.svg import Guide, Line, Mark, buckets, line_chart, path_chart, stacked_bars
from tether.report.text import amount, number, percent

MAX_COMPONENTS = 12
PHASE_COLORS, REST_COLOR = (1, 2, 3, 4, 5, 7), 6
MAX_DOTS = 24
TRAIN, HELD_OUT = 1, 2


@dataclass(frozen=True)
class Figure:
    """One chart with its title and caption."""

    title: str
    caption: str
    """What is plotted, in a few words."""
    legend: Sequence[tuple[str, int]]
    """Name and color number of each series; empty if there is only one."""
    latest: str
    """The value at the end of the run."""
    chart: Html


def groups(run: Run) -> list[tuple[str, list[Figure]]]:
    """The figures under their headings, without metrics that were not logged."""
    sections = _stage_sections(run) if run.kind in STAGES else [
        ("Result", [_score(run), _frontier(run), _kl(run)]),
        ("Answers", [_length(run), _eos_rate(run), _entropy(run)]),
        ("Rewards", [*_components(run), _objective(run)]),
        ("Update", [_approx_kl(run), _clip_fraction(run), _explained_variance(run),
                    _plain(run, "loss/policy_avg", "Policy loss", "clipped surrogate per token"),
                    _plain(run, "loss/value_avg", "Value loss", "half the squared error per token", include=(0.0,)),
                    _gradient_norms(run)]),
        ("Run", [_seconds(run), _plain(run, "lr", "Learning rate", "of the policy", include=(0.0,)), _kl_coef(run)]),
    ]  # fmt: skip
    found = [(title, [figure for figure in figures if figure is not None]) for title, figures in sections]
    return [(title, figures) for title, figures in found if figures]


def _stage_sections(run: Run) -> list[tuple[str, list[Figure | None]]]:
    """The same for a run of a stage before PPO."""
    loss = "of the tokens of answers" if run.kind == "sft" else "of the pairs"
    return [
        ("Result", [
            _both(run, "Loss", f"mean {loss}", "loss", "eval_loss"),
            _both(run, "Token accuracy", "share of tokens that the model finds most likely", "mean_token_accuracy",
                  "eval_mean_token_accuracy", show=percent),
            _plain(run, "accuracy", "Pair accuracy", "share of the step's pairs whose chosen answer scores higher",
                   limits=(0.0, 1.0), show=percent),
            _plain(run, "margin", "Margin", "score of the chosen answer minus that of the other", include=(0.0,)),
        ]),
        ("Run", [
            _plain(run, "learning_rate", "Learning rate", "at each step", include=(0.0,)), _gradient_norms(run),
            _both(run, "Entropy", "nats per token", "entropy", "eval_entropy", include=(0.0,)),
        ]),
    ]  # fmt: skip


def _line(series: Series, label: str, color: int = TRAIN, *, spread: Series | None = None) -> Line:
    few = color == HELD_OUT and len(series.steps) <= MAX_DOTS
    halves = dict(zip(spread.steps, spread.values, strict=True)) if spread else None
    band = [halves.get(s, math.nan) for s in series.steps] if halves else None
    return Line(label, series.steps, series.values, band, color, few)


def _figure(
    title: str, caption: str, lines: list[Line], *, show: Callable[[float], str] = number, **chart: Any
) -> Figure | None:
    """A line chart of the series that have values."""
    kept = [line for line in lines if any(math.isfinite(y) for y in line.ys)]
    if not kept:
        return None
    told = next((line for line in kept if line.label == "held-out"), kept[0])
    last = show(next(y for y in reversed(told.ys) if math.isfinite(y)))
    svg = line_chart(kept, label=f"{title}: {caption}", show=show, **chart)
    legend = [(line.label, line.color) for line in kept] if len(kept) > 1 else []
    return Figure(title, caption, legend, f"{last} held-out" if told.label == "held-out" else last, svg)


def _both(run: Run, title: str, caption: str, trained: str, evaluated: str, **chart: Any) -> Figure | None:
    """A metric in training and on held-out prompts."""
    held_out = _line(run.evaluated(evaluated), "held-out", HELD_OUT)
    return _figure(title, caption, [_line(run.series(trained), "training"), held_out], noun=run.unit, **chart)


def _plain(run: Run, name: str, title: str, caption: str, **chart: Any) -> Figure | None:
    return _figure(title, caption, [_line(run.series(name), title)], noun=run.unit, **chart)


def _score(run: Run) -> Figure | None:
    trained = _line(run.series("objective/scores"), "training", spread=run.series("objective/scores_std"))
    held_out = _line(run.evaluated("eval_scores"), "held-out", HELD_OUT)
    caption = "mean of the batch; band: ± 1 sd of its answers" if trained.spread else "mean of the batch"
    return _figure("Score", caption, [trained, held_out])


def _frontier(run: Run) -> Figure | None:
    kl, scores = dict(run.series("objective/kl").points), dict(run.series("objective/scores").points)
    steps = [step for step in kl if step in scores]
    xs, ys = buckets(steps, [kl[s] for s in steps], 60), buckets(steps, [scores[s] for s in steps], 60)
    points = [(x.mean, y.mean) for x, y in zip(xs, ys, strict=True)]
    titles = [f"{x.steps()}\nKL: {number(x.mean)}\nscore: {number(y.mean)}" for x, y in zip(xs, ys, strict=True)]
    marks = _frontier_marks(run)
    if not points and not marks:
        return None
    kl_ends, score_ends = run.judged("eval_kl"), run.judged("eval_scores")
    if kl_ends is not None and score_ends is not None:
        last_kl, last_score = kl_ends[1][1], score_ends[1][1]
    else:
        last_kl, last_score = (marks[-1].x, marks[-1].y) if marks else points[-1]
    legend = [("training", TRAIN), ("held-out", HELD_OUT)] if marks and points else []
    svg = path_chart(points, titles, marks, label="Score against KL to the reference", x_label="KL, nats per sequence")
    return Figure(
        "Reward against KL",
        "what each nat away from the start bought; fainter: earlier",
        legend,
        f"{number(last_score)} at {amount(last_kl, 'nat')}",
        svg,
    )


def _frontier_marks(run: Run) -> list[Mark]:
    """The evaluations in the plane of KL and score; the first, the last and that of the kept policy are labeled."""
    kl, points = dict(run.evaluated("eval_kl").points), run.evaluated("eval_scores").points
    placed = [(step, kl[step], score) for step, score in points if step in kl]
    if not placed:
        return []
    first, last = placed[0][0], placed[-1][0]
    names = {run.kept_step: "kept", last: "end", first: "start" if first == 0 else f"update {first}"}
    shown = placed if len(placed) <= 12 else [placed[i * (len(placed) - 1) // 11] for i in range(12)]
    shown += [point for point in placed if point[0] in names and point not in shown]
    shown.sort()
    return [Mark(x, y, names.get(step, ""), f"update {step}, held-out", HELD_OUT) for step, x, y in shown]


def _kl(run: Run) -> Figure | None:
    lines = [
        _line(run.series("objective/kl"), "training"),
        _line(run.evaluated("eval_kl"), "held-out", HELD_OUT),
        _line(run.series("objective/kl_k3"), "training, k3 estimate", 3),
    ]
    guides = _guides(health.kl_limits(run))
    return _figure("KL to the reference", "nats per sequence", lines, include=(0.0,), guides=guides)


def _length(run: Run) -> Figure | None:
    return _both(run, "Length", "tokens per answer", "rollout/length", "eval_length", include=(0.0,))


def _eos_rate(run: Run) -> Figure | None:
    caption = "share of answers that reached an end token"
    return _both(run, "Ended by itself", caption, "rollout/eos_rate", "eval_eos_rate", limits=(0.0, 1.0), show=percent)


def _entropy(run: Run) -> Figure | None:
    return _plain(run, "policy/entropy_avg", "Entropy", "nats per token", include=(0.0,))


def _components(run: Run) -> list[Figure]:
    trained = [name.removeprefix("rewards/") for name in run.names() if name.startswith("rewards/")]
    held_out = [n.removeprefix("eval_rewards/") for n in run.evaluated_names() if n.startswith("eval_rewards/")]
    names = [name for name in dict.fromkeys(trained + held_out) if not is_missing_share(name)][:MAX_COMPONENTS]
    found = [figure for name in names for figure in (_component(run, name), _missing_share(run, f"{name}/{MISSING}"))]
    return [figure for figure in found if figure is not None]


def _component(run: Run, name: str) -> Figure | None:
    return _both(run, name[:60], "this judge alone, unweighted", f"rewards/{name}", f"eval_rewards/{name}")


def _missing_share(run: Run, name: str) -> Figure | None:
    caption, both = "share of answers without a score from this judge", (f"rewards/{name}", f"eval_rewards/{name}")
    return _both(run, name[-60:], caption, *both, limits=(0.0, 1.0), show=percent)


def _objective(run: Run) -> Figure | None:
    return _plain(run, "objective/rlhf_reward", "Objective", "score minus kl_coef times KL: what PPO maximizes")


def _approx_kl(run: Run) -> Figure | None:
    caption, guides = "drift within one update, nats per token", _guides(LIMITS["policy/approxkl_avg"])
    return _plain(run, "policy/approxkl_avg", "Approximate KL", caption, include=(0.0,), guides=guides)


def _clip_fraction(run: Run) -> Figure | None:
    lines = [_line(run.series("policy/clipfrac_avg"), "policy"), _line(run.series("val/clipfrac_avg"), "value", 3)]
    caption = "share of tokens where clipping acts"
    return _figure("Clip fraction", caption, lines, include=(0.0,), guides=_guides(LIMITS["policy/clipfrac_avg"]))


def _explained_variance(run: Run) -> Figure | None:
    caption = "of the returns by the critic; values below −1 at the edge"
    return _plain(run, "val/explained_variance", "Explained variance", caption, limits=(-1.0, 1.0))


def _gradient_norms(run: Run) -> Figure | None:
    names = [name for name in run.names() if name.endswith("grad_norm")][:4]
    lines = [_line(run.series(n), n.removesuffix("grad_norm").strip("/") or n, 1 + 2 * i) for i, n in enumerate(names)]
    return _figure("Gradient norm", "before clipping", lines, include=(0.0,), noun=run.unit)


def _kl_coef(run: Run) -> Figure | None:
    series = run.series("objective/kl_coef")
    if len(set(series.finite)) < 2:
        return None
    return _plain(run, "objective/kl_coef", "KL coefficient", "adapted to kl_target", include=(0.0,))


def _seconds(run: Run) -> Figure | None:
    names = [n for n in run.names() if n.startswith("time/") and n.endswith("_s")]
    names = [n for n in names if n not in ("time/step_s", "time/rest_s") and run.series(n)][: len(PHASE_COLORS)]
    whole = run.series("time/step_s")
    steps = sorted(run.updates)
    layers = [
        (n[5:-2], color, [run.updates[s].get(n, math.nan) for s in steps])
        for n, color in zip(names, PHASE_COLORS, strict=False)
    ]
    rest = [
        run.updates[s].get("time/step_s", math.nan) - sum(v for *_, ys in layers if math.isfinite(v := ys[i]))
        for i, s in enumerate(steps)
    ]
    if any(v > 0.01 for v in rest if math.isfinite(v)):
        layers.append(("rest" if names else "update", REST_COLOR, rest))
    if not layers:
        return None
    sums = [math.fsum(y for y in ys if math.isfinite(y) and y > 0) for *_, ys in layers]
    total = math.fsum(sums) or 1.0
    legend = [(f"{name} {s / total:.0%}", color) for (name, color, _), s in zip(layers, sums, strict=True)]
    latest = f"{number(whole.late)} s per update" if whole else ""
    chart = stacked_bars(steps, layers, label="Seconds per update by phase", unit="s")
    return Figure("Seconds per phase", "wall clock of each update, and shares of all", legend, latest, chart)


def _guides(limits: Limits) -> list[Guide]:
    values = {"warn": limits.warn, "act": limits.act}
    return [Guide(value, f"{level} {number(value)}", level) for level, value in values.items() if value is not None]
