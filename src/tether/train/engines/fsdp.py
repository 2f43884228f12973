"""FSDP2: weights, gradients and optimizer states sharded over all processes by torch's ``fully_shard``.

Each transformer layer is a unit, and so are each head and the rest of a model: a forward or backward pass gathers the
weights of one unit at a time. A model that several roles share is sharded once. Weights keep their dtype: autocast
rounds the gathered weights, as it does elsewhere. The backward pass needs the rounded weights, so with ``train.bf16``
those of all layers are in memory at the end of a forward pass, unless ``train.gradient_checkpointing`` recomputes them.

Gradients are summed over processes after every backward pass, so that no process ever holds all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, disable_fsdp_ram_efficient_loading
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.machine.distributed import Dist
from tether.models.forward import without_cached_casts
from tether.models.layers import transformer_layers
from tether.models.roles import POLICY, Host, ModelRoles
from tether.train.engines.base import Hosted, all_together, by_model, forget, kept_by_main, refuse_few_bits
from tether.train.engines.in_step import forwards_in_step
from tether.train.optim import PassOptimizer, are_finite

logger = logging.getLogger(__name__)


class FullySharded:
    """FSDP2 as set up in the launcher's configuration.

    Raises:
        ConfigError: it sets something that the run's own configuration decides.
    """

    name = "FSDP2"
    spreads_weights = True
    flattens = False

    def __init__(self, dist: Dist) -> None:
        plugin = FullyShardedDataParallelPlugin()  # the launcher's settings
        _check(plugin, dist.accelerator.parallelism_config)
        if plugin.cpu_ram_efficient_loading and dist.is_main:
            logger.warning(
                "fsdp_cpu_ram_efficient_loading of the launch is switched off: every process loads every model, as "
                "heads and adapters are built from the weights"
            )
        disable_fsdp_ram_efficient_loading()
        self._dist = dist
        self._reshards = plugin.reshard_after_forward
        on_device = dist.device.type != "cpu"
        self._waits_on_cpu = on_device and isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        self._models: list[Sharded] = []
        self._roles: ModelRoles | None = None

    def check(self, config: RunConfig) -> None:
        """Raises ``ConfigError`` for settings that FSDP2 does not support."""
        refuse_few_bits(config, "FSDP")
        if config.sampling.cache_implementation == "static" and not config.train.ds3_gather_for_generation:
            raise ConfigError(
                "sampling.cache_implementation: got static, wanted dynamic with train.ds3_gather_for_generation false: "
                "a forward pass that waits for other processes at each layer is not compiled"
            )

    # Taking over

    def place(self, roles: ModelRoles) -> None:
        """Shards every model, one layer at a time, so that no device ever holds a whole model."""
        self._roles, roles.device = roles, self._dist.device
        hosts: dict[str, Sharded] = {}
        trained: dict[str, Mapping[str, nn.Parameter]] = {}
        for played in by_model(roles.all).values():
            is_frozen = not any(role.trained for role in played)
            model = self._sharded(
                roles.policy if played[0].adapter is not None else played[0].model,
                [role.head for role in played if role.head is not None],
                waits=roles.offloads_idle and is_frozen,
            )
            hosts |= {role.name: model for role in played}
            trained |= {role.name: model.replaced(role.trained) for role in played if role.trained}
        roles.host(hosts, trained)

    def spread(self, modules: Sequence[nn.Module], *, waits: bool) -> Host:
        """Shards a model in the same way as the models of roles."""
        model, *heads = [module.requires_grad_(False) for module in modules]
        return self._sharded(model, heads, waits=waits)

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self._dist.device.type, (self._dist.num_processes,))

    def _sharded(self, model: nn.Module, heads: Sequence[nn.Module], *, waits: bool) -> Sharded:
        waits = self._waits_on_cpu or (waits and self._dist.device.type != "cpu")
        sharded = Sharded(
            model,
            heads,
            self._mesh,
            reshards=self._reshards,
            policy=CPUOffloadPolicy() if waits else OffloadPolicy(),
            num_processes=self._dist.num_processes,
        )
        self._models.append(sharded)
        return sharded

    def prepare(self, optimizers: list[PassOptimizer]) -> None:
        """Does not change the optimizers: their parameters are sharded, and so are their moments."""

    # Training

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Not needed: every backward pass sums its gradients over processes."""

    def backward(self, loss: Tensor, role: str) -> None:
        """Adds the gradient of ``loss``, summed over processes."""
        with all_together("a backward", self._dist.num_processes):
            loss.backward()

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clears their gradients."""
        forget(parameters)

    def are_finite(self, optimizer: PassOptimizer) -> bool:
        """Checks this process's part of every gradient."""
        return are_finite([_local(gradient) for gradient in optimizer.gradients])

    def step(self, optimizer: PassOptimizer) -> float:
        """Clips by the norm over all processes, then steps."""
        limit = float("inf") if optimizer.max_grad_norm is None else optimizer.max_grad_norm
        with all_together("an optimizer step", self._dist.num_processes):
            norm = nn.utils.get_total_norm(optimizer.gradients)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            nn.utils.clip_grads_with_norm_(optimizer.parameters, limit, norm)
            optimizer.step()
        return float(norm)

    def skip(self, optimizer: PassOptimizer) -> None:
        """Like the optimizer's; also frees what was gathered for a backward pass that did not take place."""
        optimizer.skip()
        self._begin_anew()

    def drop_gradients(self, optimizers: list[PassOptimizer]) -> None:
        """Discards the gradients, and frees what was gathered for a backward pass that did not take place."""
        for optimizer in optimizers:
            optimizer.drop_gradients()
        self._begin_anew()

    def _begin_anew(self) -> None:
        for model in self._models:
            model.begin_anew()

    # Decoding

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gathers all weights of the policy once."""
        policy = self._policy
        with all_together("the gathering of the policy's weights", self._dist.num_processes):
            policy.gather()
        try:
            yield
        finally:
            policy.spread()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Gathers each layer's weights for each forward pass."""
        policy = self._policy
        with forwards_in_step(self._roles, self._dist, before=policy.gather_rest, after=policy.begin_anew):
            yield

    @property
    def _policy(self) -> Sharded:
        return self._roles.through(POLICY)

    # Weights and states as one process has them

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Some of its rows."""
        return _local(parameter.detach())

    def num_stepped(self, parameter: nn.Parameter) -> int:
        """The elements in this process's part."""
        return self.part(parameter).numel()

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The same rows of ``full``."""
        return _local(_spread(full, parameter)).to(self.part(parameter).device)

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Copies the rows of this process."""
        self.part(parameter).copy_(self.cut(parameter, full))

    @torch.no_grad()
    def full(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Gathers one tensor at a time, and keeps them in the main process."""

        def gather(name: str, x: Tensor) -> Tensor:
            return _gathered((x if parts is None else _in_place_of(x, parts[name])).detach())

        return kept_by_main(tensors, gather, self._dist)

    def optimizer_state(self, optimizer: PassOptimizer) -> dict[str, Any]:
        """Gathers one moment at a time, and keeps them in the main process."""
        state = optimizer.state_dict()
        moments = state["optimizer"]["state"]
        for number, of_parameter in moments.items():
            moments[number] = self.full(of_parameter)
        return state

    def load_optimizer_state(self, optimizer: PassOptimizer, state: dict[str, Any]) -> None:
        """Loads this process's rows of the state."""
        parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        moments = {
            number: {
                name: _spread(x, parameters[number]) if x.shape == parameters[number].shape else x
                for name, x in of_parameter.items()
            }
            for number, of_parameter in state["optimizer"]["state"].items()
        }
        optimizer.load_state_dict({**state, "optimizer": {**state["optimizer"], "state": moments}})


class Sharded:
    """A sharded model with its heads; runs computations with its weights.

    Args:
        model: the model with all of its adapters.
        reshards: whether to free a layer's weights after its forward and gather them again in the backward.
        policy: where a process's part is kept when not in use.
    """

    def __init__(
        self,
        model: nn.Module,
        heads: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        reshards: bool,
        policy: OffloadPolicy,
        num_processes: int,
    ) -> None:
        self._hosted, self._reshards, self._num_processes = Hosted(model, *heads), reshards, num_processes
        self._device = torch.device(mesh.device_type)
        self._names = {id(parameter): name for name, parameter in self._hosted.named_parameters()}
        options = {"mesh": mesh, "offload_policy": policy}
        for unit in (*reversed(_separate_layers(model)), *heads, self._hosted):
            replaced = list(unit.parameters())
            fully_shard(unit, reshard_after_forward=reshards and unit is not self._hosted, **options)
            for parameter in replaced:
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.new_empty(0)  # other references must not keep its values alive
        self._units: list[FSDPModule] = [unit for unit in self._hosted.modules() if isinstance(unit, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo supports only plain sums
        with torch.no_grad():
            self(lambda: None)  # lets FSDP find the root unit

    def __call__(self, compute: Callable[[], Any]) -> Any:
        """Returns ``compute()``; the weights of each layer are gathered when it is reached."""
        # A cast in autocast's cache would outlive the gathered weights it was made from.
        with all_together("a forward pass", self._num_processes), without_cached_casts(self._device):
            result = self._hosted(compute)
        if not torch.is_grad_enabled():
            self.begin_anew()
        return result

    def replaced(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The sharded parameters that replace the model's original ones."""
        spread = dict(self._hosted.named_parameters())
        return {name: spread[self._names[id(parameter)]] for name, parameter in parameters.items()}

    def gather(self) -> None:
        """Gathers all weights, and keeps them through forward passes until ``spread``."""
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def gather_rest(self) -> None:
        """Gathers the weights that do not belong to a layer."""
        self._hosted.unshard()

    def spread(self) -> None:
        """Frees what ``gather`` gathered."""
        for unit in self._units:
            unit.set_reshard_after_forward(self._reshards and unit is not self._hosted, recurse=False)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Frees gathered weights; the next forward pass is like the first."""
        self._hosted.reset_iter_state()


def _check(plugin: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig | None) -> None:
    """Raises ``ConfigError`` for launcher settings that do not fit a run."""
    if parallelism is not None:
        for name in ("dp_replicate_size", "tp_size", "cp_size", "sp_size"):
            if (size := getattr(parallelism, name, 1)) not in (None, 1):
                raise ConfigError(
                    f"parallelism_config_{name}: got {size}, wanted 1 in the configuration file of accelerate launch: "
                    "weights are sharded over all processes, and every process trains on whole answers"
                )
    if plugin.activation_checkpointing:
        raise ConfigError(
            "fsdp_activation_checkpointing: got true, wanted false in the configuration file of accelerate launch; set "
            "train.gradient_checkpointing in the run's own file"
        )
    if plugin.ignored_modules is not None:
        raise ConfigError(
            "fsdp_ignored_modules: wanted none in the configuration file of accelerate launch: all weights are sharded"
        )


def _separate_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers of a model; none if parameters are shared between layers or with the rest."""
    layers = transformer_layers(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    rest = [module for module in model.modules() if id(module) not in inside]
    owners: dict[int, set[int]] = {}
    for number, modules in enumerate([rest, *(list(layer.modules()) for layer in layers)]):
        for module in modules:
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(number)
    return layers if all(len(numbers) == 1 for numbers in owners.values()) else []


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _spread(full: Tensor, like: Tensor) -> DTensor:
    """Shards a tensor that every process has in the same way as ``like``."""
    return distribute_tensor(full.detach(), like.device_mesh, like.placements, src_data_rank=None)


def _in_place_of(x: Tensor, part: Tensor) -> Tensor:
    """The tensor whose part in this process is ``part``, if it is sharded like ``x``."""
    if not isinstance(x, DTensor):
        return part
    return DTensor.from_local(part, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def _gathered(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    on_mesh = x.to_local().to(x.device_mesh.device_type)
    return DTensor.from_local(on_mesh, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()).full_tensor()
