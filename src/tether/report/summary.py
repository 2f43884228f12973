"""The headline: did the policy get better, by how much, and at what price."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from tether.report.read import Run, Sample
from tether.report.text import counted, duration, number, percent, signed

NOISE = 0.1
"""Standard deviations below which a change of score says nothing, where the standard error is not known."""


@dataclass(frozen=True)
class Pair:
    """Answers to one held-out prompt."""

    before: Sample
    """At the first evaluation."""
    after: Sample | None
    """At the last one; None where there was only one."""


@dataclass(frozen=True)
class Verdict:
    """The answer to the question."""

    level: str
    """``ok``: better; ``act``: worse; ``warn``: no clear change; ``info``: not known."""
    answer: str
    """Yes or no."""
    sentence: str
    """What was measured."""
    detail: str = ""
    """The figures behind it."""


@dataclass(frozen=True)
class Tile:
    """One number of the headline."""

    label: str
    value: str
    detail: str


def pairs(run: Run) -> list[Pair]:
    """Answers of the first and the last evaluation to the same held-out prompts, in the order of the prompts."""
    by_step: dict[int, dict[int, Sample]] = {}
    for sample in run.samples:
        if sample.split == "eval" and sample.row is not None:
            by_step.setdefault(sample.step, {}).setdefault(sample.row, sample)
    if not by_step:
        return []
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    if first is last:
        return [Pair(first[row], None) for row in sorted(first)]
    return [Pair(first[row], last[row]) for row in sorted(first) if row in last]


def verdict(run: Run, compared: list[Pair]) -> Verdict:
    """Whether the policy is better by the judge it was trained on, on held-out prompts where there are any."""
    points = run.evaluated("eval_scores").points
    if len(points) >= 2:
        return _held_out_verdict(run, points, compared)
    (early, late), spread = _ends(run), run.score_spread
    if early is None or late is None or run.num_updates < 2:
        return Verdict("info", "Not known yet.", "There are no two measurements of the score to compare.")
    reason = "Only one evaluation was finished." if points else "There was no evaluation on held-out prompts."
    text = f"On training prompts the score went from {number(early)} to {number(late)}"
    text += f", {signed((late - early) / spread)} standard deviations of the start policy" if spread else ""
    return Verdict("info", "Not known on new prompts.", f"{text}.", reason)


def _held_out_verdict(run: Run, points: list[tuple[int, float]], compared: list[Pair]) -> Verdict:
    (first, start), (step, end) = points[0], points[-1]
    spread, error = run.score_spread, _standard_error(compared)
    change = end - start
    detail = f"From {number(start)}" + (f" after {counted(first, 'update')}" if first else "") + f" to {number(end)}"
    detail += f" after {counted(step, 'update')}"
    if error is not None:
        unit = f"{number(2 * error / spread)} standard deviations" if spread else number(2 * error)
        detail += f"; over {counted(len(compared), 'prompt')}, two standard errors of the change are {unit}"
    if error is None and spread is None:
        way = "rose" if change > 0 else "fell" if change < 0 else "did not move"
        return Verdict("info", "Not known.", f"The held-out score {way}, but its spread is not known.", f"{detail}.")
    noise = 2 * error if error is not None else NOISE * (spread or 0.0)
    size = f"by {number(abs(change / spread))} standard deviations of the start policy" if spread else "on average"
    if abs(change) <= noise:
        return Verdict("warn", "No clear change.", "The held-out score moved within noise.", f"{detail}.")
    if change > 0:
        return Verdict("ok", "Yes.", f"The held-out score rose {size}.", f"{detail}.")
    return Verdict("act", "No.", f"The held-out score fell {size}.", f"{detail}.")


def tiles(run: Run, compared: list[Pair]) -> list[Tile]:
    """The numbers of the headline."""
    found = [_score_tile(run), _kl_tile(run), _length_tile(run), _ended_tile(run), _wins_tile(compared), _run_tile(run)]
    return [tile for tile in found if tile is not None]


def _score_tile(run: Run) -> Tile | None:
    points, spread = run.evaluated("eval_scores").points, run.score_spread
    label = "Held-out score"
    if len(points) >= 2:
        start, end = points[0][1], points[-1][1]
    else:
        label = "Training score"
        start, end = _ends(run)
    if start is None or end is None:
        return None
    detail = f"{signed((end - start) / spread)} sd of the start policy" if spread else "spread of the start not known"
    return Tile(label, f"{number(start)} → {number(end)}", detail)


def _kl_tile(run: Run) -> Tile | None:
    if not run.updates:
        return None
    evaluated = run.evaluated("eval_kl").points
    value = evaluated[-1][1] if evaluated else run.series("objective/kl").late
    if value is None:
        reason = "not measured: ppo.kl_coef is 0" if run.count("ppo.kl_coef") == 0 else "not logged"
        return Tile("KL spent", "–", reason)
    return Tile("KL spent", f"{number(value)} nats", "a sequence, to the reference")


def _length_tile(run: Run) -> Tile | None:
    start, end = _start_and_end(run, "eval_length", "rollout/length")
    if start is None or end is None:
        return None
    limit = run.count("sampling.response_length")
    detail = f"tokens, of {number(limit)} at most" if limit else "tokens"
    return Tile("Length", f"{number(start)} → {number(end)}", detail)


def _ended_tile(run: Run) -> Tile | None:
    start, end = _start_and_end(run, "eval_eos_rate", "rollout/eos_rate")
    if start is None or end is None:
        return None
    return Tile("Ended by itself", f"{percent(start)} → {percent(end)}", "of the answers; the rest were cut")


def _wins_tile(compared: list[Pair]) -> Tile | None:
    changes = _score_changes(compared)
    if not changes:
        return None
    better, equal = sum(c > 0 for c in changes), sum(c == 0 for c in changes)
    detail = "held-out prompts" + (f"; {equal} scored the same" if equal else "")
    return Tile("Better answers", f"{better} of {len(changes)}", detail)


def _run_tile(run: Run) -> Tile:
    planned = run.planned_updates
    value = f"{run.num_updates:,}" + (f" of {planned:,}" if planned is not None else "")
    seconds = math.fsum(run.series("time/step_s").finite)
    details = ["interrupted or still running"] if planned is not None and run.num_updates < planned else []
    details += [duration(seconds)] if seconds else []
    episodes = run.series("episode").finite
    details += [f"{number(episodes[-1])} answers"] if episodes else []
    return Tile("Updates", value, ", ".join(details) or "no time logged")


def _ends(run: Run) -> tuple[float | None, float | None]:
    series = run.series("objective/scores")
    return series.early, series.late


def _start_and_end(run: Run, evaluated: str, trained: str) -> tuple[float | None, float | None]:
    points, series = run.evaluated(evaluated).points, run.series(trained)
    return (points[0][1], points[-1][1]) if len(points) >= 2 else (series.early, series.late)


def _score_changes(compared: list[Pair]) -> list[float]:
    """Change of score on each prompt that has two finite ones."""
    scores = [(p.before.score, p.after.score) for p in compared if p.after is not None]
    return [b - a for a, b in scores if a is not None and b is not None and math.isfinite(b - a)]


def _standard_error(compared: list[Pair]) -> float | None:
    """Standard error of the mean change of score over the same prompts."""
    changes = _score_changes(compared)
    return statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) >= 8 else None
