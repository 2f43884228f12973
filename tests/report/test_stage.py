"""The report of a run before PPO."""

import json

import pytest

from tests.report.runs import reward_run, sft_run
from tests.report.test_html import report
from tether.report import stage
from tether.report.health import diagnose
from tether.report.read import read_run

PPO = ("policy", "KL", "Better answers", "Held-out answers", "Clip fraction", "samples.jsonl", "update")


def test_the_page_of_demonstrations_has_loss_accuracy_and_rate_and_nothing_of_ppo(tmp_path):
    text = report(sft_run(tmp_path)).text
    shown = text.partition("Numbers and settings")[0]
    for words in (
        "Did the model learn from the demonstrations? Yes. The held-out loss fell by 17 %.",
        "From 3 after 10 steps to 2.5 after 20 steps", "tiny · all weights · mine.jsonl · 8 rows per step",
        "Held-out loss3 → 2.5", "Token accuracy24 % → 57 %", "Learning rate9.5e−5", "Gradient norm", "2 ok",
    ):  # fmt: skip
        assert words in shown, words
    assert [word for word in PPO if word in shown] == []
    assert "All 6 metrics of the steps" in text


def test_the_page_of_pairs_has_accuracy_on_held_out_ones(tmp_path):
    text = report(reward_run(tmp_path)).text
    shown = text.partition("Numbers and settings")[0]
    for words in (
        "Does the model rank answers as the pairs do? Yes. Of 100 held-out pairs, it ranks 80 % correctly.",
        "Guessing would be right for 40 % to 60 %.", "tiny · LoRA · org/pairs",
        "Held-out pair accuracy80 %of 100 pairs",
        "Pair accuracy", "Margin",
    ):  # fmt: skip
        assert words in shown, words
    assert [word for word in PPO if word in shown] == []


@pytest.mark.parametrize(
    ("held_out", "level"),
    [((3.0, 2.0), "ok"), ((3.0, 2.0, 2.5), "warn"), ((2.0, 2.01), "act"), ((3.0,), "info"), ((), "info")],
)
def test_demonstrations_are_foreseen_by_the_held_out_loss(tmp_path, held_out, level):
    run = read_run(sft_run(tmp_path, held_out))
    assert stage.verdict(run).level == level
    assert run.updates[20]["loss"] == 2.0


def test_the_loss_is_that_of_the_model_the_run_kept(tmp_path):
    folder = sft_run(tmp_path, (3.0, 2.0, 2.5))
    first, best, last = sorted(read_run(folder).evaluations)
    assert "Keep it: train.metric_for_best_model: eval_loss" in stage.verdict(read_run(folder)).detail
    (folder / "finished.json").write_text(json.dumps({"step": last, "kept_step": best}))
    found = stage.verdict(read_run(folder))
    assert (found.level, found.sentence) == ("ok", "The held-out loss fell by 33 %.")
    assert f"The run kept the model after step {best} of {last}, the best by " in found.detail
    shown = report(folder).text
    assert "Held-out loss3 → 2" in shown and f"kept: step {best}" in shown
    (folder / "finished.json").write_text(json.dumps({"step": last, "kept_step": first}))
    sft_run(tmp_path, (2.0, 2.01, 2.5))
    assert stage.verdict(read_run(folder)).sentence.startswith("The first model that was evaluated was kept")


@pytest.mark.parametrize(
    ("accuracy", "pairs", "level"),
    [(0.8, 100, "ok"), (0.55, 100, "warn"), (0.55, 10_000, "ok"), (0.3, 100, "act"), (0.9, 0, "info")],
)
def test_pairs_are_ranked_beyond_the_noise_of_guesses(tmp_path, accuracy, pairs, level):
    assert stage.verdict(read_run(reward_run(tmp_path, accuracy, pairs))).level == level


def test_what_is_missing_or_damaged_is_no_error(tmp_path):
    (reward_run(tmp_path) / "reward_eval.json").write_text("[1")
    assert "Not known. At the end of training it ranked" in report(tmp_path).text
    (tmp_path / "metrics.jsonl").unlink()
    text = report(tmp_path).text
    assert "metrics.jsonl is missing" in text and "samples.jsonl is missing" not in text


def test_a_stage_is_judged_by_its_own_rules(tmp_path):
    assert {finding.metric for finding in diagnose(read_run(sft_run(tmp_path)))} == {"grad_norm", "all metrics"}
