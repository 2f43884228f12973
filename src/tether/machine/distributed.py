"""The one seam between the algorithm and the machine: devices, processes, and what they tell each other.

Every process of a run reads the same configuration and the same data and knows every answer, score and advantage of a
rollout batch. What is divided is the work: each decodes, scores and trains on its share, and tells the others what came
of it (``tether.train.sharing``). How weights are spread is an engine's matter (``tether.train.engines``).
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
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, gather_object
from torch import Tensor

from tether.config import launched
from tether.errors import ConfigError, LostProcess, OutOfStep, TetherError, TrainingError
from tether.machine import heap
from tether.metrics.reduce import Metrics

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
TIMEOUT = 1800
"""Seconds that processes wait for each other, as in transformers."""
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "peer", "process group", "collective")
"""What the messages of torch's process groups hold when another process is gone."""
_LATE = ("timed out", "timeout")
"""What they hold when it may only be late."""


class Dist:
    """Where a run computes and with whom, by Accelerate. Nothing outside of this class counts ranks.

    Args:
        timeout: seconds that processes wait for each other before the run ends; the first ``Dist`` decides.

    Raises:
        ConfigError: the launched processes do not find each other.
        LostProcess: one of them was not there in time.
    """

    stop_asked: Callable[[], str | None]
    """Why this process was asked to stop, or None; the others may not know of it."""
    interruptible: Callable[[Callable[[], Any]], Any]
    """What some work returns that this process does by itself, inside of ``together``; a stop ends it at once."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.stop_asked, self.interruptible = lambda: None, lambda work: work()
        with _arriving(timeout):
            self.accelerator = _accelerator(timeout)
        # Forwards run under the roles' own autocast; a trainer of transformers may have left another in the process.
        self.accelerator.native_amp = False
        if self.num_processes != launched.num_processes():
            raise ConfigError(
                f"{launched.num_processes()} processes were launched, but Accelerate runs each of them by itself: "
                "leave out the launcher, or give it a configuration file that fits the devices of this machine"
            )
        if self.num_processes > 1:
            atexit.register(_leave)
        if self.device.type == "cpu":
            heap.keep()

    # Who is there

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device = self.accelerator.device
        return torch.device("cpu") if device.type == "cpu" else device  # Accelerate numbers CPUs at times

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.accelerator.is_main_process

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.accelerator.process_index

    @property
    def num_processes(self) -> int:
        """Processes of the run, on all machines."""
        return self.accelerator.num_processes

    def share(self, count: int) -> range:
        """Which of ``count`` things this process does: neighbours, as many as any other process or one less."""
        return share(count, self.rank, self.num_processes)

    def dealt(self, rows: Sequence[T], to: int | None = None) -> Sequence[T]:
        """Every n-th of ``rows``, of n processes: this one's, or those of process ``to``. The first gets the most."""
        return rows[self.rank if to is None else to :: self.num_processes]

    def shares(self, count: int, sharing: int) -> list[range]:
        """Which of ``count`` things each process does where the first ``sharing`` processes do all of them."""
        return [share(count, rank, sharing) if rank < sharing else range(0) for rank in range(self.num_processes)]

    def described(self, command: str, engine: str | None) -> str:
        """What a run computes on, and what more there is.

        Args:
            command: what starts it, such as ``tether ppo``.
            engine: who spreads its weights; None where nobody does.
        """
        if self.num_processes > 1:
            return f"{self.num_processes} processes, this one on {self.device}: {engine}"
        devices = torch.accelerator.device_count()
        more = f"; accelerate launch -m {command} … uses all of them" if devices > 1 else ""
        of = f" of {devices} devices{more}" if devices > 1 else ""
        return f"one process, {self.device}{of}" + ("" if engine is None else f": {engine}")

    # Telling each other

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

    def summed(self, x: Tensor) -> Tensor:
        """``sum`` of a tensor that may be on another device than the processes talk through."""
        return self.sum(x.to(self.device)).cpu() if self.num_processes > 1 else x

    def computed(self, metrics: Metrics) -> dict[str, float]:
        """Metrics that every process collected a part of, as numbers of the whole."""
        return metrics.compute(self.summed, self.max) if self.num_processes > 1 else metrics.compute()

    def any(self, own: bool) -> bool:
        """Whether it is so in any process."""
        if self.num_processes == 1:
            return own
        return bool(self.sum(torch.tensor(float(own), device=self.device)) > 0)

    def gathered(self, own: T) -> list[T]:
        """What each process says, in the order of their numbers."""
        if self.num_processes == 1:
            return [own]
        with self._waiting():
            return gather_object([own])

    def together(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returns in each process, in the order of their numbers.

        Work of one process may fail by itself: then the run fails in all of them, with that one's error. It may talk to
        other processes only where the work of all of them does.
        """
        if self.num_processes == 1:
            return [work()]
        result, error = None, None
        try:
            result = work()
        except OutOfStep:  # the others are elsewhere, and hear of it by the end of this process
            raise
        except Exception as raised:
            error = raised
        return self.agreed(result, error)

    def each(self, work: Callable[[], T]) -> T:
        """What ``work`` returns here; as ``together``, what fails in one process fails in all."""
        made: list[T] = []
        self.together(lambda: made.append(work()))
        return made[0]

    def agreed(self, result: T, error: Exception | None) -> list[T]:
        """``together`` of work that is done: its result, or the error that it ended with."""
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
                shared.add_note(f"said by process {first} of {self.num_processes}")
            raise met_by_all(shared)
        return [theirs for theirs, _ in said]

    def by_main(self, work: Callable[[], T]) -> T:
        """What ``work`` returns in the main process, which alone does it; its error is raised in all of them."""
        if self.num_processes == 1:
            return work()
        return self.together(lambda: work() if self.is_main else None)[0]

    def main_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns here, after the main process of each machine has done it: what it stores is there."""
        if self.num_processes == 1:
            return work()
        made: list[T] = []
        for now in (True, False):
            is_turn = self.accelerator.is_local_main_process == now
            self.together((lambda: made.append(work())) if is_turn else lambda: None)
        return made[0]

    def first(self, own: T | None) -> T | None:
        """What the first process says that says anything; where none does, they exchange no more than a number."""
        if not self.any(own is not None):
            return None
        return next(said for said in self.gathered(own) if said is not None)

    def wait(self) -> None:
        """Waits until all processes are here."""
        with self._waiting():
            self.accelerator.wait_for_everyone()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, what torch says when another process is gone becomes ``LostProcess``."""
        with lost_told(self.num_processes):
            yield

    # Memory

    def release_memory(self) -> None:
        """Gives back memory of an accelerator that nothing uses, between phases."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def trim_heap(self) -> None:
        """Gives free pages of the heap back to the system, where tensors are on it. The next phase has to be given them
        anew, which takes its time: for runs in which memory counts more."""
        if self.device.type == "cpu":
            heap.trim()


def _accelerator(timeout: float) -> Accelerator:
    if launched.uses_fsdp() and (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ConfigError(
            f"fsdp_version: got {version}, wanted 2 in the configuration file of accelerate launch. "
            "accelerate to-fsdp2 --config_file FILE --output_file NEW converts one"
        )
    on_cpu, backend, plugin = not torch.accelerator.is_available() and launched.num_processes() > 1, {}, None
    if launched.uses_deepspeed():
        from tether.machine.deepspeed import plugin_of_launch

        plugin = None if is_initialized() else plugin_of_launch()  # of all Accelerators the first has it
        if on_cpu:  # with cpu=True Accelerate would leave DeepSpeed out
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
    """Leaves the group of processes at the end of a program: torch may abort a process that ends within it.

    What fails in one process alone can leave a collective behind that leaving would wait for; the others hear of it by
    the end of the process.
    """
    if not hasattr(sys, "last_value"):  # an error that nobody caught
        PartialState().destroy_process_group()


def share(count: int, rank: int, num_processes: int) -> range:
    """Which of ``count`` things process ``rank`` does."""
    return range(rank * count // num_processes, (rank + 1) * count // num_processes)


@contextmanager
def _arriving(timeout: float) -> Iterator[None]:
    """Inside, the launched processes find each other."""
    try:
        yield
    except torch.distributed.DistError as error:
        raise LostProcess(
            f"not all of the {launched.num_processes()} launched processes were there within {timeout:g} s "
            "(train.ddp_timeout). What those that are missing wrote says why; on several machines each must reach "
            f"MASTER_ADDR and MASTER_PORT ({str(error).splitlines()[0][:200]})"
        ) from error


@contextmanager
def lost_told(num_processes: int) -> Iterator[None]:
    """Inside, torch's error about a process that is gone becomes ``LostProcess``; other errors stay what they are.

    Raises:
        LostProcess: another process of the run ended, or said nothing for too long.
    """
    try:
        yield
    except RuntimeError as error:
        if num_processes > 1 and any(word in str(error).lower() for word in _LOST):
            if any(word in str(error).lower() for word in _LATE):
                what = "another process of the run said nothing for so long that this one gave up (train.ddp_timeout)"
            else:
                what = "another process of the run has ended; what it said last, or its launcher, says why"
            lost = LostProcess(f"{what}. What this one was told: {str(error).splitlines()[0][:200]}")
            raise met_by_all(lost) from error
        raise


def met_by_all(error: E) -> E:
    """An error that every process raises, so that the first one says it and the others nothing."""
    error.is_shared = True
    return error


def _portable(error: Exception | None) -> Exception | None:
    """The error in a form that other processes can read."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling says of an error's parts: its text is what counts
        kind = type(error) if isinstance(error, TetherError) else TrainingError
        return kind(str(error) if isinstance(error, TetherError) else f"{type(error).__name__}: {error}")
    return error
