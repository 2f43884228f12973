"""Runs of several processes that go on: bitwise on as many, and on others with the same prompts, answers and noise."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.harness import Outcome, started
from tests.distributed.runs import MOST_PARAMETER_ERROR, distance, metric_errors
from tests.train.runs import tiny_run
from tests.train.test_run import reproducible
from tether.cli.main import main
from tether.config.load import dump_config
from tether.machine.distributed import Dist
from tether.metrics.writers import read_jsonl
from tether.models.checkpoints import list_checkpoints
from tether.models.roles import ModelRoles
from tether.train.batches import micro_batch_plan
from tether.train.same_run import check_same_run, told_of_move

CHANGES = {
    "train__max_steps": 4, "train__save_steps": 1, "ppo__num_mini_batches": 2, "train__micro_batch_size": 2,
    "ppo__score_norm": "running", "ppo__kl_target": 0.1, "ppo__kl_coef": 0.2, "train__ema_decay": 0.9,
}  # fmt: skip


def command(file: Path, arguments: list[str], ends_at: int | None) -> None:
    """``tether ppo``, ended by SIGKILL in the update after ``ends_at`` finished ones."""
    if ends_at is not None:
        wrapped, passes = ModelRoles.score_pass, []

        def score_pass(*args: Any, **kwargs: Any) -> Any:
            passes.append(1)
            if len(passes) > 4 * ends_at:  # two micro-batches an update, by policy and critic
                os.kill(os.getpid(), signal.SIGKILL)
            return wrapped(*args, **kwargs)

        ModelRoles.score_pass = score_pass
    sys.exit(main(["ppo", str(file), *arguments]))


def ppo(folder: Path, name: str, *arguments: str, num_processes: int = 2, ends_at: int | None = None) -> list[Outcome]:
    """How the processes of a run into ``folder / name`` ended."""
    micro = 2 if num_processes == 2 else 4
    config = tiny_run(folder, **CHANGES | {"output_dir": str(folder / name), "train__micro_batch_size": micro})
    file = folder / f"{name}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    outcomes = started(command, file, list(arguments), ends_at, folder=folder, num_processes=num_processes, grace=20.0)
    codes, wanted = [each.exit_code for each in outcomes], 0 if ends_at is None else -signal.SIGKILL
    assert codes == [wanted] * num_processes, "\n".join(each.told() for each in outcomes)
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two processes and one of one, which nothing disturbed."""
    folder = tmp_path_factory.mktemp("resuming")
    ppo(folder, "straight")
    ppo(folder, "alone", num_processes=1)
    return folder


def saved(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Weights of policy and critic after the last update."""
    return load_file(list_checkpoints(folder / name)[-1] / "tether_state" / "roles.safetensors")


def sampled(folder: Path, name: str, after: int) -> list[tuple]:
    """Prompts and answers of the later updates."""
    rows = read_jsonl(folder / name / "samples.jsonl")
    return [(row["step"], row["row"], row["response"]) for row in rows if row["step"] > after]


def test_killed_and_resumed_is_bitwise_the_run_that_was_not(folder):
    ppo(folder, "killed", ends_at=2)
    assert [path.name for path in list_checkpoints(folder / "killed")] == ["checkpoint-1", "checkpoint-2"]
    first, _ = ppo(folder, "killed", "--resume")
    assert "resumed from" in first.output and "bitwise" not in first.output
    assert reproducible(folder / "killed") == reproducible(folder / "straight")
    assert distance(saved(folder, "killed"), saved(folder, "straight")) == 0


def test_a_checkpoint_that_nobody_can_read_is_told_of_once(folder, tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(folder / "alone" / "checkpoint-2", checkpoint)
    state = checkpoint / "tether_state" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "of_a_later_version": 1}))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = hashlib.sha256(state.read_bytes()).hexdigest()
    manifest["files"]["tether_state/state.json"] = {"bytes": state.stat().st_size, "sha256": digest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    outcomes = started(command, folder / "alone.yaml", [f"--resume={checkpoint}", "--output_dir=elsewhere"], None,
                       folder=tmp_path)  # fmt: skip
    assert [each.exit_code for each in outcomes] == [2, 2]
    assert "of_a_later_version is unknown" in outcomes[0].output and outcomes[1].output == ""


class Several(Dist):
    """So many processes, as far as they are counted."""

    num_processes = 0

    def __init__(self, count: int) -> None:
        self.num_processes = count


@pytest.mark.parametrize(
    ("before", "now", "num_mini_batches", "told"),
    [(1, 2, 2, True), (2, 1, 2, True), (2, 4, 1, False), (2, 2, 2, None)],
)
def test_a_token_budget_is_of_each_process_and_the_move_says_so(tmp_path, before, now, num_mini_batches, told):
    changes = {"train__micro_batch_size": None, "ppo__num_mini_batches": num_mini_batches}
    saved, moved = (
        tiny_run(tmp_path, train__max_tokens_per_micro_batch=45 // count, **changes) for count in (before, now)
    )
    queries, answers = [[5] * (2 + i) for i in range(8)], [[6] * (1 + i % 4) for i in range(8)]
    plans = [micro_batch_plan(config, queries, answers, count) for config, count in ((saved, before), (moved, now))]
    assert (plans[0] == plans[1]) == (before == now), "the case is to show that micro-batches hold other answers"
    said = told_of_move(saved, {"num_processes": before, "engine": "DDP"}, moved, Several(now), "DDP")
    assert (said is None) == (told is None)
    if said is not None:
        assert ("train.max_tokens_per_micro_batch counts the tokens of each process" in said) is told
    assert len(check_same_run(saved, moved, tmp_path, {}, {})) == (before != now)


@pytest.mark.parametrize(("before", "num_processes"), [("straight", 1), ("alone", 2)])
def test_a_run_goes_on_with_another_number_of_processes(folder, before, num_processes):
    name = f"{before} on {num_processes}"
    checkpoint = folder / before / "checkpoint-2"
    outcomes = ppo(folder, name, f"--resume={checkpoint}", num_processes=num_processes)
    said = " ".join(outcomes[0].output.split())
    assert said.count("are not bitwise identical") == 1 and "mini-batches contain different ones" not in said
    assert sampled(folder, name, after=2) == sampled(folder, before, after=2) != []
    wanted = [row for row in reproducible(folder / before) if row["step"] > 2]
    assert metric_errors(reproducible(folder / name), wanted) == []
    assert distance(saved(folder, name), saved(folder, before)) <= MOST_PARAMETER_ERROR
    assert distance(saved(folder, "straight"), saved(folder, "alone")) <= MOST_PARAMETER_ERROR
