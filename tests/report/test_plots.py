"""Curves as PNG files."""

import json

import pytest

from tether.report.plots import write_plots


@pytest.mark.parametrize(
    ("rows", "files"),
    [
        (
            [{"step": 1, "loss/policy_avg": 0.1, "loss/value_avg": 0.2, "objective/scores": 1.0, "objective/kl": 0.0}],
            {"training_loss.png", "training_reward.png", "training_kl.png"},
        ),
        (
            [{"step": 1, "loss": 0.7}, {"step": 1, "eval_loss": 0.6, "eval_accuracy": 0.5}],
            {"training_loss.png", "training_eval_loss.png", "training_eval_accuracy.png"},
        ),
        (
            [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 1.9, "eval_mean_token_accuracy": 0.4}],
            {"training_loss.png", "training_eval_loss.png", "training_eval_accuracy.png"},
        ),
        ([{"step": 1, "loss": 0.7}, {"step": 2, "loss": float("nan"), "eval_loss": None}], {"training_loss.png"}),
    ],
)
def test_each_stage_has_the_curves_of_its_metrics(tmp_path, rows, files):
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    assert {path.name for path in write_plots(tmp_path)} == files == {path.name for path in tmp_path.glob("*.png")}
