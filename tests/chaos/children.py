"""Work in child processes that are forked with everything imported, so that each costs no start and may be killed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLS = (signal.SIGKILL, signal.SIGALRM)
"""Signals that end a child in whatever it does: sent by itself, or by its clock."""


class Killed(Exception):
    """The child was killed."""


class Failed(AssertionError):
    """The child failed; the message has its traceback."""


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a child process, whose output goes nowhere.

    The parent must not have trained: autograd's threads do not survive a fork.

    Raises:
        Killed: it was killed.
        Failed: it raised, or ended by another signal.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result", Path(folder) / "log"
        child = os.fork()
        if child == 0:
            _run(work, result, log)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in KILLS:
            raise Killed
        if status != 0 or not result.exists():
            raise Failed(f"status {status}\n{log.read_text(errors='replace')[-6000:]}")
        return pickle.loads(result.read_bytes())


def _run(work: Callable[[], Any], result: Path, log: Path) -> None:
    """The child's life: it never returns."""
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        value = work()
        result.write_bytes(pickle.dumps(value))
        code = 0
    except BaseException:  # whatever happens, the child must not go on with the parent's work
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
