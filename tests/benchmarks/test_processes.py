"""The check of engines on GPUs sees weights that differ, and weights that are no numbers."""

import sys

import pytest
import torch
from benchmarks.gpu import processes

START, ONE = ({"a": torch.zeros(2), "b": torch.full((3,), x)} for x in (0.0, 0.5))


@pytest.mark.parametrize(
    "weights, log, code",
    [
        ({"a": torch.zeros(2), "b": torch.full((3,), 0.500001)}, "", 0),
        ({"a": torch.zeros(2), "b": torch.full((3,), 0.6)}, "", 1),
        ({"a": torch.zeros(2), "b": torch.tensor([0.5, float("nan"), 0.5])}, "", 1),
        (None, "no such engine", 1),
        (ONE, "NCCL version 2", 1),  # without a GPU
    ],
)
def test_an_engine_that_differs_fails_or_talks_otherwise_is_told(monkeypatch, tmp_path, capsys, weights, log, code):
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(processes, "save_tiny", lambda *given, **more: None)
    monkeypatch.setattr(processes, "load_file", lambda path: START)
    monkeypatch.setattr(
        processes, "trained", lambda folder, name, launcher, count: (ONE if name == "one" else weights, log)
    )
    monkeypatch.setattr(sys, "argv", ["processes", "--engines", "zero2", "-o", str(tmp_path)])
    assert processes.main() == code
    assert "2 processes, gloo; one process moved by 5.0e-01" in capsys.readouterr().out
