"""Keys of ``tether reward``: defaults that depend on others, and combinations that are refused."""

import pytest
from pydantic import ValidationError

from tether.config.reward_stage import RewardStageConfig
from tether.errors import ConfigError
from tether.stages.begin import as_launched


def config(**sections):
    minimal = {"model": {"path": "m"}, "data": {"pairs": "p.jsonl"}, "output_dir": "out"}
    return RewardStageConfig.model_validate(minimal | sections)


def test_learning_rate_follows_the_tuning_mode():
    assert config().learning_rate == 1e-5
    assert config(model={"path": "m", "lora": {}}).learning_rate == 1e-4
    assert config(train={"learning_rate": 2e-3}).learning_rate == 2e-3


def test_a_tenth_is_held_out_unless_pairs_are_given_or_another_share():
    assert config().data.held_out_fraction == 0.1
    assert config(data={"pairs": "p", "eval_pairs": "e"}).data.held_out_fraction == 0.0
    assert config(data={"pairs": "p", "eval_fraction": 0.0}).data.held_out_fraction == 0.0
    assert config(data={"pairs": "p", "eval_fraction": 0.25}).data.held_out_fraction == 0.25


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"pairs": "p", "eval_pairs": "e", "eval_fraction": 0.1}},
            r"eval_pairs \(e\) and eval_fraction \(0\.1\)",
        ),
        ({"data": {"pairs": "p", "eval_fraction": 1.0}}, "should be less than 1"),
        ({"train": {"batch_size": 16, "micro_batch_size": 6}}, "6 must divide batch_size 16: set batch_size to 12"),
        ({"train": {"batch_size": 4, "micro_batch_size": 6}}, "6 must divide batch_size 4: set batch_size to 6"),
        ({"model": {"path": "m", "freeze_layers": 1}}, r"model\.freeze_layers 1 is for `tether ppo`"),
        ({"model": {"path": "m", "lora": {}, "quantization": "4bit"}}, r"model\.quantization 4bit is for `tether ppo`"),
        ({"train": {"max_steps": 1, "num_train_epochs": 1}}, r"max_steps \(1\) and num_train_epochs \(1\.0\) both"),
        ({"training": {}}, "Extra inputs are not permitted"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values_and_a_way_out(sections, message):
    with pytest.raises(ValidationError, match=message):
        config(**sections)


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "rows"),
    [(16, 8, 1, 8), (16, 8, 2, 8), (16, 8, 4, 4), (16, 8, 8, 2), (16, 8, 16, 1), (16, 4, 2, 4), (16, 8, 3, None),
     (16, 8, 32, None)],
)
def test_processes_share_the_rows_of_a_step(batch, micro, processes, rows):
    train = config(train={"batch_size": batch, "micro_batch_size": micro}).train
    if rows is not None:
        assert train.rows_at_once(processes) == rows
        return
    with pytest.raises(ValueError, match=rf"^train\.batch_size: got 16, wanted a multiple of .* {processes} processes"):
        train.rows_at_once(processes)


@pytest.mark.parametrize(
    ("batch", "processes", "rows"), [(16, 1, 8), (16, 4, 4), (4, 1, 4), (100, 1, 5), (24, 3, 8), (30, 3, 5), (13, 1, 1)]
)
def test_rows_at_once_follow_the_rows_of_a_step_if_they_are_not_set(batch, processes, rows, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    given = config(train={"batch_size": batch})
    assert given.train.rows_at_once(processes) == rows
    saved = as_launched(given)
    assert saved.train.micro_batch_size == rows
    assert RewardStageConfig.model_validate(saved.model_dump(mode="json")) == saved


def test_a_step_that_the_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"^train\.batch_size: got 16, wanted a multiple of 3, the number"):
        as_launched(config(train={"batch_size": 16}))
