"""Imported by the server that forks the processes of distributed tests: it starts no thread and trains nothing."""

import gc
import importlib
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from accelerate.utils import is_deepspeed_available

from tests.checked import check_calls

check_calls()
for name in ("tether.cli.main", "tether.cli.commands", "tether.train.plan", "tether.train.run", "tests.train.runs"):
    importlib.import_module(name)
for name in ("pytest", *(["deepspeed"] if is_deepspeed_available() else [])):
    importlib.import_module(name)

torch.set_num_threads(1)
os.fsync = os.fstat  # as in tests/conftest.py
gc.freeze()  # or each process would look through all of it, and copy it for that
