"""The one seam between the algorithm and the machine: device, processes, backward."""

from __future__ import annotations

import ctypes
import sys

import torch
from accelerate import Accelerator
from torch import Tensor

from tether.errors import ConfigError


class Dist:
    """Where a run computes, by Accelerate. Nothing outside this class knows of ranks or devices."""

    def __init__(self) -> None:
        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            raise ConfigError(
                f"a run uses one process, but {self.accelerator.num_processes} were launched: start `tether ppo` "
                "directly, without accelerate launch or torchrun"
            )

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.accelerator.is_main_process

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of ``loss``, a scalar, to the parameters."""
        self.accelerator.backward(loss)

    def release_memory(self) -> None:
        """Gives back memory that nothing uses, between phases: the device's cache, on a CPU free pages of the heap."""
        if self.device.type == "cpu":
            self.trim_heap()
        else:
            torch.accelerator.empty_cache()

    def trim_heap(self) -> None:
        """Gives free pages of the heap back to the system, where tensors are on it and the C library is glibc.

        glibc seldom fits a new tensor into the place of an old one: the heap grows to twice of what is in it.
        """
        if self.device.type == "cpu" and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all processes, elementwise."""
        return self.accelerator.reduce(x, reduction="sum")
