"""FSDP2: weights, gradients and optimizer states spread over all processes, by torch's ``fully_shard``.

Every transformer layer is a unit, and so are each head and what else a model has: a forward or backward gathers the
weights of one unit after the other. A model that several roles share is spread once. Weights keep their type: autocast
rounds what is gathered, as it does elsewhere. What it rounded a backward needs, so that with ``train.bf16`` all layers'
rounded weights are there at the end of a forward, unless ``train.gradient_checkpointing`` makes them anew.

Gradients are summed over processes after every backward, so that no process ever holds all of them.
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
from tether.machine.distributed import Dist, lost_told
from tether.models.layers import transformer_layers
from tether.models.roles import POLICY, Host, ModelRoles, Role
from tether.train.engines.base import Hosted, all_together, refuse_few_bits
from tether.train.engines.in_step import forwards_in_step
from tether.train.optim import PassOptimizer, are_finite

logger = logging.getLogger(__name__)


class FullySharded:
    """FSDP2 as the launcher's configuration asks for it.

    Raises:
        ConfigError: it asks for something that the run's own configuration decides.
    """

    name = "FSDP2"
    spreads_weights = True
    flattens = False

    def __init__(self, dist: Dist) -> None:
        plugin = FullyShardedDataParallelPlugin()  # what the launcher said
        _check(plugin, dist.accelerator.parallelism_config)
        if plugin.cpu_ram_efficient_loading and dist.is_main:
            logger.warning(
                "fsdp_cpu_ram_efficient_loading of the launch is switched off: every process reads every model, as "
                "heads and adapters are made of the weights"
            )
        disable_fsdp_ram_efficient_loading()
        self._dist = dist
        self._reshards = plugin.reshard_after_forward
        on_device = dist.device.type != "cpu"
        self._waits_on_cpu = on_device and isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        self._models: list[Sharded] = []
        self._roles: ModelRoles | None = None

    def check(self, config: RunConfig) -> None:
        """Raises ``ConfigError`` for what cannot be spread."""
        refuse_few_bits(config, "FSDP")
        if config.sampling.cache_implementation == "static" and not config.train.ds3_gather_for_generation:
            raise ConfigError(
                "sampling.cache_implementation: got static, wanted dynamic with train.ds3_gather_for_generation false: "
                "a forward that waits for other processes at each layer is not compiled"
            )

    # Taking over

    def place(self, roles: ModelRoles) -> None:
        """Spreads every model, one layer after the other, so that no device ever holds a whole one."""
        self._roles, roles.device = roles, self._dist.device
        hosts: dict[str, Sharded] = {}
        trained: dict[str, Mapping[str, nn.Parameter]] = {}
        for played in _by_model(roles.all):
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
        """Spreads a model as those of roles are."""
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
        """Leaves the optimizers as they are: they are of spread parameters, and so are their moments."""

    # Training

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Every backward is like the last: each sums its gradients over processes."""

    def backward(self, loss: Tensor, role: str) -> None:
        """Adds the gradient of ``loss``, summed over processes."""
        with all_together("a backward", self._dist.num_processes):
            loss.backward()

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clears their gradients: without one a parameter stays as it is, and so do its moments."""
        for parameter in parameters:
            parameter.grad = None

    def are_finite(self, optimizers: list[PassOptimizer]) -> bool:
        """Looks at this process's part of every gradient."""
        return are_finite([_local(p.grad) for o in optimizers for p in o.parameters if p.grad is not None])

    def step(self, optimizer: PassOptimizer) -> float:
        """Clips by the norm over all processes, then steps."""
        limit = float("inf") if optimizer.max_grad_norm is None else optimizer.max_grad_norm
        with all_together("an optimizer step", self._dist.num_processes):
            norm = nn.utils.get_total_norm([p.grad for p in optimizer.parameters if p.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            nn.utils.clip_grads_with_norm_(optimizer.parameters, limit, norm)
            optimizer.step()
        return float(norm)

    def skip(self, optimizer: PassOptimizer) -> None:
        """As the optimizer does it, and frees what was gathered for a backward that did not come."""
        optimizer.skip()
        self._begin_anew()

    def drop_gradients(self, optimizers: list[PassOptimizer]) -> None:
        """Forgets the gradients, and frees what was gathered for a backward that did not come."""
        for optimizer in optimizers:
            optimizer.optimizer.zero_grad(set_to_none=True)
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
        """Gathers each layer's weights for each forward."""
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
        """Those that are kept here."""
        return self.part(parameter).numel()

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The same rows of ``full``."""
        return _local(_spread(full, parameter)).to(self.part(parameter).device)

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Copies the rows that are kept here."""
        self.part(parameter).copy_(self.cut(parameter, full))

    @torch.no_grad()
    def full(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Gathers one after the other, and keeps them in the main process; tensors that are one stay one."""
        whole: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}
        for name, x in tensors.items():
            if id(x) not in seen:
                part = x if parts is None else _in_place_of(x, parts[name])
                with lost_told(self._dist.num_processes):
                    gathered = _gathered(part.detach())
                seen[id(x)] = gathered.cpu() if self._dist.is_main else gathered.new_empty(0)
            if self._dist.is_main:
                whole[name] = seen[id(x)]
        return whole

    def optimizer_state(self, optimizer: PassOptimizer) -> dict[str, Any]:
        """Gathers one moment after the other, and keeps them in the main process."""
        state = optimizer.state_dict()
        moments = state["optimizer"]["state"]
        for number, of_parameter in moments.items():
            moments[number] = self.full(of_parameter)
        return state

    def load_optimizer_state(self, optimizer: PassOptimizer, state: dict[str, Any]) -> None:
        """Takes over this process's rows of it."""
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
    """A model with its heads, spread; runs computations with its weights.

    Args:
        model: with all of its adapters.
        reshards: frees a layer's weights after its forward, to gather them anew in the backward.
        policy: where a process's part waits.
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
                    parameter.data = parameter.data.new_empty(0)  # who else holds it shall not hold its values
        self._units: list[FSDPModule] = [unit for unit in self._hosted.modules() if isinstance(unit, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum
        with torch.no_grad():
            self(lambda: None)  # tells FSDP which unit holds the others

    def __call__(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns, its layers' weights gathered as they are reached."""
        kind = self._device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # A cast that autocast keeps would outlive the weights that it was made of.
        without_cache = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        with all_together("a forward", self._num_processes), without_cache:
            result = self._hosted(compute)
        if not torch.is_grad_enabled():
            self.begin_anew()
        return result

    def replaced(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The spread parameters in the place of those that the model had."""
        spread = dict(self._hosted.named_parameters())
        return {name: spread[self._names[id(parameter)]] for name, parameter in parameters.items()}

    def gather(self) -> None:
        """Gathers all weights, and keeps them in forwards until ``spread``."""
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def gather_rest(self) -> None:
        """Gathers the weights that are in no layer."""
        self._hosted.unshard()

    def spread(self) -> None:
        """Frees what ``gather`` gathered."""
        for unit in self._units:
            unit.set_reshard_after_forward(self._reshards and unit is not self._hosted, recurse=False)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Frees what is gathered; the next forward is as the first."""
        self._hosted.reset_iter_state()


def _check(plugin: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig | None) -> None:
    """Raises ``ConfigError`` for settings of the launcher's that do not fit a run."""
    if parallelism is not None:
        for name in ("dp_replicate_size", "tp_size", "cp_size", "sp_size"):
            if (size := getattr(parallelism, name, 1)) not in (None, 1):
                raise ConfigError(
                    f"parallelism_config_{name}: got {size}, wanted 1 in the configuration file of accelerate launch: "
                    "weights are spread over all processes, and every process trains on whole answers"
                )
    if plugin.activation_checkpointing:
        raise ConfigError(
            "fsdp_activation_checkpointing: got true, wanted false in the configuration file of accelerate launch; set "
            "train.gradient_checkpointing in the run's own"
        )
    if plugin.ignored_modules is not None:
        raise ConfigError(
            "fsdp_ignored_modules: wanted none in the configuration file of accelerate launch: all weights are spread"
        )


def _by_model(roles: Sequence[Role]) -> list[list[Role]]:
    """Roles that share a model, in the order of the first of each."""
    groups: dict[int, list[Role]] = {}
    for role in roles:
        groups.setdefault(id(role.model), []).append(role)
    return list(groups.values())


def _separate_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers of a model, as far as they share no parameters with each other or with the rest."""
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
    """A tensor that every process has, spread as another is."""
    return distribute_tensor(full.detach(), like.device_mesh, like.placements, src_data_rank=None)


def _in_place_of(x: Tensor, part: Tensor) -> Tensor:
    """The tensor of which ``part`` is what is kept here, if it is spread as ``x`` is."""
    if not isinstance(x, DTensor):
        return part
    return DTensor.from_local(part, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def _gathered(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    on_mesh = x.to_local().to(x.device_mesh.device_type)
    return DTensor.from_local(on_mesh, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()).full_tensor()
