"""Real launchers start a run in several processes, and end it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import tiny_run
from tether.config.load import dump_config
from tether.errors import ConfigError
from tether.metrics.writers import read_jsonl
from tether.train import inputs
from tether.train.checkpoint import list_checkpoints

FILES = Path(__file__).parents[2] / "examples" / "accelerate"
ACCELERATE = ["accelerate.commands.launch", "--num_processes", "2", "--config_file"]
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
    "accelerate, DDP": [*ACCELERATE, str(FILES / "ddp.yaml")],
    "accelerate, ZeRO-2": [*ACCELERATE, str(FILES / "zero2.yaml")],
}


def launched(folder: Path, launcher: str, **changes) -> subprocess.Popen:
    """A run in two processes, with a session of its own."""
    (folder / "run.yaml").write_text(dump_config(tiny_run(folder, **changes)), encoding="utf-8")
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "tether", "ppo", str(folder / "run.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def said(folder: Path) -> str:
    return " ".join((folder / "log").read_text(encoding="utf-8", errors="replace").split())


@pytest.mark.slow
def test_a_launched_run_says_what_it_runs_on_and_one_process_speaks(tmp_path):
    run = launched(tmp_path, "torchrun", train__max_steps=1)
    assert run.wait(timeout=240) == 0, said(tmp_path)
    assert said(tmp_path).count("on 2 processes, this one on cpu:0: DDP") == 1
    assert said(tmp_path).count("update 1/1") == 1 and "Warning" not in said(tmp_path)
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) == 1
    for rank in (0, 1):
        log = (tmp_path / "out" / "logs" / f"process-{rank}.log").read_text(encoding="utf-8")
        lines = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in log.splitlines()]
        assert lines[0].startswith("on 2 processes") and "update 1 of 1" in lines
        assert all(re.match(r"\d{4}-\d\d-\d\d ", line) for line in log.splitlines())


@pytest.mark.slow
def test_a_launched_run_under_zero(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install --no-build-isolation .[deepspeed]")
    run = launched(tmp_path, "accelerate, ZeRO-2", train__max_steps=1)
    assert run.wait(timeout=240) == 0, said(tmp_path)
    assert said(tmp_path).count("on 2 processes, this one on cpu: ZeRO-2") == said(tmp_path).count("update 1/1") == 1
    assert (tmp_path / "out" / "model.safetensors").exists()


MIXED_PRECISION = [
    ("no", None, False, None),
    ("no", True, True, None),
    ("bf16", None, True, None),
    ("bf16", True, True, None),
    ("bf16", False, None, "train.bf16: got false, but accelerate launch was told mixed_precision bf16; wanted"),
    ("fp16", True, None, "mixed_precision in the configuration of accelerate launch: got fp16, wanted bf16 or no"),
]


@pytest.mark.parametrize(("launcher", "run", "wanted", "told"), MIXED_PRECISION)
def test_mixed_precision_is_what_run_and_launcher_say(tmp_path, monkeypatch, launcher, run, wanted, told):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr(inputs, "bf16_supported", lambda device: False)
    config = tiny_run(tmp_path, train__bf16=run)
    if told is None:
        inputs.check_precision(config)
        assert inputs.resolved(config).train.bf16 is wanted
    else:
        with pytest.raises(ConfigError, match=f"^{told}"):
            inputs.check_precision(config)


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_the_state(tmp_path):
    run = launched(tmp_path, "accelerate, DDP", train__max_steps=10_000)
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and run.poll() is None and not (metrics.exists() and read_jsonl(metrics)):
        time.sleep(0.1)
    assert run.poll() is None, said(tmp_path)
    run.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    try:
        assert run.wait(timeout=60) != 0
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    print(f"SIGTERM to the launcher: {time.monotonic() - begun:.1f} s")
    assert said(tmp_path).count("stopped by SIGTERM; the same command with --resume goes on from here") == 1
    (checkpoint,) = list_checkpoints(tmp_path / "out")
    assert checkpoint.name == f"checkpoint-{read_jsonl(metrics)[-1]['step']}"
