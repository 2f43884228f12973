"""``tether evaluate``: what it writes, also when it is interrupted."""

import json
import signal

import pytest

from tests.train.runs import tiny_run
from tether import __version__
from tether.errors import ConfigError, RewardError
from tether.inference.evaluate import evaluate_path
from tether.inference.output import write_metrics
from tether.inference.saved import run_config
from tether.metrics.writers import read_jsonl
from tether.train.display import NullDisplay
from tether.train.run import train_policy


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    train_policy(tiny_run(folder, train__max_steps=1, ppo__num_ppo_epochs=1, value__kind="model"))
    return folder


def test_metrics_are_written_with_what_was_measured(run, tmp_path):
    prompts, file = str(run / "prompts.jsonl"), tmp_path / "new" / "metrics.json"
    found = evaluate_path(run / "out", prompts, output=tmp_path / "rows.jsonl", metrics=file)
    record = json.loads(file.read_text())
    assert record["metrics"] == found.metrics and read_jsonl(tmp_path / "rows.jsonl") == found.samples
    assert (record["tether"], record["command"], record["run"]) == (__version__, "evaluate", str(run / "out"))
    assert (record["prompts"], record["num_prompts"], record["seed"]) == (prompts, 5, 0)
    asked = run_config(run / "out")
    assert record["config"] == asked.model_dump(mode="json") and asked.value.kind == "model"
    with pytest.raises(ConfigError, match=r"--metrics: .*metrics\.json exists; name a new file"):
        evaluate_path(run / "out", prompts, metrics=file)
    with pytest.raises(ConfigError, match=r"--output and --metrics: both are .*one\.json, .*; name two files"):
        evaluate_path(run / "out", prompts, output=tmp_path / "one.json", metrics=tmp_path / "new" / ".." / "one.json")


def test_metrics_name_no_key_of_a_service(tmp_path):
    judge = {"type": "http", "url": "http://judge/score?key=secret", "name": "judge"}
    write_metrics(tmp_path / "metrics.json", "evaluate", tiny_run(tmp_path, rewards=[judge]))
    text = (tmp_path / "metrics.json").read_text()
    assert "http://judge/score" in text and "secret" not in text


def ending_with(run, call, code):
    """The run's reward file, which does something else at its second call, the first one with all answers."""
    (run / "rewards.py").write_text(
        "import os\ncalls = []\ndef letters(prompts, completions):\n    calls.append(1)\n"
        f"    if len(calls) == {call}:\n        {code}\n    return [1.0] * len(prompts)\n"
    )


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), {})", "raise RuntimeError('on purpose')"])
def test_answers_are_kept_when_scoring_is_interrupted_or_fails(run, tmp_path, code):
    ending_with(run, 2, code.format(int(signal.SIGTERM)))
    out, metrics = tmp_path / "rows.jsonl", tmp_path / "metrics.json"
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises((KeyboardInterrupt, RewardError), match=r"SIGTERM|on purpose"):
            evaluate_path(run / "out", str(run / "prompts.jsonl"), output=out, metrics=metrics)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = read_jsonl(out)
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4] and not metrics.exists()
    assert all(row["response"] and "score" not in row for row in rows)


def test_answers_that_are_finished_are_kept_when_others_are_not(run, tmp_path):
    ending_with(run, 0, "pass")
    display = NullDisplay()

    def phase(name, done, total):
        if name == "evaluation" and done:
            raise KeyboardInterrupt

    display.phase = phase
    with pytest.raises(KeyboardInterrupt):
        evaluate_path(run / "out", str(run / "prompts.jsonl"), output=tmp_path / "rows.jsonl", display=display)
    rows = read_jsonl(tmp_path / "rows.jsonl")
    assert 0 < len(rows) < 5 and all(row["response"] for row in rows)


def test_answers_and_scores_are_kept_when_what_comes_after_is_interrupted(run, tmp_path, monkeypatch):
    ending_with(run, 0, "pass")

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("tether.train.evaluate.sequence_kl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate_path(run / "out", str(run / "prompts.jsonl"), output=tmp_path / "rows.jsonl")
    rows = read_jsonl(tmp_path / "rows.jsonl")
    assert [row["score"] for row in rows] == [1.0] * 5 and "kl" not in rows[0]
