"""The command line in several processes started by a launcher."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tether.config.launched import local_rank, num_processes, rank
from tether.errors import ConfigError, LostProcess

LAUNCHED = ("ppo", "sft", "reward", "pipeline")
"""The commands that can run in several processes."""
HEAD_START = 10.0
"""Seconds for the first process of a machine to print an error that all met: launchers kill all once one has ended."""


@contextmanager
def alike() -> Iterator[None]:
    """A context in which errors occur in every process of a machine: the first one prints it while the others wait."""
    try:
        yield
    except Exception as error:
        error.is_shared = local_rank() > 0
        if error.is_shared:
            time.sleep(HEAD_START)
        raise


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """The arguments without ``--local_rank=N``, which deepspeed and torch.distributed.launch add: the environment says
    the same.

    Raises:
        ConfigError: the environment says something else.
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--local_rank", "--local-rank"):
            kept.append(word)
            continue
        value = value if equals else next(words, "")
        if value not in (str(local_rank()), "-1"):
            told = os.environ.get("LOCAL_RANK")
            raise ConfigError(
                f"{name}: got {value or 'nothing'}, but LOCAL_RANK is {'not set' if told is None else told}: "
                "launchers set both to the same number; start with torchrun, accelerate launch or deepspeed"
            )
    return kept


def check_command(name: str) -> None:
    """Raises ``ConfigError`` if a single-process command was launched in several processes."""
    if num_processes() > 1 and name not in LAUNCHED:
        raise ConfigError(
            f"tether {name} runs in one process, got {num_processes()}: start it without a launcher. Only "
            f"{', '.join(LAUNCHED[:-1])} and {LAUNCHED[-1]} can be launched"
        )


def signed(text: str) -> str:
    """A message of this process, prefixed by its rank unless it is the first."""
    return f"[process {rank()} of {num_processes()}] {text}" if rank() > 0 else text


def speaks(error: BaseException) -> bool:
    """Whether this process prints the error. An error that all met is printed by the first; the loss of a process by
    the second too, as the first may be the lost one."""
    return not getattr(error, "is_shared", False) or rank() < (2 if isinstance(error, LostProcess) else 1)


def end(code: int, error: BaseException) -> int:
    """The exit code of a failed process. One that fails alone exits here at once: torch might abort on its way out, or
    wait for the others, which have yet to hear of it. An error that all met is printed before any exits, because
    launchers kill the rest once one has ended."""
    if num_processes() == 1:
        return code
    if not getattr(error, "is_shared", False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if not isinstance(error, LostProcess) and "torch" in sys.modules:  # without torch they have not connected yet
        from torch import distributed

        if distributed.is_initialized():
            with suppress(RuntimeError):  # another process is gone by now
                distributed.barrier()
    return code
