"""``tether sft`` and ``tether reward`` keep the best evaluated model if they are asked to, and end early."""

import json
import shutil

import pytest
import torch
from pydantic import ValidationError
from transformers import MixtralConfig, MixtralForCausalLM

from tests.stages.test_reward_stage import held_out, stage_config
from tests.stages.test_sft import stage, weights
from tether.config.reward_stage import RewardStageConfig
from tether.config.sft_stage import SftStageConfig
from tether.errors import CheckpointError, ConfigError
from tether.metrics.writers import read_jsonl
from tether.models.saving import verify_manifest
from tether.pipeline import _state
from tether.report.html import write_report
from tether.report.read import read_run
from tether.stages.engine import load_weights
from tether.stages.reward import train_reward_model
from tether.stages.sft import train_sft

HELD_OUT = {"eval_fraction": 0.2}
WORST = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}
"""Keeps the model with the largest loss, which in a run that learns is the first that was evaluated."""


def best_stage(folder, *, out="out", **changes):
    usual = {"max_steps": 8, "eval_steps": 2, "save_total_limit": None, **WORST}
    lora = changes.pop("lora", None)
    return stage(folder, out=out, data=HELD_OUT, lora=lora, **usual | changes)


def evaluated(config, name="eval_loss"):
    """The metric after each step that was evaluated."""
    rows = read_jsonl(config.output_dir / "metrics.jsonl")
    return {row["step"]: row[name] for row in rows if name in row}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("how", [{}, {"lora": {"r": 4}}], ids=["full", "lora"])
def test_the_best_evaluated_model_is_kept_and_told(tmp_path, how):
    config = best_stage(tmp_path, save_steps=3, **how)
    told = []
    result = train_sft(config, tell=told.append)
    losses = evaluated(config)
    assert list(losses) == [2, 4, 6, 8] and losses[2] == max(losses.values())
    root = weights(config.output_dir)
    assert same(root, weights(config.output_dir / "checkpoint-2"))
    assert not same(root, weights(config.output_dir / "checkpoint-8"))
    assert result.metrics["eval_loss"] == losses[2]
    verify_manifest(config.output_dir)
    assert told[-1].startswith("kept: the model after step 2 of 8, with the best eval_loss, ")
    sentence = "The run kept the model after step 2 of 8, the best by eval"
    assert sentence in (config.output_dir / "README.md").read_text().replace("\\", "")
    assert sentence in write_report(config.output_dir).read_text()
    run = read_run(config.output_dir)
    assert (run.kept_step, run.finished_step) == (2, 8)
    assert _state(config) == "finished"


def test_the_smaller_loss_is_the_better_one_and_the_last_model_is_kept_unless_asked(tmp_path):
    config = best_stage(tmp_path, greater_is_better=None, load_best_model_at_end=False, save_total_limit=1)
    seen = set()
    train_sft(config, on_progress=lambda *_: seen.update(path.name for path in config.output_dir.glob("checkpoint-*")))
    losses = evaluated(config)
    assert sorted(losses.values(), reverse=True) == list(losses.values())
    assert seen >= {"checkpoint-2", "checkpoint-4", "checkpoint-6"}, "each was the best when it was evaluated"
    assert losses[8] == min(losses.values())
    assert [path.name for path in config.output_dir.glob("checkpoint-*")] == ["checkpoint-8"]
    assert same(weights(config.output_dir), weights(config.output_dir / "checkpoint-8"))


def test_the_best_may_be_that_of_the_most_likely_tokens(tmp_path):
    config = best_stage(tmp_path, metric_for_best_model="eval_mean_token_accuracy", greater_is_better=None)
    result = train_sft(config)
    shares = evaluated(config, "eval_mean_token_accuracy")
    best = max(shares, key=shares.get)  # the first of equals
    assert read_run(config.output_dir).kept_step == best
    assert result.metrics["eval_mean_token_accuracy"] == shares[best]


def test_the_best_of_a_run_without_it_is_its_last_model(tmp_path):
    config = stage(tmp_path, max_steps=4, data=HELD_OUT, eval_steps=2)
    train_sft(config)
    assert not list(config.output_dir.glob("checkpoint-*"))
    assert json.loads((config.output_dir / "finished.json").read_text()) == {"step": 4, "kept_step": 4}
    assert "The run kept" not in (config.output_dir / "README.md").read_text()


@pytest.mark.parametrize("how", [{}, {"lora": {"r": 4}}], ids=["full", "lora"])
@pytest.mark.parametrize("moves", ["stays", "moved", "copied"])
def test_a_resumed_run_keeps_the_best_seen_before(tmp_path, how, moves):
    train_sft(best_stage(tmp_path, out="straight", **how))
    stopped = best_stage(tmp_path, out="stopped", save_total_limit=1, **how)
    asked = iter([None] * 4 + ["SIGTERM"])
    assert train_sft(stopped, stop=lambda: next(asked)).interrupted == "SIGTERM"
    names = sorted(path.name for path in stopped.output_dir.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-5"]  # the best, and the state to go on from
    out = "stopped" if moves == "stays" else "elsewhere"
    if moves == "moved":
        (tmp_path / "stopped").rename(tmp_path / out)
    elif moves == "copied":
        shutil.copytree(tmp_path / "stopped", tmp_path / out)
        (tmp_path / "stopped/checkpoint-2" / next((tmp_path / out / "checkpoint-2").glob("*model.safetensors")).name
         ).write_bytes(b"not the weights any more")  # fmt: skip
    resumed = best_stage(tmp_path, out=out, save_total_limit=1, **how).model_copy(update={"resume": True})
    train_sft(resumed)
    assert same(weights(tmp_path / out), weights(tmp_path / "straight"))
    assert read_run(tmp_path / out).kept_step == 2


def test_a_run_that_goes_on_elsewhere_finds_the_best_where_it_was(tmp_path):
    stopped = best_stage(tmp_path, out="stopped")
    asked = iter([None] * 4 + ["SIGTERM"])
    train_sft(stopped, stop=lambda: next(asked))
    other = {"resume": str(stopped.output_dir / "checkpoint-5"), "output_dir": tmp_path / "other"}
    asked = iter([None, "SIGTERM"])
    assert train_sft(stopped.model_copy(update=other), stop=lambda: next(asked)).interrupted == "SIGTERM"
    train_sft(stopped.model_copy(update=other | {"resume": True}))
    assert same(weights(tmp_path / "other"), weights(stopped.output_dir / "checkpoint-2"))


def test_a_best_checkpoint_that_is_gone_is_told_and_the_best_from_there_on_is_kept(tmp_path):
    stopped = best_stage(tmp_path)
    asked = iter([None] * 4 + ["SIGTERM"])
    train_sft(stopped, stop=lambda: next(asked))
    shutil.rmtree(stopped.output_dir / "checkpoint-2")
    told = []
    train_sft(stopped.model_copy(update={"resume": True}), tell=told.append)
    assert any(text.startswith("warning: checkpoint-2, the best so far, is not there any more") for text in told)
    assert same(weights(stopped.output_dir), weights(stopped.output_dir / "checkpoint-6"))


def test_a_best_checkpoint_that_cannot_be_read_at_the_end_leaves_the_last_model(tmp_path):
    config = best_stage(tmp_path)
    told = []

    def damage(step, steps, logs):
        if step == 5:
            next((config.output_dir / "checkpoint-2").glob("*model.safetensors")).write_bytes(b"damaged")

    train_sft(config, tell=told.append, on_progress=damage)
    assert told[-1].startswith("warning: ") and told[-1].endswith("the last step is kept instead of the best one")
    assert same(weights(config.output_dir), weights(config.output_dir / "checkpoint-8"))
    assert read_run(config.output_dir).kept_step == 8


def test_a_run_that_does_not_improve_ends_early_also_if_it_was_resumed(tmp_path):
    straight = best_stage(tmp_path, out="straight", early_stopping_patience=2)
    told, asked = [], iter([None] * 5 + ["SIGTERM"])  # in the last step, after which there is nothing to go on with
    assert train_sft(straight, tell=told.append, stop=lambda: next(asked)).interrupted is None
    assert list(evaluated(straight)) == [2, 4, 6]
    assert "ends after step 6: 2 evaluations in a row without a better eval_loss" in told
    stopped = best_stage(tmp_path, out="stopped", early_stopping_patience=2)
    asked = iter([None] * 4 + ["SIGTERM"])
    assert train_sft(stopped, stop=lambda: next(asked)).interrupted == "SIGTERM"
    train_sft(stopped.model_copy(update={"resume": True}))
    assert list(evaluated(stopped)) == [2, 4, 6]
    assert same(weights(stopped.output_dir), weights(straight.output_dir))
    assert (read_run(stopped.output_dir).kept_step, read_run(stopped.output_dir).finished_step) == (2, 6)


@pytest.mark.parametrize(
    ("change", "kept"),
    [({"load_best_model_at_end": True}, 2), ({"load_best_model_at_end": True, "greater_is_better": False}, 8)],
    ids=["same criterion", "other criterion"],
)
def test_a_resumed_run_may_choose_the_best_otherwise(tmp_path, change, kept):
    """By the criterion of its checkpoints, not of the last start, which may have ended before it saved one."""
    stopped = best_stage(tmp_path, load_best_model_at_end=False)
    asked = iter([None] * 4 + ["SIGTERM"])
    assert train_sft(stopped, stop=lambda: next(asked)).interrupted == "SIGTERM"

    def killed(step, steps, logs):
        raise KeyboardInterrupt

    other, told = best_stage(tmp_path, **change).model_copy(update={"resume": True}), []
    with pytest.raises(KeyboardInterrupt):
        train_sft(other, on_progress=killed)
    train_sft(other, tell=told.append)
    assert read_run(other.output_dir).kept_step == kept
    forgotten = "warning: checkpoint-2, the best so far, was chosen by another criterion; the best from here on is kept"
    assert (forgotten in told) == ("greater_is_better" in change)
    last = best_stage(tmp_path, **change | {"load_best_model_at_end": False})
    with pytest.raises(CheckpointError, match=r"belongs to another run: train\.load_best_model_at_end True → False"):
        train_sft(last.model_copy(update={"resume": "auto"}))
    with pytest.raises(ConfigError, match=r"holds this stage with a different train\.load_best_model_at_end"):
        _state(last)


def test_a_resumed_run_may_end_early(tmp_path):
    stopped = best_stage(tmp_path)
    asked = iter([None] * 4 + ["SIGTERM"])
    train_sft(stopped, stop=lambda: next(asked))
    train_sft(best_stage(tmp_path, early_stopping_patience=2).model_copy(update={"resume": True}))
    assert list(evaluated(stopped)) == [2, 4, 6]


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
def test_a_reward_model_is_the_best_and_its_rewards_are_those_of_the_file(tmp_path, lora):
    train = {"num_train_epochs": None, "max_steps": 6, "eval_steps": 2, "save_total_limit": None}
    config = stage_config(tmp_path, lora=lora, **train, **WORST)
    result = train_reward_model(config)
    losses = evaluated(config)
    assert losses[2] == max(losses.values())
    assert same(weights(config.output_dir), weights(config.output_dir / "checkpoint-2"))
    saved = json.loads((config.output_dir / "reward_eval.json").read_text())["metrics"]
    for name in ("loss", "accuracy", "margin"):
        assert saved[name] == pytest.approx(evaluated(config, f"eval_{name}")[2], abs=1e-6)
        assert result.metrics[f"eval_{name}"] == saved[name]
    assert len({reward for _, reward in held_out(config)}) > 1
    assert read_run(config.output_dir).kept_step == 2


def test_the_best_is_loaded_also_where_names_in_files_are_not_those_in_memory(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=32, num_key_value_heads=1, num_local_experts=2, **shape)
    best, last = MixtralForCausalLM(config), MixtralForCausalLM(config)
    best.save_pretrained(tmp_path)
    assert weights(tmp_path).keys() != best.state_dict().keys()
    load_weights(last, tmp_path)
    assert same(last.state_dict(), best.state_dict())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"metric_for_best_model": "eval_los"}, r"metric_for_best_model: got eval_los, wanted one of eval_loss, eval_"),
        ({"metric_for_best_model": "loss"}, r"metric_for_best_model: got loss, wanted one of eval_loss, eval_"),
        ({"metric_for_best_model": "eval_loss", "eval_steps": None}, r"eval_loss needs train\.eval_steps"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs metric_for_best_model, for example eval_loss"),
        ({"early_stopping_patience": 2}, "early_stopping_patience needs metric_for_best_model"),
        ({"greater_is_better": False}, "greater_is_better false: no evaluation is compared: set metric_for_best_model"),
    ],
)
@pytest.mark.parametrize("kind", [SftStageConfig, RewardStageConfig])
def test_what_does_not_fit_is_refused(kind, train, message):
    data = {kind.ROWS: "rows.jsonl", "eval_fraction": 0.5}
    given = {"model": {"path": "m"}, "data": data, "output_dir": "out", "train": {"eval_steps": 2} | train}
    with pytest.raises(ValidationError, match=message):
        kind.model_validate(given)


@pytest.mark.parametrize("kind", [SftStageConfig, RewardStageConfig])
def test_the_best_needs_rows_that_are_held_out(kind):
    data = {kind.ROWS: "rows.jsonl", "eval_fraction": 0.0}
    given = {"model": {"path": "m"}, "data": data, "output_dir": "out"}
    with pytest.raises(ValidationError, match=rf"metric_for_best_model needs data\.eval_{kind.ROWS} or data\.eval_fr"):
        kind.model_validate(given | {"train": {"metric_for_best_model": "eval_loss"}})
