"""The headline: whether the policy improved, by how much, and at what KL."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from tether.config.keys import counted
from tether.report.limits import LEAST_PROMPTS
from tether.report.read import STAGES, Point, Run, Sample
from tether.report.text import amount, duration, number, percent, signed

NOISE = 0.1
"""Number of standard deviations below which a change in score is noise, if the answers were not kept."""


@dataclass(frozen=True)
class Pair:
    """Answers to one held-out prompt."""

    before: Sample
    """The answer at the first evaluation."""
    after: Sample | None
    """The answer of the policy that the run kept, or at the last evaluation so far; None if that is the first one."""


@dataclass(frozen=True)
class Verdict:
    """The answer to the question."""

    level: str
    """``ok``: better; ``act``: worse; ``warn``: no clear change; ``info``: unknown."""
    answer: str
    """Yes or no."""
    sentence: str
    """What was measured."""
    detail: str = ""
    """The numbers behind it."""


@dataclass(frozen=True)
class Tile:
    """One number in the headline."""

    label: str
    value: str
    detail: str


def pairs(run: Run) -> list[Pair]:
    """Answers of the first policy and of the one that the run kept to the same held-out prompts, in prompt order."""
    by_step: dict[int, dict[int, Sample]] = {}
    for sample in run.samples:
        if sample.split == "eval" and sample.row is not None:
            by_step.setdefault(sample.step, {}).setdefault(sample.row, sample)
    if not by_step:
        return []
    first = by_step[min(by_step)]
    last = by_step[max(by_step)] if run.kept_step is None else by_step.get(run.kept_step, first)
    if first is last:
        return [Pair(first[row], None) for row in sorted(first)]
    return [Pair(first[row], last[row]) for row in sorted(first) if row in last]


def verdict(run: Run, compared: list[Pair]) -> Verdict:
    """Whether the policy improved by the judge it was trained on, on held-out prompts if there are any."""
    points, judged = run.evaluated("eval_scores").points, run.judged("eval_scores")
    if judged is not None:
        return _held_out_verdict(run, *judged, compared)
    (early, late), spread = _ends(run), run.score_spread
    if early is None or late is None or run.num_updates < 2:
        return Verdict("info", "Not known yet.", "A comparison needs two measurements of the score.")
    reason = "Only one evaluation was finished." if points else "There was no evaluation on held-out prompts."
    text = f"On training prompts the score went from {number(early)} to {number(late)}"
    text += f", {signed((late - early) / spread)} standard deviations of the start policy" if spread else ""
    return Verdict("info", "Not known on new prompts.", f"{text}.", reason)


def _held_out_verdict(run: Run, before: Point, after: Point, compared: list[Pair]) -> Verdict:
    (first, start), (step, end) = before, after
    which = kept(run)
    if step == first:
        return Verdict("act", "No.", "No evaluation was better than the first one, whose policy was kept.", which)
    spread, error = run.score_spread, _standard_error(compared)
    change = end - start
    detail = f"From {number(start)}" + (f" after {counted(first, 'update')}" if first else "") + f" to {number(end)}"
    detail += f" after {counted(step, 'update')}"
    if error is not None:
        unit = f"{number(2 * error / spread)} standard deviations" if spread else number(2 * error)
        detail += f"; over {counted(len(compared), 'prompt')}, two standard errors of the change are {unit}"
    detail = f"{detail}. {which}".rstrip()
    if error is None and spread is None:
        way = "rose" if change > 0 else "fell" if change < 0 else "did not move"
        return Verdict("info", "Not known.", f"The held-out score {way}, but its spread is unknown.", detail)
    if 0 < run.num_held_out < LEAST_PROMPTS:
        few = counted(run.num_held_out, "held-out prompt")
        told = f"{few} cannot tell a change from noise: hold out at least {LEAST_PROMPTS}, better hundreds."
        return Verdict("info", "Not known.", told, detail)
    noise = change_noise(run, compared)
    size = f"by {number(abs(change / spread))} standard deviations of the start policy" if spread else "on average"
    if abs(change) <= noise:
        return Verdict("warn", "No clear change.", "The held-out score moved within noise.", detail)
    if change > 0:
        return Verdict("ok", "Yes.", f"The held-out score rose {size}.", detail)
    return Verdict("act", "No.", f"The held-out score fell {size}.", detail)


def change_noise(run: Run, compared: list[Pair]) -> float:
    """The change of the held-out score that is noise: two standard errors, if answers were kept, else ``NOISE``
    standard deviations of the start policy."""
    error = _standard_error(compared)
    return 2 * error if error is not None else NOISE * (run.score_spread or 0.0)


def kept(run: Run) -> str:
    """Which model the run kept, if it is not the last one."""
    step, last = run.kept_step, run.finished_step
    if step is None or step == last:
        return ""
    what, metric = "model" if run.kind in STAGES else "policy", run.setting("train.metric_for_best_model")
    return f"The run kept the {what} after {run.unit} {step:,} of {last:,}, the best by {metric}."


def kl_spent(run: Run) -> float | None:
    """KL from the reference of the policy that the run kept, in nats per answer: on held-out prompts if it was
    evaluated, else from the last updates."""
    if (judged := run.judged("eval_kl")) is not None:
        return judged[1][1]
    points = run.evaluated("eval_kl").points
    return points[-1][1] if points else run.series("objective/kl").late


def tiles(run: Run, compared: list[Pair]) -> list[Tile]:
    """The numbers in the headline."""
    found = [_score_tile(run), _kl_tile(run), _length_tile(run), _ended_tile(run), _wins_tile(compared), _run_tile(run)]
    return [tile for tile in found if tile is not None]


def _score_tile(run: Run) -> Tile | None:
    judged, spread = run.judged("eval_scores"), run.score_spread
    label = "Held-out score"
    if judged is not None:
        (_, start), (_, end) = judged
    else:
        label = "Training score"
        start, end = _ends(run)
    if start is None or end is None:
        return None
    detail = f"{signed((end - start) / spread)} sd of the start policy" if spread else "spread at the start unknown"
    return Tile(label, f"{number(start)} → {number(end)}", detail)


def _kl_tile(run: Run) -> Tile | None:
    if not run.updates:
        return None
    value = kl_spent(run)
    if value is None:
        reason = "not measured: ppo.kl_coef is 0" if run.count("ppo.kl_coef") == 0 else "not logged"
        return Tile("KL spent", "–", reason)
    why = "; an estimate, below 0 by chance" if value < 0 else ""
    return Tile("KL spent", amount(value, "nat"), f"per answer, to the reference{why}")


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
    planned, end = run.planned_updates, run.finished_step
    value = f"{run.num_updates:,}" + (f" of {planned:,}" if planned is not None else "")
    seconds = math.fsum(run.series("time/step_s").finite)
    is_short = planned is not None and run.num_updates < planned
    details = ["interrupted or still running" if end is None else "ended early"] if is_short else []
    details += [f"kept: update {run.kept_step:,} of {end:,}"] if kept(run) else []
    details += [duration(seconds)] if seconds else []
    episodes = run.series("episode").finite
    details += [amount(episodes[-1], "answer")] if episodes else []
    return Tile("Updates", value, ", ".join(details) or "no time logged")


def _ends(run: Run) -> tuple[float | None, float | None]:
    series = run.series("objective/scores")
    return series.early, series.late


def _start_and_end(run: Run, evaluated: str, trained: str) -> tuple[float | None, float | None]:
    judged, series = run.judged(evaluated), run.series(trained)
    return (judged[0][1], judged[1][1]) if judged is not None else (series.early, series.late)


def _score_changes(compared: list[Pair]) -> list[float]:
    """Change in score on each prompt that has two finite scores."""
    scores = [(p.before.score, p.after.score) for p in compared if p.after is not None]
    return [b - a for a, b in scores if a is not None and b is not None and math.isfinite(b - a)]


def _standard_error(compared: list[Pair]) -> float | None:
    """Standard error of the mean change in score over the same prompts."""
    changes = _score_changes(compared)
    return statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) >= LEAST_PROMPTS else None
