"""Curves of a run as PNG files, for pasting elsewhere; report.html has them all."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

from tether.errors import ConfigError
from tether.report.read import METRICS

PLOTS = {
    "training_loss.png": ("loss/policy_avg", "loss/value_avg", "loss", "train/loss"),
    "training_reward.png": ("objective/scores",),
    "training_kl.png": ("objective/kl",),
    "training_eval_loss.png": ("eval_loss",),
    "training_eval_accuracy.png": ("eval_accuracy", "eval_mean_token_accuracy"),
}
"""Metrics shown in each file, as far as the run's stage has them."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(folder: Path) -> list[Path]:
    """Draws the curves in a folder's metrics.jsonl and returns the files; none for metrics that it lacks.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot, so that no window opens and no global state changes
    except ModuleNotFoundError:
        raise ConfigError("plots need matplotlib: pip install 'tether[plot]'") from None
    written = []
    for name, metrics in PLOTS.items():
        curves = {metric: curve for metric in metrics if (curve := _curve(folder / METRICS, metric))}
        if not curves:
            continue
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        for metric, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=metric)
        axes.legend()
        figure.savefig(folder / name, dpi=120)
        written.append(folder / name)
    return written


def _curve(file: Path, metric: str) -> list[tuple[float, float]]:
    """(step, value) pairs where the metric is finite."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    points = [(line["step"], line[metric]) for line in lines if isinstance(line.get(metric), int | float)]
    return [(step, value) for step, value in points if math.isfinite(value)]
