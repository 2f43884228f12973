"""The headline of a run before PPO: what was learned, judged on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tether.config.keys import counted
from tether.report.read import Run
from tether.report.summary import Tile, Verdict, kept
from tether.report.text import number, percent

OVERFITTED = 1.02
"""Multiple of the lowest held-out loss."""


def verdict(run: Run) -> Verdict:
    """Whether it learned something that holds beyond its training rows."""
    found = _of_pairs(run) if run.kind == "reward" else _of_demonstrations(run)
    return replace(found, detail=f"{found.detail} {kept(run)}".strip())


def tiles(run: Run) -> list[Tile]:
    """The numbers in the headline."""
    rate, epochs = run.series("learning_rate").finite, run.series("epoch").finite
    found = [
        _course(run, "Loss", "loss", "in training", number),
        _course(run, "Held-out loss", "eval_loss", f"on new {_rows(run)}", number),
        _course(run, "Token accuracy", "mean_token_accuracy", "in training", percent),
        _course(run, "Held-out token accuracy", "eval_mean_token_accuracy", "on new demonstrations", percent),
        _course(run, "Pair accuracy", "accuracy", "in training", percent),
    ]
    if run.ranked:
        pairs = f"of {counted(int(run.ranked['pairs']), 'pair')} that were held out"
        found.append(Tile("Held-out pair accuracy", percent(run.ranked.get("accuracy")), pairs))
        found.append(Tile("Held-out margin", number(run.ranked.get("margin")), "chosen answer minus the other"))
    detail = f"epochs: {number(round(epochs[-1], 2))}" if epochs else "optimizer steps"
    detail += f", kept: step {run.kept_step:,}" if kept(run) else ""
    found.append(Tile("Steps", f"{run.num_updates:,}", detail))
    found += [Tile("Learning rate", number(max(rate)), "at its peak")] if rate else []
    return [tile for tile in found if tile is not None]


def data_sources(run: Run) -> str:
    """A line on the training data."""
    given = run.setting(f"data.{_rows(run)}")
    return ", ".join(map(str, given if isinstance(given, list) else [given]))


def _rows(run: Run) -> str:
    """What it was trained on."""
    return "pairs" if run.kind == "reward" else "demonstrations"


def _of_demonstrations(run: Run) -> Verdict:
    points = run.evaluated("eval_loss").points
    if len(points) < 2:
        early, late = run.series("loss").early, run.series("loss").late
        if early is None or late is None:
            return Verdict("info", "Not known yet.", "No loss was logged.")
        held_out = f"The held-out loss was {number(points[0][1])} at the end." if points else ""
        text = f"In training the loss went from {number(early)} to {number(late)}."
        reason = "Held-out demonstrations were evaluated only once: set train.eval_steps." if points else (
            "No demonstrations were held out: set data.eval_fraction or data.eval_demonstrations."
        )
        return Verdict("info", "Not known.", f"{held_out} {text}".strip(), reason)
    (first, start), (step, end) = run.judged("eval_loss") or (points[0], points[-1])
    best_step, best = min(points, key=lambda point: point[1])
    detail = f"From {number(start)} after {counted(first, 'step')} to {number(end)} after {counted(step, 'step')}."
    if best > 0 and end > OVERFITTED * best:
        text = f"The held-out loss was lower after step {best_step}: {number(best)}."
        if not run.setting("train.load_best_model_at_end"):
            detail += " Keep it: train.metric_for_best_model: eval_loss, train.load_best_model_at_end: true."
        return Verdict("warn", "Less than at its best.", text, detail)
    if step == first:
        text = "The first model that was evaluated was kept, and there is none before it to compare it with."
        return Verdict("info", "Not known.", text, f"Its held-out loss is {number(end)}.")
    if end < start:
        return Verdict("ok", "Yes.", f"The held-out loss fell by {percent(1 - end / start)}.", detail)
    return Verdict("act", "No.", "The held-out loss did not fall.", detail)


def _of_pairs(run: Run) -> Verdict:
    accuracy, count = run.ranked.get("accuracy"), run.ranked.get("pairs", 0.0)
    if accuracy is None or not math.isfinite(accuracy) or count == 0:
        late = run.series("accuracy").late
        if late is None:
            return Verdict("info", "Not known yet.", "No pairs were ranked.")
        text = f"At the end of training it ranked {percent(late)} of the pairs correctly."
        reason = "There is no result on held-out pairs: set data.eval_fraction."
        return Verdict("info", "Not known.", text, reason)
    noise = 2 * math.sqrt(0.25 / count)  # two standard errors of guessing
    text = f"Of {counted(int(count), 'held-out pair')}, it ranks {percent(accuracy)} correctly."
    detail = f"Guessing would be right for {percent(max(0.0, 0.5 - noise))} to {percent(min(1.0, 0.5 + noise))}."
    if accuracy > 0.5 + noise:
        return Verdict("ok", "Yes.", text, detail)
    return Verdict("act" if accuracy < 0.5 - noise else "warn", "No better than guessing.", text, detail)


def _course(run: Run, label: str, name: str, detail: str, show: Callable[[float], str]) -> Tile | None:
    """First and last value of a metric, from updates or evaluations; the last is that of the model the run kept."""
    is_held_out = name.startswith("eval_")
    series = run.evaluated(name) if is_held_out else run.series(name)
    if not series:
        return None
    ends = (series.early, series.late)
    if is_held_out:
        judged = run.judged(name) or (series.points[0], series.points[-1])
        ends = tuple(value for _, value in judged)
    return Tile(label, " → ".join(dict.fromkeys(show(value) for value in ends)), detail)
