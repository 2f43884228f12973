"""``tether sft``, ``tether reward`` and ``tether pipeline`` in several processes: what one of them makes, in shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.harness import alone, started, together
from tests.stages.test_reward_stage import stage_config
from tests.stages.test_sft import ROWS, stage
from tests.test_pipeline import write_pipeline
from tether.cli.main import main
from tether.config.load import dump_config, load_config
from tether.config.reward_stage import RewardStageConfig
from tether.config.sft_stage import SftStageConfig
from tether.config.stage import StageConfig
from tether.errors import ConfigError
from tether.machine.distributed import Dist
from tether.metrics.writers import read_jsonl
from tether.stages.begin import as_launched, check_launch
from tether.stages.reward import train_reward_model
from tether.stages.run import StageRun
from tether.stages.sft import train_sft
from tether.stages.training import trainer_arguments

STAGES = {"sft": (SftStageConfig, train_sft), "reward": (RewardStageConfig, train_reward_model)}
NOT_COMPARED = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "min_reward", "max_reward")
"""Times, and extremes of a pass, which all processes make together: means of them depend on how many make one."""
FULL, LORA = None, {"r": 4}


def config_of(folder: Path, name: str, **changes) -> StageConfig:
    """Eight steps of four rows each, in two micro-batches of two; twelve rows are an epoch."""
    usual = {"max_steps": 8, "num_train_epochs": None, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3}
    if name == "reward":
        return stage_config(folder, **usual | changes)
    return stage(folder, rows=ROWS[:16], data={"eval_fraction": 0.25}, **usual | {"eval_steps": 4} | changes)


def written(config: StageConfig, out: str) -> Path:
    """The configuration in a file of its own, its run in another folder."""
    file = Path(config.output_dir).parent / f"{out}.yaml"
    file.write_text(dump_config(config.model_copy(update={"output_dir": file.with_suffix("")})), encoding="utf-8")
    return file


def run(name: str, file: Path, stops_at: int | None = None, resume: bool = False) -> tuple[dict, str | None, list[str]]:
    """What a process knows at the end of a stage.

    Args:
        stops_at: the step after which the last process alone is asked to stop.
    """
    section, train = STAGES[name]
    config, steps, told = load_config(file, section=section).model_copy(update={"resume": resume}), [], []
    is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1

    def stop() -> str | None:
        steps.append(None)
        return "SIGTERM" if is_last and len(steps) == stops_at else None

    result = train(config, tell=told.append, stop=stop)
    return result.metrics, result.interrupted, told


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*model.safetensors")))


def assert_same(folder: Path, other: Path, *, most: float = 1e-6) -> None:
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) <= most
    for mine, yours in zip(*(read_jsonl(each / "metrics.jsonl") for each in (folder, other)), strict=True):
        assert mine.keys() == yours.keys()
        for key in mine.keys() - set(NOT_COMPARED):
            assert mine[key] == pytest.approx(yours[key], rel=1e-4, abs=1e-5 if most else 0), key


@pytest.mark.parametrize("lora", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", STAGES)
def test_two_processes_make_what_one_makes(tmp_path, name, lora):
    """Four rows in one pass of both, or in two passes of one: the rows of each step are the same."""
    config = config_of(tmp_path, name, lora=lora)
    one, two = written(config, "one"), written(config, "two")
    start = {} if lora else weights(tmp_path / "model")
    metrics, _, _ = alone(run, name, one, folder=tmp_path)
    (first, _, told), (second, _, silent) = together(run, name, two, folder=tmp_path)
    assert_same(tmp_path / "one", tmp_path / "two")
    moved = [key for key, x in weights(tmp_path / "two").items() if key in start and not torch.equal(x, start[key])]
    assert lora or len(moved) > 5, "it trains"
    assert first == second | {"time/train_s": first["time/train_s"]}
    for key in metrics.keys() - {"time/train_s"}:
        assert first[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5), key
    assert told[0] == "on 2 processes, this one on cpu: DDP" and silent == []
    if name == "reward":
        pairs = [json.loads((tmp_path / out / "reward_eval.json").read_text())["pairs"] for out in ("one", "two")]
        for mine, other in zip(*pairs, strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", STAGES)
def test_a_stop_of_one_ends_both_and_the_run_goes_on_bitwise(tmp_path, name):
    config = config_of(tmp_path, name)
    whole, cut = written(config, "whole"), written(config, "cut")
    together(run, name, whole, folder=tmp_path)
    for _, interrupted, _ in together(run, name, cut, 3, folder=tmp_path):
        assert interrupted == "SIGTERM"
    assert (tmp_path / "cut" / "checkpoint-3").is_dir() and not list((tmp_path / "cut").glob("*.safetensors"))
    together(run, name, cut, None, True, folder=tmp_path)
    assert_same(tmp_path / "whole", tmp_path / "cut", most=0.0)


MISFITS = {
    "batch": ({"batch_size": 6}, {}, "train.batch_size: got 6, wanted a multiple of 4 (2 rows at once in"),
    "precision": (
        {"bf16": False},
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        "train.bf16: got false, but accelerate launch uses mixed_precision bf16",
    ),
    "FSDP": ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "the launcher's configuration asks for FSDP"),
}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_launch_that_does_not_fit_is_told_before_a_model_is_loaded(tmp_path, name, misfit):
    changes, environment, told = MISFITS[misfit]
    file = written(config_of(tmp_path, name, **changes), "out")
    save_file({}, tmp_path / "model" / "model.safetensors")  # to load this would be another error
    outcomes = started(run, name, file, folder=tmp_path, environment=environment, timeout=60)
    assert all(outcome.exit_code == 1 and not outcome.is_hung for outcome in outcomes)
    assert all(f"tether.errors.ConfigError: {told}" in outcome.error for outcome in outcomes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", STAGES)
def test_what_the_launcher_says_of_precision_is_done_where_the_run_says_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = config_of(tmp_path, name, bf16=None)
    check_launch(config, Dist())
    assert as_launched(config).train.bf16 is True
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert as_launched(config) == config


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator can train in float16")
@pytest.mark.parametrize("name", STAGES)
def test_float16_of_the_launcher_is_refused_where_float16_is(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    config = config_of(tmp_path, name, bf16=None)
    told = "mixed_precision of the launch: got fp16, wanted no: there is no accelerator"
    with pytest.raises(ConfigError, match=told):
        STAGES[name][1](config)


@pytest.mark.parametrize("name", STAGES)
def test_a_folder_that_cannot_be_made_is_told_before_a_model_is_loaded(tmp_path, name):
    config = config_of(tmp_path, name)
    save_file({}, tmp_path / "model" / "model.safetensors")  # to load this would be another error
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output_dir: .*/file is a file; name a folder"):
        STAGES[name][1](config.model_copy(update={"output_dir": tmp_path / "file" / "deep" / "out"}))


@pytest.mark.parametrize("command", ["ppo", *STAGES, "pipeline"])
def test_the_first_process_alone_shows_the_help(monkeypatch, capsys, command):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, is_shown in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert main([command, "--help"]) == 0
        assert bool(capsys.readouterr().out) == is_shown


@pytest.mark.parametrize("name", STAGES)
def test_one_process_trains_on_one_device_where_it_sees_eight(tmp_path, monkeypatch, name):
    """transformers would split a batch eight times as large over all of them."""
    from tether.stages.trl import RewardArguments, SftArguments

    kind = SftArguments if name == "sft" else RewardArguments
    run = StageRun(Dist(), config_of(tmp_path, name), print, checkpoint=None, is_finished=False)
    made = kind(**trainer_arguments(run, 100, evaluates=False, kind=kind))
    monkeypatch.setattr(made, "_n_gpu", 8)
    assert super(kind.__mro__[1], made).n_gpu == 8, "what transformers would do"
    assert made.n_gpu == 1 and made.train_batch_size == 2


def test_a_run_says_what_else_there_is(monkeypatch):
    dist = Dist()
    assert dist.described("tether sft", None) == f"one process, {dist.device}"
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(device_count=lambda: 8))
    assert dist.described("tether sft", None) == (
        f"one process, {dist.device} of 8 devices; accelerate launch -m tether sft … uses all of them"
    )


@pytest.mark.slow
def test_a_launched_pipeline(tmp_path):
    """Three stages in the same two processes, each in its own arithmetic; what is finished is skipped by both."""
    file = write_pipeline(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "tether", "pipeline"]
    overrides = [f"--{stage}.train.micro_batch_size=1" for stage in ("sft", "reward", "ppo")]
    overrides += ["--sft.train.bf16=true", "--reward.train.bf16=true", "--ppo.train.bf16=false"]

    done = subprocess.run(
        [*command, str(file), *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    folder = file.parent / "out"
    for name in ("sft", "reward", "ppo"):
        assert said.count(f"{name}: starts in") == 1 and said.count(f"{name}: {folder / name}") == 1
    assert said.count("on 2 processes, this one on cpu: DDP") == 3
    before, first, *others = read_jsonl(folder / "ppo" / "metrics.jsonl")
    assert (before["eval_kl"], first["objective/kl"]) == (0.0, 0.0), "bfloat16 of the stages before is not left over"
    assert len([row for row in others if "objective/kl" in row]) == 2
    again = started(main, ["pipeline", str(file), *overrides], folder=tmp_path)
    assert [outcome.exit_code for outcome in again] == [0, 0], again
    assert " ".join(" ".join(outcome.output for outcome in again).split()).count("finished in") == 3
