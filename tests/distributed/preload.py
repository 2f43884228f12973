"""Imported by the server that forks the processes of distributed tests: it starts no thread and trains nothing."""

import importlib
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from accelerate.utils import is_deepspeed_available
from jaxtyping import install_import_hook

with install_import_hook("tether", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"):
    for name in ("tether.cli.main", "tether.cli.commands", "tether.train.plan", "tether.train.run"):
        importlib.import_module(name)
for name in ("pytest", "tests.train.runs", *(["deepspeed"] if is_deepspeed_available() else [])):
    importlib.import_module(name)

torch.set_num_threads(1)
