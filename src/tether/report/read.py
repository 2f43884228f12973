"""Reads the files of a run as numbers and texts. Whatever is missing or damaged becomes a note, never an error."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tether.config.keys import counted
from tether.report.text import prompt_text

CONFIG, METRICS, SAMPLES = "config.yaml", "metrics.jsonl", "samples.jsonl"
FINISHED = "finished.json"
"""File on how a run ended; absent while it runs, or if it was interrupted."""
REWARD_EVALUATION = "reward_eval.json"
"""File with a reward model's results on held-out pairs."""
MISSING = "missing"
"""Component of a reward source whose ``missing`` is set: 1 for an answer that got that score, else 0."""
STAGES = ("sft", "reward")
"""Kinds of runs before PPO."""
TEXT_LIMIT = 4_000
"""Number of characters of a prompt or an answer that are kept; the rest is counted."""
_LARGEST, _SMALLEST = 1e100, 1e-100  # beyond these, sums and squares overflow or vanish


Point = tuple[int, float]
"""An update, and a metric's value at it."""


def is_missing_share(component: str) -> bool:
    """Whether a component of the rewards only marks the answers that a judge gave no score."""
    return component.endswith(f"/{MISSING}")


@dataclass(frozen=True)
class Series:
    """One metric over the run, in the order of the updates."""

    steps: list[int]
    """The update that each value belongs to."""
    values: list[float]
    """The values; NaN where the file's value is not finite."""

    def __bool__(self) -> bool:
        return any(math.isfinite(v) for v in self.values)

    @property
    def points(self) -> list[Point]:
        """(update, value) where the value is finite."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [v for v in self.values if math.isfinite(v)]

    @property
    def early(self) -> float | None:
        """Median of the first three finite values."""
        values = self.finite[:3]
        return statistics.median(values) if values else None

    @property
    def late(self) -> float | None:
        """Median of the last fifth of the finite values, but of at least three."""
        values = self.finite
        return statistics.median(values[-max(3, len(values) // 5) :]) if values else None


@dataclass(frozen=True)
class Sample:
    """One answer of samples.jsonl; texts are shortened to ``TEXT_LIMIT``."""

    step: int
    split: str
    row: int | None
    prompt: str
    response: str
    cut: int
    """Number of characters of the answer beyond the limit."""
    length: float | None
    finish_reason: str
    score: float | None
    rewards: Mapping[str, float]
    kl: float | None


@dataclass
class Run:
    """Everything a report is made from."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    """config.yaml, parsed; empty if that fails."""
    config_text: str | None = None
    """config.yaml as text."""
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of each update; NaN where a value was not finite."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """The same for each evaluation, keyed by the number of updates before it."""
    samples: list[Sample] = field(default_factory=list)
    """Answers, in the order of the file."""
    finished_step: int | None = None
    """Number of updates of a finished run; None while it runs, or if it was interrupted."""
    kept_step: int | None = None
    """Number of updates before the model that a finished run kept: fewer than ``finished_step`` if an earlier model
    replaced the last."""
    ranked: dict[str, float] = field(default_factory=dict)
    """For a reward model, metrics on the held-out pairs, including their number (``pairs``)."""
    notes: list[str] = field(default_factory=list)
    """What is missing or could not be read."""

    @property
    def kind(self) -> Literal["ppo", "sft", "reward"] | None:
        """What was trained; None if config.yaml does not say."""
        data = self.setting("data")
        keys = data.keys() if isinstance(data, dict) else set()
        if "prompts" in keys:
            return "ppo"
        return "reward" if "pairs" in keys else "sft" if "demonstrations" in keys else None

    @property
    def unit(self) -> str:
        """The name of its updates."""
        return "step" if self.kind in STAGES else "update"

    def series(self, name: str) -> Series:
        """One metric of the updates that have it."""
        return _series(self.updates, name)

    def evaluated(self, name: str) -> Series:
        """One metric of the evaluations that have it."""
        return _series(self.evaluations, name)

    def judged(self, name: str) -> tuple[Point, Point] | None:
        """A metric at the first evaluation and at that of the policy the run kept, or the last so far; None without two
        evaluations, or if the latter lacks the metric."""
        points = self.evaluated(name).points
        end = points[-1:] if self.kept_step is None else [point for point in points if point[0] == self.kept_step]
        return (points[0], end[0]) if len(points) >= 2 and end else None

    def at_start(self, evaluated: str, trained: str) -> float | None:
        """The start policy's value: from the evaluation before the first update, else from the first updates."""
        first = self.evaluations.get(0, {}).get(evaluated, math.nan)
        return first if math.isfinite(first) else self.series(trained).early

    @property
    def score_spread(self) -> float | None:
        """Standard deviation of the start policy's scores."""
        for series in (self.evaluated("eval_scores_std"), self.series("objective/scores_std")):
            if series and series.finite[0] > 0:
                return series.finite[0]
        return None

    def names(self) -> list[str]:
        """Every metric of the updates, in order of first appearance."""
        return list(dict.fromkeys(name for line in self.updates.values() for name in line))

    def evaluated_names(self) -> list[str]:
        """Every metric of the evaluations."""
        return list(dict.fromkeys(name for line in self.evaluations.values() for name in line))

    def setting(self, key: str) -> Any:
        """A value of config.yaml by its dotted key; None if there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def count(self, key: str) -> float | None:
        """The same if it is a number, else None."""
        value = _number(self.setting(key))
        return value if value is not None and math.isfinite(value) else None

    @property
    def num_updates(self) -> int:
        """Number of updates done."""
        return max(self.updates, default=0)

    @property
    def num_held_out(self) -> int:
        """Number of held-out prompts whose answers were kept."""
        return len({sample.row for sample in self.samples if sample.split == "eval"})

    @property
    def planned_updates(self) -> int | None:
        """Number of updates that the configuration plans; None if that depends on the number of prompts."""
        if steps := self.count("train.max_steps"):
            return int(steps)
        episodes, batch = self.count("train.total_episodes"), self.count("train.rollout_batch_size")
        return math.ceil(episodes / batch) if episodes and batch and batch > 0 else None


def read_run(folder: Path, *, end: Path | None = None) -> Run:
    """Reads config.yaml, metrics.jsonl, samples.jsonl, finished.json and reward_eval.json of a run, as far as its kind
    has them.

    Args:
        end: folder of finished.json while the run's last files are not in their place yet.
    """
    run = Run(folder)
    _read_config(run)
    _read_metrics(run)
    _read_end(run, end or folder)
    if run.kind in STAGES:
        _read_ranked(run)
    else:
        _read_samples(run)
    return run


def read_settings(folder: Path) -> Run:
    """Reads only config.yaml of a run."""
    run = Run(folder)
    _read_config(run)
    return run


def _series(lines: Mapping[int, Mapping[str, float]], name: str) -> Series:
    steps = [step for step in sorted(lines) if name in lines[step]]
    return Series(steps, [lines[step][name] for step in steps])


def _read_config(run: Run) -> None:
    try:
        text = (run.folder / CONFIG).read_bytes().decode(errors="replace")
    except FileNotFoundError:
        run.notes.append(f"{CONFIG} is missing: settings are not shown, and thresholds assume the default settings.")
        return
    except OSError as error:
        run.notes.append(f"{CONFIG} cannot be read: {error.strerror}.")
        return
    run.config_text = text
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        config = None
    if isinstance(config, dict):
        run.config = config
    else:
        run.notes.append(f"{CONFIG} is not a YAML mapping: it is not shown, because it may contain API keys.")


def _read_end(run: Run, folder: Path) -> None:
    end = _read_object(folder / FINISHED)
    run.finished_step, run.kept_step = _step(end.get("step")), _step(end.get("kept_step"))


def _read_ranked(run: Run) -> None:
    evaluation = _read_object(run.folder / REWARD_EVALUATION)
    metrics, rows = evaluation.get("metrics"), evaluation.get("pairs")
    if isinstance(metrics, dict) and isinstance(rows, list):
        run.ranked = {k: v for k, x in metrics.items() if (v := _number(x)) is not None} | {"pairs": float(len(rows))}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one, without a note, if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes().decode(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_metrics(run: Run) -> None:
    def take(line: dict[str, Any]) -> bool:
        step = _step(line.get("step"))
        if step is None:
            return False
        numbers = {k: v for k, x in line.items() if k != "step" and (v := _number(x)) is not None}
        if any(name.startswith("eval_") for name in line):
            run.evaluations[step] = numbers
        elif numbers and step > 0:
            run.updates[step] = numbers
        return True

    _read_lines(run, METRICS, take, without="curves and the health check are omitted")
    if not run.updates and (run.folder / METRICS).exists():
        run.notes.append(f"{METRICS} has no finished {run.unit}.")


def _read_samples(run: Run) -> None:
    def take(line: dict[str, Any]) -> bool:
        step = _step(line.get("step"))
        if step is None:
            return False
        response = _text(line.get("response"))
        rewards = line.get("rewards")
        run.samples.append(
            Sample(
                step=step,
                split=_text(line.get("split")),
                row=_step(line.get("row")),
                prompt=prompt_text(line.get("prompt") or _text(line.get("query")))[:TEXT_LIMIT],
                response=response[:TEXT_LIMIT],
                cut=max(0, len(response) - TEXT_LIMIT),
                length=_number(line.get("length")),
                finish_reason=_text(line.get("finish_reason")),
                score=_number(line.get("score")),
                rewards={k: v for k, x in rewards.items() if (v := _number(x)) is not None}
                if isinstance(rewards, dict)
                else {},
                kl=_number(line.get("kl")) if line.get("kl") is not None else None,
            )
        )
        return True

    _read_lines(run, SAMPLES, take, without="answers are omitted")


def _read_lines(run: Run, name: str, take: Callable[[dict[str, Any]], bool], *, without: str) -> None:
    """Passes each readable line of a file to ``take``; anything missing, torn or unreadable becomes a note."""
    path, bad, last = run.folder / name, [], 0
    try:
        for last, line in _json_lines(path):
            if line is None or not take(line):
                bad.append(last)
    except FileNotFoundError:
        run.notes.append(f"{name} is missing: {without}.")
        return
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror}): {without}.")
        return
    if bad and bad[-1] == last:
        run.notes.append(f"The last line of {name} is incomplete: the run was interrupted, or is still writing.")
        bad.pop()
    if bad:
        run.notes.append(f"{name}: {counted(len(bad), 'unreadable line')}; the first is line {bad[0]}.")


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, object) of each line that is not blank; None for a line that is not a JSON object."""
    with path.open("rb") as file:
        for i, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                line = json.loads(raw.decode(errors="replace"))
            except (ValueError, RecursionError):
                line = None
            yield i, line if isinstance(line, dict) else None


def _number(value: Any) -> float | None:
    """A number as float; NaN for null and for values that are not finite or absurdly large; None for anything that is
    not a number."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) <= _LARGEST:
        return math.nan
    return float(value) if abs(value) >= _SMALLEST else 0.0


def _step(value: Any) -> int | None:
    """A count of updates, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e12:
        return None
    return int(value) if value == int(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
