"""Memory that nothing uses goes back to the system."""

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.train.runs import tiny_run
from tether.machine import heap
from tether.machine.distributed import Dist
from tether.train.run import train_policy
from tether.train.update import Update

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


def resident():
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")
def test_free_pages_below_a_block_in_use_go_back():
    blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
    last = blocks.pop()  # the heap cannot shrink below it
    full = resident()
    del blocks
    Dist().trim_heap()
    assert full - resident() > 80e6 and len(last) == 100_000


FAULTS = """
import resource, torch
from tether.machine.distributed import Dist
Dist()
for round in range(110):
    if round == 10:  # the first ones find their places on a heap that grows
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = None
    tensors = [torch.empty(2**20).fill_(1.0) for _ in range(4)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")
@pytest.mark.parametrize(("variables", "keeps"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_what_is_made_again_and_again_is_not_given_back_in_between(variables, keeps):
    run = [sys.executable, "-c", FAULTS]
    pages = int(subprocess.run(run, capture_output=True, text=True, check=True, env=os.environ | variables).stdout)
    assert pages < 1024 if keeps else pages >= 100 * 1024  # of 400 tensors of 1024 each


def test_what_is_kept_and_what_is_on_the_heap(monkeypatch):
    settings, of_malloc_h = [], {"M_TRIM_THRESHOLD": -1, "M_MMAP_THRESHOLD": -3}
    monkeypatch.setattr(heap, "_glibc", lambda: SimpleNamespace(mallopt=lambda *setting: settings.append(setting)))
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    heap.keep(2**27)
    assert settings == [(of_malloc_h["M_TRIM_THRESHOLD"], 2**27), (of_malloc_h["M_MMAP_THRESHOLD"], heap.LARGEST)]


@pytest.mark.parametrize(("platform", "loaded"), [("darwin", []), ("linux", [None, None])])
def test_without_glibc_nothing_is_done(monkeypatch, platform, loaded):
    seen = []
    monkeypatch.setattr(heap.sys, "platform", platform)
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: seen.append(name) or SimpleNamespace(malloc_trim=pytest.fail))
    heap.keep()
    heap.trim()  # a C library that has one of the two functions is another one
    assert seen == loaded


PHASES = """
import resource, torch
from tether.machine.distributed import Dist
dist, faults = Dist(), []
for phase in range(5):
    tensors = [torch.empty(2**20).fill_(1.0) for _ in range(60)]
    del tensors
    dist.release_memory()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-3])
"""


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")
def test_what_a_phase_took_is_there_for_the_next():
    done = subprocess.run([sys.executable, "-c", PHASES], capture_output=True, text=True, check=True)
    # of 120 tensors of 1,024 pages, in two phases; the heap finds its size in the two before
    assert int(done.stdout) <= 1024


@pytest.mark.parametrize("checkpointing", [False, True])
def test_phases_release_memory_and_with_checkpointing_the_heap_is_trimmed(
    tmp_path, monkeypatch, checkpointing
):
    calls = {"release_memory": 0, "trim_heap": 0}
    for name in calls:
        monkeypatch.setattr(Dist, name, lambda dist, name=name: calls.update({name: calls[name] + 1}))
    settings = {"train__max_steps": 2, "ppo__num_ppo_epochs": 1, "value__kind": "model"}
    config = tiny_run(tmp_path, **settings, train__gradient_checkpointing=checkpointing)
    train_policy(config)
    passes = 2 * 2 * config.train.rollout_batch_size // config.train.micro_batch_size
    assert calls == {"release_memory": 6, "trim_heap": passes + 6 if checkpointing else 0}


def test_of_a_step_the_largest_micro_batch_comes_first(tmp_path, monkeypatch):
    passed, accumulate = [], Update.accumulate

    def noted(update, pass_, item, *args, **options):
        passed.append((pass_.name, item.batch.token_ids.numel()))
        return accumulate(update, pass_, item, *args, **options)

    monkeypatch.setattr(Update, "accumulate", noted)
    changes = {"value__kind": "model", "train__rollout_batch_size": 12, "train__micro_batch_size": 3}
    train_policy(tiny_run(tmp_path, **changes, ppo__num_mini_batches=1, train__max_steps=1))
    steps = [passed[start : start + 4] for start in range(0, len(passed), 4)]  # four micro-batches each
    assert [{name for name, _ in step} for step in steps] == [{"policy"}, {"value"}] * 2
    sizes = [[size for _, size in step] for step in steps]
    assert len(set(sizes[0])) > 1, "a test that cannot fail"
    assert sizes == [sorted(sizes[0], reverse=True)] * 4


def test_a_stage_before_may_have_computed_in_another_precision():
    program = (
        "from accelerate import Accelerator\n"
        "Accelerator(mixed_precision='bf16')\n"
        "from tether.machine.distributed import Dist\n"
        "print(Dist().num_processes)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["1"], done.stderr
