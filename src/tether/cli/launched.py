"""What the command line knows of a launcher such as ``accelerate launch`` or ``torchrun``, by the environment alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tether.errors import ConfigError

LAUNCHED = ("ppo", "sft", "reward")
"""Commands that several processes can run together."""


def rank() -> int:
    """Number of this process among those that were launched; 0 if none were."""
    return int(os.environ.get("RANK", "0") or 0)


def num_processes() -> int:
    """Processes that were launched, this one included."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def local_rank() -> int:
    """Number of this process among those of its machine; 0 if none were launched."""
    return int(os.environ.get("LOCAL_RANK", "0") or 0)


@contextmanager
def alike() -> Iterator[None]:
    """Inside, what fails does so in every process of a machine: the first one says it, and the others nothing."""
    try:
        yield
    except Exception as error:
        error.is_shared = local_rank() > 0
        raise


def check_command(name: str) -> None:
    """Raises ``ConfigError`` if a command was launched in several processes that runs in one."""
    if num_processes() > 1 and name not in LAUNCHED:
        raise ConfigError(
            f"tether {name} runs in one process, got {num_processes()}: start it without a launcher. Those that can be "
            f"launched are {', '.join(f'tether {each}' for each in LAUNCHED)}"
        )


def signed(text: str) -> str:
    """A message of this process, with its number where there are others that speak too."""
    return f"[process {rank()} of {num_processes()}] {text}" if rank() > 0 else text
