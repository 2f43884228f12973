"""The harness of distributed tests: what it says of processes that work, fail and hang."""

from __future__ import annotations

import os
import time

import pytest

from tests.distributed.harness import alone, started, together
from tether.machine.distributed import Dist


def summed(number: int) -> tuple[int, int, float]:
    import torch

    dist = Dist()
    return dist.rank, dist.num_processes, float(dist.sum(torch.tensor(float(number + dist.rank))))


def test_results_of_all_processes(tmp_path):
    assert together(summed, 3, folder=tmp_path) == [(0, 2, 7.0), (1, 2, 7.0)]
    assert alone(summed, 3, folder=tmp_path) == (0, 1, 3.0)


def fails_in_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no third wheel")
    time.sleep(60)


def test_a_failure_ends_all_and_a_hang_has_its_stack(tmp_path):
    first, second = started(fails_in_one, folder=tmp_path, grace=0.3)
    assert (second.exit_code, second.is_hung) == (1, False) and "no third wheel" in second.error
    assert first.is_hung and "in fails_in_one" in first.error and first.seconds < 10
    with pytest.raises(AssertionError, match="stack"):
        together(fails_in_one, folder=tmp_path, timeout=1.0)
