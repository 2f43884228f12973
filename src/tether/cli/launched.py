"""What the command line makes of several processes that a launcher started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tether.config.launched import local_rank, num_processes, rank
from tether.errors import ConfigError, LostProcess

LAUNCHED = ("ppo", "sft", "reward", "pipeline")
"""The commands that several processes can run together."""
HEAD_START = 10.0
"""Seconds that the first process of a machine has to say what all have met: launchers end all once one has ended."""


@contextmanager
def alike() -> Iterator[None]:
    """Inside, what fails does so in every process of a machine: the first one says it, and the others wait for that."""
    try:
        yield
    except Exception as error:
        error.is_shared = local_rank() > 0
        if error.is_shared:
            time.sleep(HEAD_START)
        raise


def check_command(name: str) -> None:
    """Raises ``ConfigError`` if a command was launched in several processes that runs in one."""
    if num_processes() > 1 and name not in LAUNCHED:
        raise ConfigError(
            f"tether {name} runs in one process, got {num_processes()}: start it without a launcher. Only "
            f"{', '.join(LAUNCHED[:-1])} and {LAUNCHED[-1]} can be launched"
        )


def signed(text: str) -> str:
    """A message of this process, with its number where there are others that speak too."""
    return f"[process {rank()} of {num_processes()}] {text}" if rank() > 0 else text


def speaks(error: BaseException) -> bool:
    """Whether this process says what went wrong: what all of them have met, the first one says; that one of them is
    gone, the second one too, as it may be the first."""
    return not getattr(error, "is_shared", False) or rank() < (2 if isinstance(error, LostProcess) else 1)


def end(code: int, error: BaseException) -> int:
    """The exit code of a process that failed. One of several that fails alone ends here and now: torch might abort it
    on its way out, or wait for the others, who are to hear of it. What all have met is said before any of them ends:
    launchers end the rest once one has."""
    if num_processes() == 1:
        return code
    if not getattr(error, "is_shared", False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if not isinstance(error, LostProcess) and "torch" in sys.modules:  # without it they have not met yet
        from torch import distributed

        if distributed.is_initialized():
            with suppress(RuntimeError):  # another one is gone by now
                distributed.barrier()
    return code
