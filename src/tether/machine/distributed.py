"""The only interface between the algorithm and the machine: devices, processes, and their communication.

Every process of a run reads the same configuration and data, and knows every answer, score and advantage of a rollout
batch. Only the work is divided: each process generates, scores and trains on its share, and sends the results to the
others (``tether.train.sharing``). Sharding of weights is handled by engines (``tether.train.engines``).
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import is_initialized
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    gather_object,
    is_deepspeed_available,
)
from torch import Tensor

from tether.config import launched
from tether.errors import ConfigError, LostProcess, OutOfStep, TetherError, TrainingError
from tether.machine import heap
from tether.machine.deepspeed import import_before_group, plugin_of_launch
from tether.metrics.reduce import Metrics

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
TIMEOUT = 1800
"""Seconds that processes wait for each other; the same as in transformers."""
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "peer", "process group", "collective")
"""Parts of the messages of torch's process groups when another process is gone."""
_LATE = ("timed out", "timeout")
"""Parts of these messages when the other process may only be late."""


class Dist:
    """The device and processes of a run, by Accelerate. No code outside of this class deals with ranks.

    Args:
        timeout: seconds that processes wait for each other before the run ends; the first ``Dist`` decides.

    Raises:
        ConfigError: the launched processes do not form a group, or none were launched, as the environment says.
        LostProcess: one of them did not arrive in time.
    """

    stop_asked: Callable[[], str | None]
    """Why this process was asked to stop, or None; the others may not know of it."""
    interruptible: Callable[[Callable[[], Any]], Any]
    """Returns the result of work that this process does by itself inside of ``together``; a stop ends it at once."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.stop_asked, self.interruptible = lambda: None, lambda work: work()
        with _arriving(timeout):
            self.accelerator = _accelerator(timeout)
        # Forwards run under the roles' own autocast; a transformers trainer may have enabled Accelerate's before.
        self.accelerator.native_amp = False
        if self.num_processes != launched.num_processes():
            raise ConfigError(
                f"{launched.num_processes()} processes were launched, but Accelerate runs each of them on its own: "
                "start without a launcher, or give it a configuration file that fits the devices of this machine"
            )
        if self.num_processes > 1:
            atexit.register(_leave)
        if self.device.type == "cpu":
            heap.keep()

    # Processes and shares

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device = self.accelerator.device
        return torch.device("cpu") if device.type == "cpu" else device  # Accelerate sometimes gives CPUs an index

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.accelerator.is_main_process

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        return self.accelerator.process_index

    @property
    def num_processes(self) -> int:
        """Number of processes of the run, on all machines."""
        return self.accelerator.num_processes

    def share(self, count: int) -> range:
        """This process's share of ``count`` items: a contiguous range. The sizes of shares differ by at most one."""
        return share(count, self.rank, self.num_processes)

    def dealt(self, rows: Sequence[T], to: int | None = None) -> Sequence[T]:
        """Every n-th of ``rows``, of n processes: those of this one, or of process ``to``. The first gets the most."""
        return rows[self.rank if to is None else to :: self.num_processes]

    def shares(self, count: int, sharing: int) -> list[range]:
        """Each process's share of ``count`` items if only the first ``sharing`` processes work on them."""
        return [share(count, rank, sharing) if rank < sharing else range(0) for rank in range(self.num_processes)]

    def described(self, command: str, engine: str | None) -> str:
        """Describes what a run computes on, and how many devices it leaves unused.

        Args:
            command: the command that starts it, such as ``tether ppo``.
            engine: the engine that distributes its weights; None without one.
        """
        if self.num_processes > 1:
            return f"{self.num_processes} processes, this one on {self.device}: {engine}"
        devices = torch.accelerator.device_count()
        more = f"; accelerate launch -m {command} … uses all of them" if devices > 1 else ""
        of = f" of {devices} devices{more}" if devices > 1 else ""
        return f"one process, {self.device}{of}" + ("" if engine is None else f": {engine}")

    # Communication

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all processes, elementwise."""
        with self._waiting():
            return self.accelerator.reduce(x, reduction="sum")

    def max(self, x: Tensor) -> Tensor:
        """The maximum of ``x`` over all processes, elementwise."""
        if self.num_processes == 1:
            return x
        with self._waiting():
            x = x.to(self.device, copy=True)
            torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX)
        return x.cpu()

    def computed(self, metrics: Metrics) -> dict[str, float]:
        """Metrics over all processes, each of which collected a part of them."""
        if self.num_processes == 1:
            return metrics.compute()
        return metrics.compute(lambda x: self.sum(x.to(self.device)).cpu(), self.max)

    def any(self, own: bool) -> bool:
        """Whether ``own`` is True in any process."""
        if self.num_processes == 1:
            return own
        return bool(self.sum(torch.tensor(float(own), device=self.device)) > 0)

    def gathered(self, own: T) -> list[T]:
        """The value of ``own`` in each process, in the order of their indices."""
        if self.num_processes == 1:
            return [own]
        with self._waiting():
            return gather_object([own])

    def together(self, work: Callable[[], T]) -> list[T]:
        """The result of ``work`` in each process, in the order of their indices.

        If the work of one process fails, the run fails in all of them with that process's error. Work may communicate
        with other processes only if the work of all of them does.
        """
        if self.num_processes == 1:
            return [work()]
        result, error = None, None
        try:
            result = work()
        except OutOfStep:  # the others are not in step; they notice when this process ends
            raise
        except Exception as raised:
            error = raised
        return self.agreed(result, error)

    def each(self, work: Callable[[], T]) -> T:
        """The result of ``work`` in this process; as with ``together``, a failure in one process fails all."""
        made: list[T] = []
        self.together(lambda: made.append(work()))
        return made[0]

    def agreed(self, result: T, error: Exception | None) -> list[T]:
        """``together`` for work that is already done, given its result or the error that it ended with."""
        if self.num_processes == 1:
            if error is not None:
                raise error
            return [result]
        said = self.gathered((result if error is None else None, _portable(error)))
        failed = [number for number, (_, theirs) in enumerate(said) if theirs is not None]
        if failed:
            first = failed[0]
            shared = error if error is not None and first == self.rank else said[first][1]
            if first > 0:
                shared.add_note(f"raised by process {first} of {self.num_processes}")
            raise met_by_all(shared)
        return [theirs for theirs, _ in said]

    def by_main(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which only the main process runs; its error is raised in all processes."""
        if self.num_processes == 1:
            return work()
        return self.together(lambda: work() if self.is_main else None)[0]

    def main_first(self, work: Callable[[], T]) -> T:
        """The result of ``work`` in this process, run after the main process of each machine has run it and stored its
        files."""
        if self.num_processes == 1:
            return work()
        made: list[T] = []
        for now in (True, False):
            is_turn = self.accelerator.is_local_main_process == now
            self.together((lambda: made.append(work())) if is_turn else lambda: None)
        return made[0]

    def first(self, own: T | None) -> T | None:
        """The first value of ``own`` that is not None; if all are None, the processes only exchange a number."""
        if not self.any(own is not None):
            return None
        return next(said for said in self.gathered(own) if said is not None)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Turns torch's errors about another process that is gone into ``LostProcess``."""
        with lost_told(self.num_processes):
            yield

    # Memory

    def release_memory(self) -> None:
        """Releases unused memory of an accelerator, between phases."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def trim_heap(self) -> None:
        """Returns free pages of the heap to the system, if tensors are on it. The next phase has to get them again,
        which takes time, so this is for runs in which memory matters more."""
        if self.device.type == "cpu":
            heap.trim()


def _accelerator(timeout: float) -> Accelerator:
    launched.check()
    if launched.uses_fsdp() and (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ConfigError(
            f"fsdp_version: got {version}, wanted 2 in the configuration file of accelerate launch. "
            "accelerate to-fsdp2 --config_file FILE --output_file NEW converts one"
        )
    on_cpu, backend, plugin = not torch.accelerator.is_available() and launched.num_processes() > 1, {}, None
    if on_cpu and is_deepspeed_available():
        import_before_group()
    if launched.uses_deepspeed():
        plugin = None if is_initialized() else plugin_of_launch()  # only the first Accelerator gets it
        if on_cpu:  # with cpu=True, Accelerate would not use DeepSpeed
            on_cpu, backend = False, {"backend": "gloo"}
    return Accelerator(
        cpu=on_cpu,
        deepspeed_plugin=plugin,
        mixed_precision=None if is_initialized() else "no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=timeout), **backend),
            DistributedDataParallelKwargs(
                broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
            ),
        ],
    )


def _leave() -> None:
    """Destroys the process group at the end of a program, as torch may abort a process that ends within it.

    Not done after an uncaught error: a failure in one process can leave a collective unfinished, for which destroying
    the group would wait. The others notice when this process ends.
    """
    if not hasattr(sys, "last_value"):  # no uncaught error
        PartialState().destroy_process_group()


def share(count: int, rank: int, num_processes: int) -> range:
    """The share of process ``rank`` of ``count`` items."""
    return range(rank * count // num_processes, (rank + 1) * count // num_processes)


@contextmanager
def _arriving(timeout: float) -> Iterator[None]:
    """Context in which the launched processes connect; turns torch's errors into ``LostProcess``."""
    try:
        yield
    except torch.distributed.DistError as error:
        raise LostProcess(
            f"not all of the {launched.num_processes()} launched processes connected within {timeout:g} s "
            "(train.ddp_timeout). See the output of the missing ones for the reason; on several machines each must "
            f"reach MASTER_ADDR and MASTER_PORT ({str(error).splitlines()[0][:200]})"
        ) from error


@contextmanager
def lost_told(num_processes: int) -> Iterator[None]:
    """Turns torch's errors about a process that is gone into ``LostProcess``; other errors are not changed.

    Raises:
        LostProcess: another process of the run ended, or did not respond for too long.
    """
    try:
        yield
    except RuntimeError as error:
        if num_processes > 1 and any(word in str(error).lower() for word in _LOST):
            if any(word in str(error).lower() for word in _LATE):
                what = "another process of the run did not respond within the time limit (train.ddp_timeout)"
            else:
                what = "another process of the run has ended; its last messages, or its launcher's, give the reason"
            lost = LostProcess(f"{what}. The error in this process: {str(error).splitlines()[0][:200]}")
            raise met_by_all(lost) from error
        raise


def met_by_all(error: E) -> E:
    """Marks an error as raised by every process, so that only the first one reports it."""
    error.is_shared = True
    return error


def _portable(error: Exception | None) -> Exception | None:
    """The error in a form that can be sent to other processes."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling an error's attributes may fail in any way; its text is sufficient
        kind = type(error) if isinstance(error, TetherError) else TrainingError
        return kind(str(error) if isinstance(error, TetherError) else f"{type(error).__name__}: {error}")
    return error
