"""Several processes that run a function of a test together, over gloo on this machine.

    results = together(work, 3, folder=tmp_path)                    # what work(3) returns in each of two processes
    outcomes = started(work, 3, folder=tmp_path, timeout=20)        # the same, for work that is to fail

``work`` is a function at the top of a test module, and so are its arguments and results made: both are pickled. The
processes are forked from a server that has imported everything, so that a start costs a tenth of a second and nothing
is left over from the one before: a test may start them as often as it likes. A process that hangs, or is left waiting
for one that failed, is killed, and its stack is part of the test's failure.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE = 20.0
"""Seconds that the others have to end after one process has failed, in ``together``."""


@dataclass(frozen=True)
class Outcome:
    """How one process ended."""

    rank: int
    result: Any
    """What the function returned; None if it did not."""
    error: str
    """Traceback of what it raised; empty if it did not."""
    exit_code: int
    """0, 1 if it raised, that of ``sys.exit``, or less than 0: minus the signal that it was killed by."""
    is_hung: bool
    """Whether it had to be killed here."""
    seconds: float
    """From the start to its end."""
    ended: float
    """When that was, by ``time.monotonic``, which all processes of a machine share."""
    output: str
    """What it wrote to stdout and stderr."""

    def told(self) -> str:
        """Everything about it, for a test's failure."""
        end = "had to be killed" if self.is_hung else f"ended with {self.exit_code}"
        return f"process {self.rank} {end} after {self.seconds:.1f} s\n{self.output}{self.error}"


def together(
    work: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    num_processes: int = 2,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """What ``work`` returns in each process.

    Args:
        folder: where results and outputs are kept; a folder inside it is made.
        num_processes: one is started as without a launcher.
        timeout: seconds from their start, when everything is imported, after which they are killed.
        environment: of the processes, beside the present one and what a launcher sets.

    Raises:
        AssertionError: one of them failed or hung; says what each wrote, and the stacks of those that hung.
    """
    options = {"num_processes": num_processes, "timeout": timeout, "environment": environment, "grace": GRACE}
    outcomes = started(work, *arguments, folder=folder, **options)
    if any(outcome.exit_code != 0 or outcome.is_hung for outcome in outcomes):
        raise AssertionError("\n".join(outcome.told() for outcome in outcomes))
    return [outcome.result for outcome in outcomes]


def alone(work: Callable[..., Any], *arguments: Any, folder: Path, timeout: float = 120.0) -> Any:
    """What ``work`` returns in one process without a launcher."""
    (result,) = together(work, *arguments, folder=folder, num_processes=1, timeout=timeout)
    return result


def started(
    work: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    num_processes: int = 2,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    grace: float | None = None,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Outcome]:
    """How each process ended that ran ``work``.

    Args:
        folder, num_processes, timeout, environment: as ``together``.
        grace: seconds that the others have once one has failed; as long as ``timeout`` if left out.
        meanwhile: called with their process numbers once they run.
    """
    own = folder / f"processes-{time.monotonic_ns()}"
    own.mkdir(parents=True)
    launch = {} if num_processes == 1 else _rendezvous(num_processes)
    processes = []
    for rank in range(num_processes):
        ranks = {} if num_processes == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        variables = {**(environment or {}), **launch, **ranks}
        processes.append(_server().Process(target=_run, args=(work, arguments, own, rank, variables)))
    for process in processes:
        process.start()
    while not all((own / f"output-{rank}").exists() for rank in range(num_processes)):
        time.sleep(0.02)  # the server imports before the first of all
    begun = time.monotonic()
    if meanwhile is not None:
        meanwhile([process.pid for process in processes])
    ends: dict[int, float] = {}
    deadline = begun + timeout
    while len(ends) < num_processes and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ends and not process.is_alive():
                ends[rank] = time.monotonic()
                if process.exitcode != 0 and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.02)
    hung = [rank for rank in range(num_processes) if rank not in ends]
    for rank in hung:
        os.kill(processes[rank].pid, signal.SIGUSR1)  # writes its stack
    time.sleep(0.5 if hung else 0)
    for rank in hung:
        processes[rank].kill()
        processes[rank].join()
        ends[rank] = time.monotonic()
    return [
        _outcome(own, rank, processes[rank].exitcode, rank in hung, ends[rank], begun) for rank in range(num_processes)
    ]


def _outcome(folder: Path, rank: int, exit_code: int, is_hung: bool, ended: float, begun: float) -> Outcome:
    def text(name: str) -> str:
        file = folder / f"{name}-{rank}"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    result = folder / f"result-{rank}"
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    stack = f"stack:\n{text('stack')}" if is_hung else ""
    return Outcome(rank, value, text("error") + stack, exit_code, is_hung, ended - begun, ended, text("output"))


def _rendezvous(num_processes: int) -> dict[str, str]:
    """What a launcher tells its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    count = str(num_processes)
    return {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _server() -> Any:
    """Forks processes that have everything imported; begun with the first."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.distributed.preload"])
    return server


def _run(work: Callable[..., Any], arguments: tuple, folder: Path, rank: int, variables: Mapping[str, str]) -> None:
    """The life of one process."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.update(variables)
    try:
        result = work(*arguments)
    except SystemExit:
        raise
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise SystemExit(1) from None
    partial = folder / f"result-{rank}.partial"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result-{rank}")
    sys.stdout.flush()
    os._exit(0)  # no farewell that waits for the others
