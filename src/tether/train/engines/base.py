"""The interface between the trainer and an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tether.config.schema import RunConfig
from tether.errors import ConfigError, OutOfStep, TetherError
from tether.machine.distributed import Dist, lost_told
from tether.models.roles import Host, ModelRoles, Role
from tether.train.optim import PassOptimizer


class Hosted(nn.Module):
    """A container of modules whose forward runs any closure that uses their weights.

    Engines act before and after the forward of the module they are given; Tether's forward passes are functions.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Returns ``compute()``."""
        return compute()


@contextmanager
def all_together(what: str, num_processes: int) -> Iterator[None]:
    """Context for work that all processes do together: a process that cannot continue it ends, and so do all others.

    Raises:
        OutOfStep: for any error, so that no process retries by itself.
        LostProcess: another process is gone.
    """
    try:
        with lost_told(num_processes):
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_step(what, error) from error
    except TetherError:
        raise
    except Exception as error:
        raise OutOfStep(f"{what}, in which all processes take part, failed: {type(error).__name__}: {error}") from error


def out_of_step(what: str, error: torch.OutOfMemoryError) -> OutOfStep:
    """The error for running out of memory in a run of several processes."""
    return OutOfStep(
        f"out of memory in {what}, in which all processes take part ({error}): lower train.micro_batch_size, "
        "sampling.batch_size or a reward's batch_size, or set train.gradient_checkpointing"
    )


def by_model(roles: Iterable[Role]) -> dict[nn.Module, list[Role]]:
    """The roles that each model plays, in the order of their first roles."""
    found: dict[nn.Module, list[Role]] = {}
    for role in roles:
        found.setdefault(role.model, []).append(role)
    return found


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Clears the gradients of parameters: without one, a parameter and its moments do not change in a step."""
    for parameter in parameters:
        parameter.grad = None


def kept_by_main(
    tensors: Mapping[str, Tensor], gather: Callable[[str, Tensor], Tensor], dist: Dist
) -> dict[str, Tensor]:
    """Gathers one tensor at a time, and keeps them on the CPU of the main process; shared tensors stay shared.

    Args:
        gather: returns the whole tensor of a name; called in all processes.
    """
    whole: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, x in tensors.items():
        if id(x) not in seen:
            with lost_told(dist.num_processes):
                gathered = gather(name, x)
            seen[id(x)] = gathered.cpu() if dist.is_main else gathered.new_empty(0)
        if dist.is_main:
            whole[name] = seen[id(x)]
    return whole


def refuse_few_bits(config: RunConfig, engine: str) -> None:
    """Raises ``ConfigError`` for quantized weights and 8-bit moments, which cannot be sharded.

    Args:
        engine: the engine's name in the message.
    """
    if config.model.quantization is not None:
        raise ConfigError(
            f"model.quantization: got {config.model.quantization}, wanted none under {engine}: quantized weights "
            "cannot be sharded. Launch the run with DDP"
        )
    if config.train.optim == "adamw_8bit":
        raise ConfigError(
            f"train.optim: got adamw_8bit, wanted adamw_torch_fused or adamw_torch under {engine}: 8-bit moments "
            f"cannot be sharded. {engine} divides their memory by the number of processes"
        )


@runtime_checkable
class Engine(Protocol):
    """Distributes weights, gradients and optimizer states over processes. All processes must call every method."""

    name: str
    """Name of the engine: one process, DDP, FSDP2, ZeRO-3, …"""
    spreads_weights: bool
    """Whether weights are sharded, so that no process has all of them and all take part in each forward pass."""
    flattens: bool
    """Whether optimizers step flat pieces of weights, so that their update rule must be elementwise."""

    def check(self, config: RunConfig) -> None:
        """Raises ``ConfigError`` for settings that the engine does not support; called before a model is loaded."""
        ...

    def place(self, roles: ModelRoles) -> None:
        """Takes over the models of ``roles``, which are on the CPU if weights are to be sharded. Called before their
        optimizers are created."""
        ...

    def spread(self, modules: Sequence[nn.Module], *, waits: bool) -> Host:
        """Takes over a frozen model that plays no role, and is on the CPU if weights are to be sharded. Returns a
        function that runs forward passes with its weights, in which all processes take part.

        Args:
            modules: the model, and its head if that is not part of it.
            waits: whether each process's part stays on the CPU while it is not in use.
        """
        ...

    def prepare(self, optimizers: list[PassOptimizer]) -> None:
        """Takes over the optimizers."""
        ...

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Called before the gradients of a step are computed, with the number of backward passes for each pass."""
        ...

    def backward(self, loss: Tensor, role: str) -> None:
        """Adds the gradient of ``loss`` to the parameters that the pass of ``role`` trains; summed over processes after
        the last expected call."""
        ...

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Excludes parameters from the next step, whatever their gradients are; called after the last backward pass."""
        ...

    def are_finite(self, optimizer: PassOptimizer) -> bool:
        """Whether this process's part of the gradients that the optimizer would step with is finite."""
        ...

    def step(self, optimizer: PassOptimizer) -> float:
        """Clips the gradients to the optimizer's limit, steps and clears them; returns their norm before clipping."""
        ...

    def skip(self, optimizer: PassOptimizer) -> None:
        """Advances the optimizer's schedule and clears the gradients, without a step."""
        ...

    def drop_gradients(self, optimizers: list[PassOptimizer]) -> None:
        """Discards all gradients, and what a failed forward or backward pass left behind."""
        ...

    # Decoding

    def whole(self) -> AbstractContextManager[None]:
        """Within this context, every process has all weights of the policy and may run forward passes by itself.
        Nothing is trained."""
        ...

    def in_step(self) -> AbstractContextManager[None]:
        """Within this context, every process may run any number of forward passes of the policy; those with fewer take
        part in those of the others before they leave. Nothing is trained, and no process has all weights at once.

        Each forward pass gathers the weights again: with n tokens in the longest answer, n times as often as ``whole``.
        """
        ...

    # Weights and states as one process has them

    def part(self, parameter: nn.Parameter) -> Tensor:
        """This process's part of a parameter; writing to it changes the parameter."""
        ...

    def num_stepped(self, parameter: nn.Parameter) -> int:
        """Number of elements of a parameter for which this process's optimizer is yet to create moments."""
        ...

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The section of a tensor of the parameter's full size that corresponds to this process's part."""
        ...

    def fill(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Sets a parameter to the values of ``full``, as if it had been loaded with them."""
        ...

    def full(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Gathers parameters on the CPU of the main process; other processes may return nothing. Tensors that are not
        sharded are returned unchanged.

        Args:
            parts: tensors to gather instead of the parameters' parts, by the same names.
        """
        ...

    def optimizer_state(self, optimizer: PassOptimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` as with a single process, in the main process; others may return less."""
        ...

    def load_optimizer_state(self, optimizer: PassOptimizer, state: dict[str, Any]) -> None:
        """Restores the result of ``optimizer_state``, of this engine or any other."""
        ...
