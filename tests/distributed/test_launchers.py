"""Real launchers start a run in several processes, and end it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.train.runs import tiny_run
from tether.config.load import dump_config
from tether.errors import ConfigError
from tether.machine.distributed import Dist
from tether.machine.precision import check_precision
from tether.metrics.writers import read_jsonl
from tether.models.checkpoints import list_checkpoints
from tether.train import inputs, run
from tether.train.engines.deepspeed import check
from tether.train.engines.replicated import Alone, Replicated

FILES = Path(__file__).parents[2] / "examples" / "accelerate"
ACCELERATE = ["accelerate.commands.launch", "--num_processes", "2", "--config_file"]
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
    "accelerate, DDP": [*ACCELERATE, str(FILES / "ddp.yaml")],
    "accelerate, ZeRO-2": [*ACCELERATE, str(FILES / "zero2.yaml")],
}


TELLS_ITS_THREADS = """
import atexit
from pathlib import Path

atexit.register(lambda: print("left:", *(name.read_text() for name in Path("/proc/self/task").glob("*/comm"))))
"""
"""A sitecustomize module; what it registers is called last."""


def launched(folder: Path, launcher: str, **changes) -> subprocess.Popen:
    """A run in two processes, with a session of its own. Each process says which threads it has at its end."""
    (folder / "sitecustomize.py").write_text(TELLS_ITS_THREADS, encoding="utf-8")
    (folder / "run.yaml").write_text(dump_config(tiny_run(folder, **changes)), encoding="utf-8")
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "tether", "ppo", str(folder / "run.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def said(folder: Path) -> str:
    return " ".join((folder / "log").read_text(encoding="utf-8", errors="replace").split())


@pytest.mark.slow
def test_a_launched_run_says_what_it_runs_on_and_one_process_speaks(tmp_path):
    run = launched(tmp_path, "torchrun", train__max_steps=1)
    assert run.wait(timeout=240) == 0, said(tmp_path)
    assert said(tmp_path).count("on 2 processes, this one on cpu: DDP") == 1
    assert said(tmp_path).count("update 1/1") == 1 and "Warning" not in said(tmp_path)
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) == 1
    assert said(tmp_path).count("left:") >= 2 and "gloo" not in said(tmp_path)  # with threads, its end may be an abort
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


TOLD = "accelerate launch uses mixed_precision"
MIXED_PRECISION = [
    ("no", {}, (False, False), None),
    ("no", {"bf16": True}, (True, False), None),
    ("no", {"fp16": True}, (False, True), None),
    ("bf16", {}, (True, False), None),
    ("bf16", {"bf16": True, "fp16": False}, (True, False), None),
    ("bf16", {"bf16": False}, None, f"train.bf16: got false, but {TOLD} bf16; wanted the same in both"),
    ("bf16", {"fp16": True}, None, f"train.fp16: got true, but {TOLD} bf16; wanted the same in both"),
    ("fp16", {}, (False, True), None),
    ("fp16", {"bf16": False}, (False, True), None),
    ("fp16", {"fp16": True}, (False, True), None),
    ("fp16", {"fp16": False}, None, f"train.fp16: got false, but {TOLD} fp16; wanted the same in both"),
    ("fp16", {"bf16": True}, None, f"train.bf16: got true, but {TOLD} fp16; wanted the same in both"),
    ("fp8", {}, None, "mixed_precision in the configuration of accelerate launch: got fp8, wanted bf16, fp16 or no"),
]


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize(("launcher", "run", "wanted", "told"), MIXED_PRECISION)
def test_mixed_precision_is_what_run_and_launcher_say(tmp_path, monkeypatch, launcher, run, wanted, told, has_bf16):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr(inputs, "bf16_supported", lambda device: has_bf16)
    given = {"train__bf16": None} | {f"train__{name}": value for name, value in run.items()}
    config = tiny_run(tmp_path, **given)
    if told is None:
        check_precision(config)
        train = inputs.resolved(config).train
        nothing_said = launcher == "no" and run == {}
        assert (train.bf16, train.fp16) == ((has_bf16, False) if nothing_said else wanted)
    else:
        with pytest.raises(ConfigError, match=f"^{told}"):
            check_precision(config)


def test_an_engine_is_asked_about_what_the_launcher_says_too(tmp_path, monkeypatch):
    """ZeRO has no scaled losses, and no DeepSpeed is needed to find that out."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    zero = SimpleNamespace(check=lambda config: check({"zero_optimization": {"stage": 2}}, config))
    monkeypatch.setattr(run, "build_engine", lambda dist: zero)
    with pytest.raises(ConfigError, match="mixed_precision of the launch: got float16, which is refused under ZeRO"):
        run.check_processes(tiny_run(tmp_path, train__bf16=None), Dist())
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    run.check_processes(tiny_run(tmp_path, train__bf16=True), Dist())
    with pytest.raises(ConfigError, match="is refused under ZeRO"):
        run.check_processes(tiny_run(tmp_path, train__fp16=True), Dist())


@pytest.mark.parametrize(("name", "is_refused"), [("Alone", False), ("Replicated", False), ("FSDP2", True)])
def test_vllm_gets_no_weights_that_an_engine_has_sharded(tmp_path, monkeypatch, name, is_refused):
    engine = SimpleNamespace(name={"Alone": Alone.name, "Replicated": Replicated.name}.get(name, name))
    monkeypatch.setattr(run, "build_engine", lambda dist: engine)
    engine.check = lambda config: None
    with pytest.raises(ConfigError, match=r"sampling\.vllm: .* got FSDP2") if is_refused else nullcontext():
        run.check_processes(tiny_run(tmp_path, sampling__vllm={}), Dist())


def test_float16_of_the_launcher_and_weights_in_bfloat16_contradict_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match=r"means train.fp16: model.dtype bfloat16 and train.fp16 request two"):
        check_precision(tiny_run(tmp_path, train__bf16=None, model__dtype="bfloat16"))


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
    assert said(tmp_path).count("stopped by SIGTERM; the same command with --resume continues from here") == 1
    (checkpoint,) = list_checkpoints(tmp_path / "out")
    assert checkpoint.name == f"checkpoint-{read_jsonl(metrics)[-1]['step']}"
