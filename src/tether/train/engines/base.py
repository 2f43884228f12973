"""What the trainer asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from tether.models.roles import ModelRoles
from tether.train.optim import PassOptimizer


class Hosted(nn.Module):
    """Modules under one roof, whose forward is whatever is to be computed with their weights.

    Engines act before and after the forward of the module that they are given; Tether's forwards are functions.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns."""
        return compute()


@runtime_checkable
class Engine(Protocol):
    """Spreads weights, gradients and optimizer states over processes. Every method is called by all of them alike."""

    name: str
    """What it is called: one process, DDP, FSDP2, ZeRO-3, …"""
    spreads_weights: bool
    """Whether no process has all weights, so that a forward is one of all processes together."""

    def place(self, roles: ModelRoles) -> None:
        """Takes over the models of ``roles``; comes before their optimizers are made."""
        ...

    def prepare(self, optimizers: list[PassOptimizer]) -> None:
        """Takes over the optimizers."""
        ...

    def backward(self, loss: Tensor, role: str, *, more: bool) -> None:
        """Adds the gradient of ``loss``, summed over processes, to the parameters that the pass of ``role`` trains.

        Args:
            more: whether another backward of the same pass follows before the optimizer steps.
        """
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Inside, every process has all weights of the policy and may run forwards by itself; nothing is trained."""
        ...

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Spread tensors put together, on the CPU, in every process."""
        ...
