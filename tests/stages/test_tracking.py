"""What trackers are told of the stages, and evaluations on the way."""

import pytest
from accelerate import tracking
from pydantic import ValidationError

from tests.metrics.test_trackers import FakeTracker
from tests.stages.test_reward_stage import stage_config
from tests.stages.test_sft import stage
from tether.errors import ConfigError
from tether.metrics import trackers as module
from tether.metrics.writers import read_jsonl
from tether.stages.reward import train_reward_model
from tether.stages.sft import train_sft


@pytest.fixture
def wandb(monkeypatch):
    """Fakes of a tracker that looks installed, as they are made."""
    made = []

    class Fake(FakeTracker):
        name = "wandb"

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Fake)
    monkeypatch.setattr(module, "get_available_trackers", lambda: ["wandb"])
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return made


def sent(tracker):
    """Step and metrics of what a tracker was told."""
    return [{"step": step, **values} for what, values, step in tracker.calls[2:-1] if what == "log"]


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_a_tracker_is_told_what_the_log_is_and_evaluations_come_on_the_way(tmp_path, wandb, name):
    options = {"num_train_epochs": None, "max_steps": 3, "eval_steps": 2, "report_to": "wandb"}
    if name == "sft":
        config = stage(tmp_path, data={"eval_fraction": 0.2}, run_name="mine", **options)
        result = train_sft(config)
    else:
        config = stage_config(tmp_path, run_name="mine", **options)
        result = train_reward_model(config)
    (tracker,) = wandb
    assert tracker.made_with == (("tether",), {"name": "mine"})
    assert [what for what, *_ in tracker.calls][:2] == ["start", "config"]
    assert tracker.calls[1][1]["train.max_steps"] == 3 and tracker.calls[-1] == ("finish",)
    log = read_jsonl(config.output_dir / "metrics.jsonl")
    told = sent(tracker)
    assert told[: len(log)] == log
    assert [row["step"] for row in log if "loss" in row] == [1, 2, 3]
    evaluated = [row for row in told if "eval_loss" in row or "eval_accuracy" in row]
    assert [row["step"] for row in evaluated] == [2, 3]
    of_interest = {key for key in result.metrics if key.startswith("eval_")}
    assert of_interest and {key: evaluated[-1][key] for key in of_interest} == {
        key: result.metrics[key] for key in of_interest
    }


def test_a_reward_model_is_evaluated_on_the_way_as_at_the_end(tmp_path):
    shorter = stage_config(tmp_path, num_train_epochs=None, max_steps=2, lr_scheduler_type="constant")
    at_two = train_reward_model(shorter).metrics
    config = shorter.model_copy(update={"output_dir": tmp_path / "longer"})
    train = {"max_steps": 3, "eval_steps": 2}
    train_reward_model(config.model_copy(update={"train": config.train.model_copy(update=train)}))
    rows = read_jsonl(tmp_path / "longer" / "metrics.jsonl")
    of_two = next(row for row in rows if "eval_accuracy" in row)
    wanted = {name: value for name, value in at_two.items() if name.startswith("eval_")}
    assert of_two == {"step": 2, **wanted, "epoch": of_two["epoch"]}
    assert ["loss" in row for row in rows] == [True, True, False, True, False]
    assert {"accuracy", "margin"} <= rows[3].keys()  # what TRL says of the training batch is not lost to an evaluation


def test_mistakes_are_told_before_anything_is_loaded(tmp_path, wandb):
    for config, train in ((stage(tmp_path, report_to="wanbd"), train_sft),
                          (stage_config(tmp_path, report_to="wanbd"), train_reward_model)):  # fmt: skip
        with pytest.raises(ConfigError, match=r"train\.report_to: unknown tracker 'wanbd'"):
            train(config)
    with pytest.raises(ValidationError, match=r"train.eval_steps needs data.eval_pairs or data.eval_fraction"):
        stage_config(tmp_path, data={"eval_fraction": 0}, eval_steps=2)
    assert wandb == [] and not (tmp_path / "out").exists()
