"""The one seam between the algorithm and the machine: device, processes, backward."""

from __future__ import annotations

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

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all processes, elementwise."""
        return self.accelerator.reduce(x, reduction="sum")
