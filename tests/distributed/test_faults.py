"""What one process meets ends all of them within seconds: its message once, and an exit code that tells."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import Outcome, started
from tests.rewards.services import Hang, lengths, local_service
from tests.train.runs import tiny_run
from tether.cli import launched
from tether.cli.main import main
from tether.config.load import dump_config
from tether.errors import ConfigError, ModelError
from tether.generation.batch import Batch
from tether.metrics.writers import JsonlWriter
from tether.models.checkpoints import list_checkpoints
from tether.models.roles import ModelRoles
from tether.train import build, run
from tether.train.log import RunLog
from tether.train.update import Update

SECONDS = 20.0
"""From a fault to the end of the last process, on a machine that has other work."""
REWARD = """
import os, signal, time

CALLS = []


def letters(prompts, completions, **columns):
    if len(completions) > 2:  # and not the two answers that it is tried on
        CALLS.append(len(completions))
    scores = [len(text) / 10 for text in completions]
    if len(completions) > 2 and len(CALLS) == 2 and os.environ["RANK"] == "{rank}":
        open("{mark}", "w").write(repr(time.monotonic()))
        {statement}
    return scores
"""

ALL = ("checkpoint-1", "checkpoint-2", "checkpoint-3")
UNEVEN = {"train__rollout_batch_size": 9, "train__micro_batch_size": 3}
"""Mini-batches of 9 answers, which two processes cannot do 3 at a time each."""


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fails_at(owner: Any, name: str, call: int, failing: Callable[[], None], mark: Path) -> None:
    """Makes the ``call``-th call of a method fail, from 1."""
    wrapped, calls = getattr(owner, name), []

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            mark.write_text(repr(time.monotonic()))
            failing()
        return wrapped(*args, **kwargs)

    setattr(owner, name, method)


def no_model() -> None:
    raise ModelError("model.path: this machine has no such folder")


def no_engine() -> None:
    raise ConfigError("sampling.vllm: less memory is free on this device")


def no_file() -> None:
    raise ConfigError("data.prompts: no such file here")


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def not_finite(mark: Path) -> None:
    """Losses of the second update."""
    losses = Update.losses

    def bad(self: Update, *arguments: Any, is_first: bool) -> dict[str, torch.Tensor]:
        found = losses(self, *arguments, is_first=is_first)
        return {name: x * math.nan if self.step == 1 else x for name, x in found.items()}

    Update.losses = bad


PATCHES: Mapping[str, Callable[[Path], None]] = {
    "forward": lambda mark: fails_at(ModelRoles, "score_pass", 3, out_of_memory, mark),
    "decoding": lambda mark: fails_at(Batch, "decode_until_one_ends", 3, out_of_memory, mark),
    "checking": lambda mark: fails_at(run, "check", 1, no_file, mark),
    "loading": lambda mark: fails_at(build, "build_roles", 1, no_model, mark),
    "starting": lambda mark: fails_at(build, "build_generator", 1, no_engine, mark),
    "losses": not_finite,
    "disk": lambda mark: fails_at(JsonlWriter, "write", 2, full_disk, mark),
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one process, and how all of them end."""

    codes: tuple[int, int]
    said: str
    """By the process that met it, once; the others may say that they lost it."""
    statement: str = "pass"
    """In the reward function, in the second update."""
    patch: str | None = None
    rank: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the run's settings."""
    checkpoints: tuple[str, ...] = ("checkpoint-1",)


LOST = "another process of the run has ended"
FAULTS = {
    "reward raises": Fault((1, 1), "raised ZeroDivisionError", "1 / 0"),
    "reward is NaN": Fault((1, 1), "returned nan", "return [float('nan')] * len(scores)"),
    "out of memory in a forward": Fault((1, 1), "out of memory in the update's passes", patch="forward"),
    "out of memory in decoding": Fault((0, 0), "", patch="decoding", checkpoints=ALL),
    "a mistake in the run": Fault((2, 2), "micro_batch_size 3 in each", changes=UNEVEN, checkpoints=()),
    "a file that is not on this machine": Fault((2, 2), "no such file here", patch="checking", checkpoints=()),
    "model cannot be loaded": Fault((2, 2), "this machine has no such folder", patch="loading", checkpoints=()),
    "vLLM does not start": Fault((2, 2), "less memory is free", patch="starting", checkpoints=()),
    "losses are not finite": Fault((1, 1), "loss is not finite", patch="losses", changes={"train__max_bad_batches": 0}),
    "all scores are the same": Fault(
        (1, 1),
        "so there is no spread",
        changes={
            "ppo__score_norm": "frozen",
            "ppo__score_norm_samples": 4,
            "rewards": [{"type": "regex", "pattern": "x^"}],
        },
        checkpoints=(),
    ),
    "disk full": Fault((2, 1), "can no longer be written to", patch="disk", rank=0),
    "killed": Fault((1, -9), LOST, "os.kill(os.getpid(), signal.SIGKILL)"),
    "the first is killed": Fault((-9, 1), LOST, "os.kill(os.getpid(), signal.SIGKILL)", rank=0),
    "SIGTERM": Fault((130, 130), "SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)"),
    "time is over": Fault(
        (130, 130), "stopped by max_runtime", changes={"train__max_runtime": 1e-9}, checkpoints=("checkpoint-0",)
    ),
}


def command(file: Path, patch: str | None, rank: int, mark: Path) -> None:
    """``tether ppo`` with a fault in one process."""
    if patch is not None and os.environ["RANK"] == str(rank):
        PATCHES[patch](mark)
    sys.exit(main(["ppo", str(file)]))


def met(folder: Path, fault: Fault, **options: Any) -> tuple[list[Outcome], float]:
    """How two processes ended of which one met a fault, and how many seconds after it, or the start, the last did."""
    mark = folder / "mark"
    config = tiny_run(folder, **{"train__max_steps": 3, "train__save_steps": 1} | dict(fault.changes))
    statement = fault.statement
    (folder / "rewards.py").write_text(REWARD.format(rank=fault.rank, mark=mark, statement=statement), encoding="utf-8")
    file = folder / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    outcomes = started(command, file, fault.patch, fault.rank, mark, folder=folder, timeout=60.0, **options)
    begun = float(mark.read_text()) if mark.exists() else min(outcome.ended - outcome.seconds for outcome in outcomes)
    return outcomes, max(outcome.ended for outcome in outcomes) - begun


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_process_ends_all(tmp_path, name):
    fault = FAULTS[name]
    outcomes, seconds = met(tmp_path, fault)
    told = "\n".join(outcome.told() for outcome in outcomes)
    print(f"{name}: {seconds:.1f} s")
    print(told)
    assert not any(outcome.is_hung for outcome in outcomes), told
    assert tuple(outcome.exit_code for outcome in outcomes) == fault.codes, told
    assert "Traceback" not in told, told
    assert told.count(fault.said) == 1 or not fault.said, told
    assert seconds < SECONDS, told
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == list(fault.checkpoints)


SMALLER = (
    "--train.micro_batch_size=2", "--train.gradient_checkpointing=true", "--sampling.batch_size=2",
    "--train.offload_idle_roles=true", "--train.micro_batch_size=null --train.max_tokens_per_micro_batch=40",
)  # fmt: skip


@pytest.fixture(scope="module")
def out_of_memory_run(tmp_path_factory):
    """A run that did not fit into memory in its second update."""
    folder = tmp_path_factory.mktemp("memory")
    met(folder, FAULTS["out of memory in a forward"])
    return folder


def goes_on(file: Path, arguments: list[str]) -> None:
    sys.exit(main(["ppo", str(file), "--resume", *arguments]))


@pytest.mark.parametrize("arguments", SMALLER)
def test_a_run_that_did_not_fit_goes_on_with_what_its_message_advises(out_of_memory_run, tmp_path, arguments):
    shutil.copytree(out_of_memory_run / "out", tmp_path / "out")
    changed = [*arguments.split(), f"--output_dir={tmp_path / 'out'}"]
    outcomes = started(goes_on, out_of_memory_run / "run.yaml", changed, folder=tmp_path, timeout=90.0)
    told = "\n".join(outcome.told() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], told
    assert " ".join(outcomes[0].output.split()).count("are not bitwise identical") == 1, told
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == list(ALL)


def mistaken(arguments: list[str]) -> None:
    """A command line that no process understands, and that the first one is late to read."""
    launched.HEAD_START = 2.0
    if os.environ["RANK"] == "0":
        time.sleep(0.5)
    sys.exit(main(arguments))


@pytest.mark.parametrize("arguments", [["ppo", "run.yaml", "--ppo.kl_coeff=1"], ["sft", "sft.yaml"]])
def test_what_all_have_met_the_first_one_says_before_another_ends(tmp_path, arguments):
    first, second = started(mistaken, arguments, folder=tmp_path, timeout=30.0)
    assert (first.exit_code, second.exit_code) == (2, 2)
    assert first.output.startswith("tether: ") and second.output == ""
    assert first.ended < second.ended, "a launcher would have ended the first one before it said anything"


def interrupted(file: Path) -> None:
    """A run that Ctrl-C ends in the second process alone, before it is able to save anything."""

    def check(config: Any) -> None:
        raise KeyboardInterrupt

    if os.environ["RANK"] == "1":
        run.check = check
    sys.exit(main(["ppo", str(file)]))


def test_who_was_interrupted_before_anything_could_be_saved_says_so(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(tiny_run(tmp_path)), encoding="utf-8")
    first, second = started(interrupted, file, folder=tmp_path, timeout=30.0)
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert "[process 1 of 2] tether: interrupted before the state could be saved" in second.output
    assert "tether: another process of the run has ended" in first.output and "interrupted" not in first.output


def slow_to_close(file: Path) -> None:
    """A run whose first process has to wait for its trackers at the end."""
    close = RunLog.close

    def closed(log: RunLog) -> None:
        time.sleep(3 if os.environ["RANK"] == "0" else 0)
        close(log)

    RunLog.close = closed
    sys.exit(main(["ppo", str(file)]))


def test_nobody_ends_before_the_first_process_has_said_what_all_have_met(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(tiny_run(tmp_path)), encoding="utf-8")
    (tmp_path / "rewards.py").write_text("def letters(prompts, completions):\n    return 1 / 0\n", encoding="utf-8")
    first, second = started(slow_to_close, file, folder=tmp_path, timeout=60.0)
    assert (first.exit_code, second.exit_code) == (1, 1) and "ZeroDivisionError" in first.output
    assert second.ended > first.ended - 1.5, "a launcher would have ended the first one before it said anything"


def test_a_stop_does_not_wait_for_a_service_that_hangs(tmp_path):
    """Launchers tell every process, and kill soon after what has not ended."""
    asked: list[float] = []

    def behaviour(payload: Mapping[str, Any]) -> Any:
        if len(payload["responses"]) == 1:  # the first answer, that it is tried on
            return lengths(payload)
        asked.append(time.monotonic())
        return lengths(payload) if len(asked) <= 2 else Hang()  # in the second update, in both processes

    def stop(pids: list[int]) -> None:
        deadline = time.monotonic() + 60
        while len(asked) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        asked.append(time.monotonic())

    with local_service(behaviour) as local:
        rewards = [{"type": "http", "url": local.url, "batch_size": 64, "read_timeout": 100.0, "weight": 0.1}]
        file = tmp_path / "run.yaml"
        file.write_text(dump_config(tiny_run(tmp_path, rewards=rewards, train__max_steps=3)), encoding="utf-8")
        outcomes = started(command, file, None, 0, file, folder=tmp_path, timeout=90.0, meanwhile=stop)
    told = "\n".join(outcome.told() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [130, 130], told
    assert max(outcome.ended for outcome in outcomes) - asked[-1] < SECONDS / 2, told
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == ["checkpoint-1"]


def test_a_process_that_says_nothing_is_not_waited_for_for_ever(tmp_path):
    fault = Fault((1, -9), "", "time.sleep(1000)", changes={"train__ddp_timeout": 3})
    (first, second), _ = met(tmp_path, fault, grace=0.5)
    assert first.exit_code == 1 and second.is_hung and "letters" in second.error
    assert first.output.count("did not respond within the time limit (train.ddp_timeout)") == 1
    assert "checkpoint-1: --resume continues from there." in " ".join(first.output.split())


def arrives(file: Path) -> None:
    if os.environ["RANK"] == "0":
        sys.exit(main(["ppo", str(file)]))


def test_a_process_that_never_arrives_is_missed(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(tiny_run(tmp_path, train__ddp_timeout=2)), encoding="utf-8")
    first, _ = started(arrives, file, folder=tmp_path, timeout=60.0)
    assert first.exit_code == 1 and "Traceback" not in first.told()
    assert "tether: not all of the 2 launched processes connected within 2 s (train.ddp_timeout)" in first.output
    assert first.seconds < SECONDS and not (tmp_path / "out").exists()
