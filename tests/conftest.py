"""No test reaches the network or waits for the disk, and tiny models compute on one thread: more only wait for each
other."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from tests.checked import check_calls

torch.set_num_threads(1)
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
