"""What runs on an accelerator computes what it computes on the CPU, and never mixes tensors of both."""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.train.on_accelerator import CASES

OF_THE_MACHINE = ("time/", "speed/", "memory/", "eps", "eval_runtime", "eval_samples_per", "eval_steps_per")
IN_HALF = ("bf16", "bfloat16 weights", "fp16", "LoRA in bf16")
"""Cases whose attention the CPU computes in float32, so that updates differ by rounding in half precision."""
BEFORE_THE_UPDATE = ("objective/", "rollout/", "rewards/", "val/first_ratio_error")


@pytest.fixture(scope="module")
def on_accelerator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerator")
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}  # nothing compiles for this device
    command = [sys.executable, "-m", "tests.train.on_accelerator", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in CASES}


def differing(got, wanted, *, name="", rtol):
    """Where two records differ: numbers beyond ``rtol``, or anything else."""
    if isinstance(wanted, dict):
        keys = {key for key in {*got, *wanted} if not key.startswith(OF_THE_MACHINE)}
        return [x for key in sorted(keys) for x in differing(got.get(key), wanted.get(key), name=key, rtol=rtol)]
    if isinstance(wanted, float) and isinstance(got, float):
        return [] if math.isclose(got, wanted, rel_tol=rtol, abs_tol=1e-6) else [(name, got, wanted)]
    return [] if got == wanted else [(name, got, wanted)]


def before_the_update(metrics):
    return {name: value for name, value in metrics.items() if name.startswith(BEFORE_THE_UPDATE)}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_cpu(case, on_accelerator, tmp_path):
    got, wanted = on_accelerator[case], json.loads(json.dumps(CASES[case](tmp_path), default=str))
    assert not isinstance(got, str), got
    assert len(got) == len(wanted) > 0
    if case in IN_HALF:
        got, wanted = [before_the_update(got[0])], [before_the_update(wanted[0])]
        assert got[0]["val/first_ratio_error"] == 0.0
    rtol = 1e-2 if case in IN_HALF else 1e-3
    assert not [x for g, w in zip(got, wanted, strict=True) for x in differing(g, w, rtol=rtol)]


def test_tensors_of_two_devices_do_not_meet(tmp_path):
    script = """
import torch
from tests.accelerator import DEVICE
x = torch.ones(3, device=DEVICE, requires_grad=True)
(2 * x).sum().backward()
assert x.grad.device == DEVICE and x.grad.tolist() == [2.0, 2.0, 2.0]
assert (x.detach() * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]
x + torch.ones(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "aten::add: wanted all tensors on the same device, got (3,) on abacus:0, (3,) on cpu" in done.stderr
