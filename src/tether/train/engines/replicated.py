"""Every process has all weights: a single process, or several under torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tether.config.schema import RunConfig
from tether.machine.distributed import Dist, lost_told
from tether.models.adapters import flags_kept
from tether.models.roles import Host, ModelRoles, Pass, directly
from tether.train.engines.base import Hosted, all_together, forget
from tether.train.optim import PassOptimizer, are_finite


class Alone:
    """One process: nothing is distributed."""

    name = "one process"
    spreads_weights = flattens = False

    def check(self, config: RunConfig) -> None:
        """Accepts every setting."""

    def place(self, roles: ModelRoles) -> None:
        """Does not change the models."""

    def spread(self, modules: Sequence[nn.Module], *, waits: bool) -> Host:
        """Does not change the model."""
        return directly

    def prepare(self, optimizers: list[PassOptimizer]) -> None:
        """Does not change the optimizers."""

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Not needed: the last backward pass is like the others."""

    def backward(self, loss: Tensor, role: str) -> None:
        """Adds the gradient of ``loss`` to the parameters."""
        loss.backward()

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clears their gradients."""
        forget(parameters)

    def are_finite(self, optimizer: PassOptimizer) -> bool:
        """Checks every gradient."""
        return are_finite(optimizer.gradients)

    def step(self, optimizer: PassOptimizer) -> float:
        """Clips, then steps."""
        norm = optimizer.clip()
        optimizer.step()
        return norm

    def skip(self, optimizer: PassOptimizer) -> None:
        """Advances the optimizer's schedules without a step."""
        optimizer.skip()

    def drop_gradients(self, optimizers: list[PassOptimizer]) -> None:
        """Discards the gradients."""
        for optimizer in optimizers:
            optimizer.drop_gradients()

    def whole(self) -> AbstractContextManager[None]:
        """All weights are already in this process."""
        return nullcontext()

    def in_step(self) -> AbstractContextManager[None]:
        """No waiting for other processes: all weights are in this process."""
        return nullcontext()

    def part(self, parameter: nn.Parameter) -> Tensor:
        """All of it."""
        return parameter.detach()

    def num_stepped(self, parameter: nn.Parameter) -> int:
        """All of them."""
        return parameter.numel()

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """All of it."""
        return full

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Copies the values."""
        parameter.copy_(full)

    def full(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors, or the parts, unchanged."""
        return {name: x.detach() for name, x in (tensors if parts is None else parts).items()}

    def optimizer_state(self, optimizer: PassOptimizer) -> dict[str, Any]:
        """The optimizer's own state."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: PassOptimizer, state: dict[str, Any]) -> None:
        """Loads the optimizer's own state."""
        optimizer.load_state_dict(state)


class Replicated(Alone):
    """DistributedDataParallel around what each pass trains; the optimizers of all processes take the same steps.

    DDP averages gradients over processes, but the losses of the processes are parts of one sum, hence the factor.
    """

    name = "DDP"

    def __init__(self, dist: Dist) -> None:
        self._dist = dist
        self._hosts: dict[str, nn.Module] = {}
        self._to_come: dict[str, int] = {}

    def place(self, roles: ModelRoles) -> None:
        """Wraps each pass."""
        for pass_ in roles.passes:
            heads = [roles.role(name).head for name in pass_.trains]
            modules = [roles.role(pass_.name).model, *(head for head in heads if head is not None)]
            with _training_only(pass_, modules), lost_told(self._dist.num_processes):
                self._hosts[pass_.name] = self._dist.accelerator.prepare_model(Hosted(*modules), device_placement=False)
        roles.host({name: partial(self._run, name) for name in self._hosts})

    def _run(self, role: str, compute: Callable[[], Any]) -> Any:
        """Runs a forward pass through DDP, which decides there whether the next backward pass communicates."""
        with self._alone(role):
            return self._hosts[role](compute)

    def _alone(self, role: str) -> AbstractContextManager[None]:
        """Within this context, gradients are not summed over processes, unless the next backward pass is the last."""
        is_last = self._to_come.get(role, 1) <= 1
        return nullcontext() if is_last else self._dist.accelerator.no_sync(self._hosts[role])

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Sets the count, as DDP communicates only in the last backward pass."""
        self._to_come = dict(backwards)

    def backward(self, loss: Tensor, role: str) -> None:
        """Adds the gradient of ``loss``; the last backward pass sums the added gradients over processes."""
        count = self._dist.num_processes
        with all_together("the update's passes", count), self._alone(role):
            (loss * count).backward()
        self._to_come[role] -= 1


@contextmanager
def _training_only(pass_: Pass, modules: list[nn.Module]) -> Iterator[None]:
    """Within this context, only what the pass trains requires gradients: DDP checks that once, at construction."""
    trained = {id(parameter) for parameter in pass_.parameters()}
    others = [p for module in modules for p in module.parameters() if p.requires_grad and id(p) not in trained]
    with flags_kept(others):
        for parameter in others:
            parameter.requires_grad_(False)
        yield
