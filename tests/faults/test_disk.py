"""What the machine does to a run: a disk that fills up, a clock that jumps, a tracker that dies."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections import namedtuple
from contextlib import contextmanager
from itertools import product

import pytest
from transformers import TrainerCallback

from tests.faults.test_bad_numbers import Heard
from tests.metrics.test_trackers import FakeTracker
from tests.stages.test_reward_stage import stage_config as reward_config
from tests.stages.test_sft import stage as sft_config
from tests.train.runs import tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tests.train.trainers import trainer_of
from tether.cli.main import main
from tether.config.keys import counted
from tether.config.load import dump_config
from tether.config.schema import TrainConfig
from tether.errors import CheckpointError, ConfigError
from tether.metrics.trackers import Trackers
from tether.metrics.writers import JsonlWriter, read_jsonl
from tether.rewards.fake import FakeRewards
from tether.stages.reward import train_reward_model
from tether.stages.sft import train_sft
from tether.train.checkpoint import Checkpoints, most_checkpoints
from tether.train.run import train_policy

Usage = namedtuple("Usage", "total used free")
SAVED = {"train__max_steps": 4, "train__save_steps": 2}


@contextmanager
def files_of_at_most(size):
    """Inside, no file of this process grows beyond ``size`` bytes: writing fails, as on a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_disk_that_takes_no_checkpoint_is_noticed_before_the_first_update(tmp_path):
    config = tiny_run(tmp_path)
    message = r"output_dir: no checkpoint can be written to .*free"
    with files_of_at_most(8192), pytest.raises(ConfigError, match=message):
        train_policy(config)
    assert not [path for path in config.output_dir.iterdir() if path.is_dir()]
    assert not (config.output_dir / "metrics.jsonl").exists()
    train_policy(config)


LONG = {"train__save_steps": 2, "train__max_steps": 10}
EVALUATED = LONG | {"train__metric_for_best_model": "eval_scores", "train__eval_steps": 1, "held_out": True}
ROOM = {
    "one at the end": ({}, 1),
    "every second update": (LONG, 5),
    "the best too": (LONG | {"train__metric_for_best_model": "eval_scores", "held_out": True}, 6),
    "every evaluation may be the best": (EVALUATED, 11),
    "two are kept": (LONG | {"train__save_total_limit": 2}, 3),
    "one is kept, and the best": (EVALUATED | {"train__save_total_limit": 1}, 3),
}


@pytest.mark.parametrize(("changes", "count"), ROOM.values(), ids=ROOM)
def test_room_for_all_checkpoints_is_looked_for_before_training(tmp_path, monkeypatch, changes, count):
    held_out = {"data__eval_prompts": str(tmp_path / "prompts.jsonl")} if changes.pop("held_out", False) else {}
    config = tiny_run(tmp_path, **changes | held_out)
    trainer = trainer_of(config, FakeRewards(lambda query, response: len(response) / 10))
    trainer.save()
    (first,) = config.output_dir.glob("checkpoint-*")
    trained = sum(p.numel() for role in ("policy", "value") for p in trainer.roles.role(role).trained.values())
    size = sum(file.stat().st_size for file in first.rglob("*") if file.is_file()) + 8 * trained  # Adam's moments
    policy = sum(file.stat().st_size for file in first.iterdir() if file.is_file())
    shutil.rmtree(first)
    for missing, is_enough in ((0.2, False), (-0.2, True)):
        free = round((count - missing) * size + policy)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(0, 0, free))
        trainer.state.saved_step = None
        if is_enough:
            trainer.checkpoints.try_saving(trainer.state, trainer.num_updates)
        else:
            told = rf"dir: {counted(count, 'checkpoint')} of .* policy need .*save_total_limit"
            with pytest.raises(ConfigError, match=told):
                trainer.checkpoints.try_saving(trainer.state, trainer.num_updates)


@pytest.mark.parametrize(("save", "evaluate"), [*product((None, 1, 2, 3, 4, 7, 30), repeat=2)])
def test_checkpoints_are_counted_without_a_list_of_them(save, evaluate):
    """Every evaluation may be the best so far, also those before the first update and after the last."""
    for num_updates in (1, 12, 13, 24):
        kept = TrainConfig(max_steps=num_updates, save_steps=save, eval_steps=evaluate)
        best = kept.model_copy(update={"metric_for_best_model": "eval_scores"})
        saves, evaluations = (set(range(n, num_updates + 1, n)) if n else set() for n in (save, evaluate))
        saves = saves or {"where the run is stopped"}
        assert most_checkpoints(kept, num_updates) == len(saves)
        assert most_checkpoints(best, num_updates) == len(saves | evaluations | {0, num_updates})
    assert most_checkpoints(best, 10**15) > 0


class FillDisk(TrainerCallback):
    """From an update on no file may grow."""

    def __init__(self, step, size):
        self.step, self.size = step, size

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, hard))


FULL = {
    "in a save": (4, 8192, r"checkpoint-4 could not be written .*free\): .*The last complete .*checkpoint-2: --resume"),
    "in metrics.jsonl": (3, 10, r"can no longer be written to: File too large\. The last complete .*checkpoint-2"),
}


@pytest.mark.parametrize(("step", "size", "message"), FULL.values(), ids=FULL)
def test_a_disk_that_fills_up_ends_the_run_and_it_goes_on_bitwise(tmp_path, step, size, message):
    straight = tiny_run(tmp_path, output_dir=str(tmp_path / "straight"), **SAVED)
    train_policy(straight)
    config = tiny_run(tmp_path, **SAVED)
    with files_of_at_most(resource.RLIM_INFINITY), pytest.raises(CheckpointError, match=message):
        train_policy(config, callbacks=[FillDisk(step, size)])
    assert [path.name for path in config.output_dir.glob("*checkpoint*")] == ["checkpoint-2"]
    train_policy(config.model_copy(update={"resume": True}))
    assert reproducible(config.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(config.output_dir), weights(straight.output_dir))


class FullAtTheEnd(FillDisk):
    """From the last update's checkpoint on no file may grow."""

    def on_step_end(self, args, state, control, **kwargs):
        pass

    def on_train_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control)


@pytest.mark.parametrize("size", [10, 4096])
def test_a_disk_that_is_full_when_the_policy_is_written_loses_nothing_either(tmp_path, size):
    config = tiny_run(tmp_path, value__save=True, ppo__score_norm="running", **SAVED)
    message = r"can no longer be written to: .*The last complete checkpoint is .*checkpoint-4: --resume"
    with files_of_at_most(resource.RLIM_INFINITY), pytest.raises(CheckpointError, match=message):
        train_policy(config, callbacks=[FullAtTheEnd(4, size)])
    assert not [path for path in config.output_dir.iterdir() if path.name.startswith((".final", "final"))]
    assert train_policy(config.model_copy(update={"resume": True})).updates == []
    assert_same_weights(weights(config.output_dir), weights(config.output_dir / "checkpoint-4"))


STAGES = {"sft": (sft_config, train_sft), "reward": (reward_config, train_reward_model)}
ROOM_FOR = {"no weights": 8_192, "weights alone": 40_000, "not one more line": 10}


@pytest.mark.parametrize("size", ROOM_FOR.values(), ids=ROOM_FOR)
@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_fills_up_ends_a_stage_and_it_goes_on_bitwise(tmp_path, stage, size):
    make, train = STAGES[stage]
    for name in ("straight", "full"):
        (tmp_path / name).mkdir()
    straight, config = (make(tmp_path / name, num_train_epochs=3, save_steps=2) for name in ("straight", "full"))
    train(straight)

    def filled(step, total, numbers):
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    message = r"out can no longer be written to: .*The last complete checkpoint is .*checkpoint-2: --resume"
    with files_of_at_most(resource.RLIM_INFINITY), pytest.raises(CheckpointError, match=message):
        train(config, on_progress=filled)
    train(config.model_copy(update={"resume": True}))
    assert_same_weights(weights(config.output_dir), weights(straight.output_dir))


def test_a_disk_without_room_for_a_merged_model_is_told_and_nothing_is_left(tmp_path, capsys):
    out = train_policy(tiny_run(tmp_path, model__lora={"r": 2}, train__max_steps=1)).output_dir
    command = ["merge", str(out), "-o", str(tmp_path / "merged")]
    with files_of_at_most(8192):
        assert main(command) == 2
    assert "merged can no longer be written to: " in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "merged" in path.name]
    assert main(command) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_every_trouble_of_a_disk_is_one_message_on_the_command_line(tmp_path, monkeypatch, capsys, code):
    config = tiny_run(tmp_path, train__save_steps=1)
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    write, lines = JsonlWriter.write_all, []

    def failing(self, records):
        lines.append(self.path.name)
        if lines.count("metrics.jsonl") == 2:
            raise OSError(code, os.strerror(code), str(self.path))
        write(self, records)

    monkeypatch.setattr(JsonlWriter, "write_all", failing)
    assert main(["ppo", str(tmp_path / "run.yaml")]) == 2
    told = capsys.readouterr().err
    assert f"can no longer be written to: {os.strerror(code)}" in told and "checkpoint-1: --resume" in told
    assert "Traceback" not in told


def test_an_error_of_another_kind_is_not_taken_for_the_disk(tmp_path, monkeypatch):
    def failing(self, records):
        raise OSError(errno.EBADF, "x")

    monkeypatch.setattr(JsonlWriter, "write_all", failing)
    with pytest.raises(OSError, match="x") as caught:
        train_policy(tiny_run(tmp_path))
    assert caught.value.errno == errno.EBADF


def test_a_failed_save_leaves_the_run_able_to_save_again(tmp_path, monkeypatch):
    trainer = trainer_of(tiny_run(tmp_path), FakeRewards(lambda query, response: 0.0))

    def failing(self, folder, state):
        raise RuntimeError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_write", failing)
        with pytest.raises(CheckpointError, match=r"checkpoint-0 could not be written .*full\. There is no complete"):
            trainer.save()
    assert trainer.state.saved_step is None
    trainer.save()
    assert trainer.state.saved_step == 0


def test_a_clock_that_jumps_stops_no_run_and_makes_no_negative_times(tmp_path, monkeypatch):
    jumps = iter([86400.0 * (-1) ** i * i for i in range(1000)] * 1000)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + next(jumps))
    result = train_policy(tiny_run(tmp_path, train__max_runtime=0.5))
    assert result.interrupted is None and len(result.updates) == 2
    assert all(value >= 0 for row in result.updates for name, value in row.items() if name.startswith("time/"))


def test_a_tracker_that_dies_ends_no_run(tmp_path, caplog):
    trainer = trainer_of(tiny_run(tmp_path), FakeRewards(lambda query, response: len(response) / 10))
    tracker = FakeTracker(fails_at="log")
    trainer.log.trackers = Trackers([tracker], "t", tmp_path, {})
    trainer.log.display = Heard()
    trainer.fit()
    assert [what for what, *_ in tracker.calls].count("log") >= 2
    assert [row["step"] for row in read_jsonl(trainer.config.output_dir / "metrics.jsonl") if "lr" in row] == [1, 2]
    assert [record.message.split(" (")[0] for record in caplog.records if "fake" in record.message] == ["fake failed"]
