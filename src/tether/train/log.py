"""The log of a run: metrics.jsonl, samples.jsonl, trackers, and the display."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tether.config.keys import counted
from tether.metrics.history import History
from tether.metrics.trackers import Trackers
from tether.metrics.writers import JsonlWriter, write_whole
from tether.models.checkpoints import METRICS
from tether.report.read import FINISHED
from tether.report.text import number, percent
from tether.train.display import Display
from tether.train.rollout import Answers, Judged

SAMPLES = "samples.jsonl"
SHOWN_SAMPLES = 4
NEGATIVE_KL = (
    "a KL below 0 is no error: it is estimated from the answers, and while the KL is near 0, chance may take the "
    "estimate below 0"
)


class RunLog:
    """Writes every update to metrics.jsonl, displays it, and sends every ``logging_steps``-th to the trackers.

    Args:
        folder: the run's output folder; None in a process that writes nothing.
        display: what the user sees.
        trackers: TensorBoard and the like.
        logging_steps: number of updates between two entries in the trackers; the last update is always logged.
    """

    def __init__(self, folder: Path | None, display: Display, trackers: Trackers, *, logging_steps: int) -> None:
        self.display, self.trackers, self.logging_steps = display, trackers, logging_steps
        self._folder = folder
        self._told: set[str] = set()
        self._updates = History()
        self.evaluations: list[dict[str, float]] = []

    @cached_property
    def _metrics(self) -> JsonlWriter | None:
        """Created with the first line: until then, files of an earlier run may exist."""
        return self._folder and JsonlWriter(self._folder / METRICS)

    @cached_property
    def _samples(self) -> JsonlWriter | None:
        return self._folder and JsonlWriter(self._folder / SAMPLES)

    @property
    def updates(self) -> list[dict[str, float]]:
        """Metrics of every update so far."""
        return [line | {"step": int(line["step"])} for line in self._updates]

    def phase(self, name: str, done: int, total: int) -> None:
        """Shows the progress of the current phase."""
        self.display.phase(name, done, total)

    def update(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a finished update."""
        line = {"step": step, **metrics}
        if self._metrics is not None:
            self._metrics.write(line)
        self._updates.append(line)
        if step % self.logging_steps == 0 or step == total:
            self.trackers.log(dict(metrics), step)
        self.display.update(step, total, metrics)
        self._explain_kl(metrics.get("objective/kl"))

    def evaluation(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Records an evaluation with all its answers, and shows a few."""
        line = {"step": step, **metrics}
        if self._metrics is not None:
            self._metrics.write(line)
        self.evaluations.append(line)
        if self._samples is not None:
            self._samples.write_all({"step": step, "split": "eval", **sample} for sample in samples)
        self.trackers.log(dict(metrics), step)
        self.display.message(f"evaluation after {counted(step, 'update')}: {_summary(metrics)}")
        self._explain_kl(metrics.get("eval_kl"))
        self.display.samples(list(samples[:SHOWN_SAMPLES]))

    def samples(self, step: int, answers: Answers, judged: Judged, *, limit: int) -> None:
        """Records the first ``limit`` answers of an update's rollout."""
        if self._samples is None:
            return
        rows = range(min(limit, len(answers.texts)))
        self._samples.write_all({"step": step, "split": "train", **judged.sample(i, answers), "kl": None} for i in rows)

    def finished(self, step: int, kept_step: int, read: Mapping[str, str]) -> None:
        """Records that the run finished.

        Args:
            step: number of updates of the run.
            kept_step: number of updates that the kept policy was trained for.
            read: ``fingerprints`` of what the run read.
        """
        if self._folder is not None:
            end = {"step": step, "kept_step": kept_step, "data": dict(read)}
            write_whole(self._folder / FINISHED, json.dumps(end).encode() + b"\n")

    def message(self, text: str) -> None:
        """Shows one line."""
        self.display.message(text)

    def warn_once(self, text: str) -> None:
        """Shows a warning, unless it was shown before."""
        self._tell_once(f"warning: {text}")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.display.message(text)

    def _explain_kl(self, kl: float | None) -> None:
        if kl is not None and kl < 0:
            self._tell_once(NEGATIVE_KL)

    def close(self) -> None:
        """Closes trackers and display."""
        self.trackers.close()
        self.display.close()


def _summary(metrics: Mapping[str, float]) -> str:
    shown = {"eval_scores": "reward", "eval_kl": "KL", "eval_length": "tokens per answer"}
    parts = [f"{label} {number(metrics[name])}" for name, label in shown.items() if name in metrics]
    ended = metrics.get("eval_eos_rate")
    return ", ".join([*parts, *([] if ended is None else [f"{percent(ended)} of the answers ended by themselves"])])
