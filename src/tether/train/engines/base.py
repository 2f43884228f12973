"""What the trainer asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tether.config.schema import RunConfig
from tether.errors import ConfigError, OutOfStep, TetherError
from tether.machine.distributed import lost_told
from tether.models.roles import Host, ModelRoles
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


@contextmanager
def all_together(what: str, num_processes: int) -> Iterator[None]:
    """Inside is something that all processes do together; one that cannot go on with it ends, and so do all.

    Raises:
        OutOfStep: whatever went wrong, so that nobody tries it again by itself.
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
        raise OutOfStep(f"{what}, which all processes do together, failed: {type(error).__name__}: {error}") from error


def out_of_step(what: str, error: torch.OutOfMemoryError) -> OutOfStep:
    """What memory that runs out means for a run of several processes."""
    return OutOfStep(
        f"out of memory in {what}, which all processes do together ({error}): lower train.micro_batch_size, "
        "sampling.batch_size or a reward's batch_size, or set train.gradient_checkpointing"
    )


def refuse_few_bits(config: RunConfig, engine: str) -> None:
    """Raises ``ConfigError`` for weights and moments in few bits, which cannot be spread.

    Args:
        engine: its name in the message.
    """
    if config.model.quantization is not None:
        raise ConfigError(
            f"model.quantization: got {config.model.quantization}, wanted none under {engine}: weights in few bits "
            "cannot be spread. Launch the run with DDP"
        )
    if config.train.optim == "adamw_8bit":
        raise ConfigError(
            f"train.optim: got adamw_8bit, wanted adamw_torch_fused or adamw_torch under {engine}: moments in 8 bits "
            f"cannot be spread. {engine} divides their memory by the number of processes"
        )


@runtime_checkable
class Engine(Protocol):
    """Spreads weights, gradients and optimizer states over processes. Every method is called by all of them alike."""

    name: str
    """What it is called: one process, DDP, FSDP2, ZeRO-3, …"""
    spreads_weights: bool
    """Whether no process has all weights, so that a forward is one of all processes together."""
    flattens: bool
    """Whether optimizers step flat pieces of weights, so that their rule must be of each number by itself."""

    def check(self, config: RunConfig) -> None:
        """Raises ``ConfigError`` for settings that it cannot do; before a model is loaded."""
        ...

    def place(self, roles: ModelRoles) -> None:
        """Takes over the models of ``roles``, which wait on the CPU where weights are spread; comes before their
        optimizers are made."""
        ...

    def spread(self, modules: Sequence[nn.Module], *, waits: bool) -> Host:
        """Takes over a frozen model that plays no role and waits on the CPU, where weights are spread; returns what
        runs forwards with its weights, which are forwards of all processes.

        Args:
            modules: the model, and a head if that is none of its parts.
            waits: whether each process's part is to stay on the CPU while nobody uses it.
        """
        ...

    def prepare(self, optimizers: list[PassOptimizer]) -> None:
        """Takes over the optimizers."""
        ...

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Comes before the gradients of a step: how many backwards of each pass they are made of."""
        ...

    def backward(self, loss: Tensor, role: str) -> None:
        """Adds the gradient of ``loss`` to the parameters that the pass of ``role`` trains; summed over processes after
        the last one that is expected."""
        ...

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leaves parameters out of the next step, whatever their gradients are; comes after the last backward."""
        ...

    def are_finite(self, optimizers: list[PassOptimizer]) -> bool:
        """Whether the gradients are finite, as far as they are here."""
        ...

    def step(self, optimizer: PassOptimizer) -> float:
        """Clips the gradients to the optimizer's limit, steps and clears them; returns their norm before that."""
        ...

    def skip(self, optimizer: PassOptimizer) -> None:
        """Moves the optimizer's schedule on and clears the gradients, without a step."""
        ...

    def drop_gradients(self, optimizers: list[PassOptimizer]) -> None:
        """Forgets all gradients, and what a forward or backward left behind that ended in an error."""
        ...

    # Decoding

    def whole(self) -> AbstractContextManager[None]:
        """Inside, every process has all weights of the policy and may run forwards by itself; nothing is trained."""
        ...

    def in_step(self) -> AbstractContextManager[None]:
        """Inside, every process may run as many forwards of the policy as it has; those with fewer take part in the
        others' before they leave. Nothing is trained, and no process has all weights at a time.

        Each forward gathers the weights anew: with n tokens in the longest answer n times as often as ``whole``.
        """
        ...

    # Weights and states as one process has them

    def part(self, parameter: nn.Parameter) -> Tensor:
        """What of a parameter is kept here; what is written into it is in the parameter."""
        ...

    def num_stepped(self, parameter: nn.Parameter) -> int:
        """How many numbers of a parameter the optimizer of this process will make moments of."""
        ...

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """What of a tensor of the parameter's full size belongs to its part here."""
        ...

    def fill(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Gives a parameter the values of ``full``, as if it had been loaded with them."""
        ...

    def full(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Parameters put together, on the CPU, in the main process; what others return may be empty. Tensors that are
        not spread are given back as they are.

        Args:
            parts: by the same names, what is put together in the place of the parameters' parts.
        """
        ...

    def optimizer_state(self, optimizer: PassOptimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` as one process has it, in the main process; what others return may be less."""
        ...

    def load_optimizer_state(self, optimizer: PassOptimizer, state: dict[str, Any]) -> None:
        """Goes on from the result of ``optimizer_state``, of this engine or of any other."""
        ...
