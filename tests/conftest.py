"""No test reaches the network or waits for the disk, and tiny models compute on one thread: more only wait for each
other."""

import gc
import os
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # for the processes that tests start, too

from tests.checked import check_calls

TESTS = Path(__file__).parent
LONGEST = (
    "distributed/test_deepspeed.py", "distributed/test_stages_deepspeed.py", "train/test_options.py",
    "faults/test_ratio_and_kl.py", "test_pipeline.py", "test_readme.py", "distributed/test_stages.py",
    "distributed/test_launchers.py", "models/test_compiled.py", "chaos/test_chaos.py", "distributed/test_fsdp.py",
    "distributed/test_ddp.py", "distributed/test_trl.py", "benchmarks/test_performance.py", "mutants/test_run.py",
    "demo/test_real_model.py", "test_page_pipeline.py", "train/test_accelerator.py",
)  # fmt: skip
"""Files that take long for the number of their tests."""

os.fsync = os.fstat  # no test cuts the power, and a run of three updates would wait for the disk 80 times


def pytest_addoption(parser):
    parser.addoption("--checked", action="store_true", help="check types and shapes of all calls within Tether")


def pytest_configure(config):
    if config.getoption("checked"):
        check_calls()


def pytest_collection(session):
    """Imports leave much that lives to the end: it is looked through neither meanwhile nor with what tests leave."""
    gc.disable()


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Puts the files that take longest first: of those that are left at the end no one keeps a worker from ending."""
    sizes = Counter(item.path for item in items)
    turns = {TESTS / name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (turns.get(item.path, len(turns)), -sizes[item.path]))
