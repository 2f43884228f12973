"""``norm: auto``: each source on the scale of its own scores of the start policy, measured once, kept and resumed."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from tests.train.runs import tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tether.config.load import parse_config
from tether.config.source import SourceConfig
from tether.errors import ConfigError, TrainingError
from tether.inference.evaluate import evaluate_path
from tether.inference.judges import check_sources
from tether.metrics.writers import read_jsonl
from tether.train.norms import read_norms
from tether.train.run import train_policy

SAMPLES = 12
JUDGES = '''
import json
from pathlib import Path


def noted(name, scores):
    with (Path(__file__).parent / "asked.jsonl").open("a") as file:
        file.write(json.dumps([name, scores]) + "\\n")
    return scores


def letters(prompts, completions):
    return noted("letters", [100 + 3.0 * len(text) for text in completions])


def words(prompts, completions):
    return noted("words", [-len(set(text.split())) / 7 for text in completions])


def steps(prompts, completions):
    return noted("steps", [[[1, 0.5], [len(text), len(text) / 5]] if len(text) > 1 else 0.0 for text in completions])


def flat(prompts, completions):
    return [2.5] * len(completions)
'''


def section(folder, name, **keys):
    return {"type": "function", "path": str(folder / "judges.py"), "name": name} | keys


def auto_run(folder, rewards, **changes):
    (folder / "judges.py").write_text(JUDGES, encoding="utf-8")
    changes = {"ppo__score_norm_samples": SAMPLES, "train__max_steps": 2, "ppo__num_ppo_epochs": 1} | changes
    return tiny_run(folder, rewards=rewards, data__eval_prompts=str(folder / "prompts.jsonl"), **changes)


def asked_so_far(folder):
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]


def norm_of(scores):
    return statistics.fmean(scores), math.sqrt(statistics.pvariance(scores) + 1e-8)


def sums(scores):
    return [sum(score for _, score in entry) if isinstance(entry, list) else entry for entry in scores]


def test_sources_are_measured_once_and_counted_by_what_was_measured(tmp_path):
    rewards = [
        section(tmp_path, "letters", norm="auto", weight=0.5, clip=1.5),
        section(tmp_path, "words", norm="auto", weight=-2.0),
        section(tmp_path, "steps", norm=[1.0, 2.0]),
    ]
    result = train_policy(auto_run(tmp_path, rewards))
    asked = [(name, sums(scores)) for name, scores in asked_so_far(tmp_path)]
    tried, asked = asked[:3], asked[3:]
    assert [(name, len(scores)) for name, scores in tried] == [("letters", 2), ("words", 2), ("steps", 2)]
    assert [(name, len(scores)) for name, scores in asked[:2]] == [("letters", SAMPLES), ("words", SAMPLES)]
    (mean, std), (word_mean, word_std) = (norm_of(scores) for _, scores in asked[:2])
    rollouts = [dict(asked[at : at + 3]) for at in (5, 8)]  # after the measure and an evaluation
    for row, said in zip(result.updates, rollouts, strict=True):
        counted = [
            0.5 * min(max((a - mean) / std, -1.5), 1.5) - 2 * (b - word_mean) / word_std + (c - 1) / 2
            for a, b, c in zip(said["letters"], said["words"], said["steps"], strict=True)
        ]
        assert row["objective/scores"] == pytest.approx(statistics.fmean(counted), abs=1e-5)
        assert row["rewards/letters"] == pytest.approx(statistics.fmean(said["letters"]), abs=1e-4)
    saved = json.loads((result.output_dir / "score_norm.json").read_text())["sources"]
    assert {name: each["count"] for name, each in saved.items()} == {"letters": SAMPLES, "words": SAMPLES}
    assert saved["letters"]["mean"] == pytest.approx(mean) and saved["words"]["mean"] == pytest.approx(word_mean)
    again = evaluate_path(result.output_dir).metrics
    expected = {name: value for name, value in result.evaluations[-1].items() if name != "step"}
    assert again == pytest.approx(expected, abs=1e-5)


def test_an_ensemble_is_measured_after_its_members_and_the_sum_after_both(tmp_path):
    members = [section(tmp_path, "letters", norm="auto"), section(tmp_path, "words", norm="auto", weight=-1)]
    rewards = [{"type": "ensemble", "name": "jury", "reduce": "min", "members": members, "norm": "auto"}]
    result = train_policy(auto_run(tmp_path, rewards, ppo__score_norm="frozen", train__max_steps=1))
    asked = [(name, scores) for name, scores in asked_so_far(tmp_path) if len(scores) == SAMPLES]
    said = dict(asked[:2])
    assert all(scores == said[name] for name, scores in asked)
    (mean, std), (word_mean, word_std) = norm_of(said["letters"]), norm_of(said["words"])
    jury = [
        min((a - mean) / std, -(b - word_mean) / word_std)
        for a, b in zip(said["letters"], said["words"], strict=True)
    ]
    norms = json.loads((result.output_dir / "score_norm.json").read_text())
    assert norms["sources"].keys() == {"jury", "jury/letters", "jury/words"}
    assert norms["sources"]["jury"]["mean"] == pytest.approx(statistics.fmean(jury))
    assert norms["sources"]["jury"]["var"] == pytest.approx(statistics.pvariance(jury))
    assert norms["mean"] == pytest.approx(0.0, abs=1e-6) and norms["var"] == pytest.approx(1.0, abs=1e-5)


def test_a_run_that_goes_on_has_the_same_norms_and_is_bitwise_the_straight_one(tmp_path):
    rewards = [section(tmp_path, "letters", norm="auto"), section(tmp_path, "steps", norm="auto")]
    ours, theirs = tmp_path / "parts", tmp_path / "whole"
    constant = {"train__lr_scheduler_type": "constant", "train__save_steps": 1}
    train_policy(auto_run(tmp_path, rewards, output_dir=str(theirs), **constant))
    train_policy(auto_run(tmp_path, rewards, output_dir=str(ours), train__max_steps=1, **constant))
    (tmp_path / "asked.jsonl").unlink()
    train_policy(auto_run(tmp_path, rewards, output_dir=str(ours), resume=True, **constant))
    assert all(len(scores) != SAMPLES for _, scores in asked_so_far(tmp_path))
    assert (ours / "score_norm.json").read_text() == (theirs / "score_norm.json").read_text()
    for our, their in zip(reproducible(ours)[-2:], reproducible(theirs)[-2:], strict=True):  # an update, an evaluation
        assert our["step"] == 2 and our == their
    assert_same_weights(weights(ours), weights(theirs))


def test_scores_without_any_spread_are_refused_by_the_sources_name(tmp_path):
    rewards = [section(tmp_path, "letters", norm="auto"), section(tmp_path, "flat", norm="auto")]
    told = r"^norm auto of the reward flat: all 12 answers of the start policy have the score 2\.5, .* Leave norm out"
    with pytest.raises(TrainingError, match=told):
        train_policy(auto_run(tmp_path, rewards))


def test_without_a_run_there_is_nothing_to_measure(tmp_path):
    sources = SourceConfig.model_validate({"rewards": [{"type": "regex", "pattern": "a", "norm": "auto"}]})
    with pytest.raises(ConfigError, match=r"^rewards\.0\.norm auto is measured .* set it to \[mean, std\]"):
        check_sources(sources)


@pytest.mark.parametrize("norm", ["atuo", "[1]", "[0, 0]", "1.5"])
def test_what_is_no_norm_is_refused(norm):
    run = "model: {path: m}\ndata: {prompts: p}\ntrain: {max_steps: 1}\noutput_dir: o\nrewards:\n"
    with pytest.raises(ConfigError, match=r"rewards\.0\.norm"):
        parse_config(f"{run}- {{type: regex, pattern: a, norm: {norm}}}")


@pytest.mark.parametrize("kept", [True, False], ids=["ended", "killed"])
def test_a_checkpoint_is_evaluated_by_the_norms_of_its_runs_evaluations(tmp_path, kept):
    """Which are in no file of their own where the run was killed."""
    moving = {"ppo__score_norm": "running", "train__eval_steps": 1, "train__save_steps": 1}
    moving |= {"train__learning_rate": 0.05, "train__lr_scheduler_type": "constant"}
    rewards = [section(tmp_path, "letters", norm="auto")]
    out = train_policy(auto_run(tmp_path, rewards, train__max_steps=3, **moving)).output_dir
    if not kept:
        (out / "score_norm.json").unlink()
    logged = {row["step"]: row["eval_scores"] for row in read_jsonl(out / "metrics.jsonl") if "eval_scores" in row}
    for step in (1, 2):
        assert evaluate_path(out / f"checkpoint-{step}").metrics["eval_scores"] == pytest.approx(logged[step], abs=1e-5)
    assert len(set(logged.values())) == len(logged)


@pytest.mark.parametrize("content", ['{"count": 4', "[]", '{"number": 4}'])
def test_norms_that_cannot_be_read_are_named(tmp_path, content):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "score_norm.json").write_text(content)
    with pytest.raises(ConfigError, match=r"score_norm\.json: what normalizes the run's scores cannot be read"):
        read_norms(tmp_path)
    state = tmp_path / "checkpoint-1" / "tether_state" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(content)
    with pytest.raises(ConfigError, match=r"state\.json: what normalizes the run's scores cannot be read"):
        read_norms(tmp_path / "checkpoint-1")
