"""DeepSpeed's ZeRO: optimizer states (1), also gradients (2), or also weights (3) sharded over processes.

Every trained model has a DeepSpeed engine: policy and critic have one each if they are separate models, or a common one
if they share a base or an optimizer. To DeepSpeed, several optimizers then look like one (``Joint``). At stage 3, a
frozen model has an engine without an optimizer.

DeepSpeed averages gradients over processes, but the losses of the processes are parts of one sum, hence the factor. Its
clipping is not used: it would use one norm of everything that an engine trains instead of one per role.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tether.config.schema import RunConfig
from tether.machine.deepspeed import load_whole, partition, plugin_of_launch
from tether.machine.deepspeed_config import check_deepspeed, filled, waits_on, width_of
from tether.machine.distributed import Dist, lost_told
from tether.models.roles import POLICY, Host, ModelRoles, Role
from tether.train.engines.base import Hosted, all_together, by_model, kept_by_main, refuse_few_bits
from tether.train.engines.in_step import forwards_in_step
from tether.train.optim import PassOptimizer, are_finite

CLIP_EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as in torch."""
NOT_OURS = {
    "optimizer": "train.optim, train.learning_rate and related keys set it",
    "scheduler": "train.lr_scheduler_type, train.warmup_ratio and train.lr_scheduler_kwargs set it",
    "hybrid_engine": "answers are decoded with weights that are gathered once per rollout",
}
"""Sections of a DeepSpeed configuration that are decided by other keys of a run."""
BATCHES = {
    "train_batch_size": "train.rollout_batch_size and ppo.num_mini_batches set it",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size sets it",
    "gradient_accumulation_steps": "train.micro_batch_size sets it",
}
"""Sizes that follow from a run's own."""


class Zero:
    """ZeRO at the stage given in the launcher's configuration."""

    flattens = True

    def __init__(self, dist: Dist) -> None:
        load_whole()
        self._dist = dist
        self._config = plugin_of_launch().deepspeed_config  # a stage before may have filled in that of its Accelerator
        self.stage = int(self._config["zero_optimization"]["stage"])
        self.name = f"ZeRO-{self.stage}"
        self.spreads_weights = self.stage == 3
        self._roles: ModelRoles | None = None
        self._units: list[Unit] = []

    def check(self, config: RunConfig) -> None:
        """Raises ``ConfigError`` for what cannot be sharded, and if launcher and run contradict each other."""
        check(self._config, config)

    # Taking over

    def place(self, roles: ModelRoles) -> None:
        """At stage 3, shards every model, one parameter at a time, so that no device ever holds a whole model."""
        self._roles = roles
        if not self.spreads_weights:
            return
        roles.device = self._dist.device
        for model, played in by_model(roles.all).items():
            hosted = Hosted(model, *_heads(played))
            if any(role.trained for role in played):
                self._partition(hosted)
            else:
                host = self._frozen(hosted, waits=roles.offloads_idle)
                roles.host({role.name: host for role in played})

    def spread(self, modules: Sequence[nn.Module], *, waits: bool) -> Host:
        """Shards a model in the same way as the models of roles."""
        return self._frozen(Hosted(*modules).requires_grad_(False), waits=waits)

    def _frozen(self, module: nn.Module, *, waits: bool) -> Host:
        config = self._filled(module)
        if waits and self._dist.device.type != "cpu" and waits_on(config) is None:
            config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        self._partition(module, config)
        return self._together(self._engine(module, None, config))

    def _partition(self, module: nn.Module, config: dict[str, Any] | None = None) -> None:
        partition(module, config or self._filled(module), self._dist.device)

    def prepare(self, optimizers: list[PassOptimizer]) -> None:
        """Creates an engine for each group of models trained by one optimizer, or by several that share a model."""
        if self._units:  # already created by a caller that passes its optimizers to the trainer
            return
        playing = by_model(self._roles.all)
        for together in _sharing(optimizers, self._roles.all):
            ids = {id(p) for optimizer in together for p in optimizer.parameters}
            trained = [role for role in self._roles.all if not ids.isdisjoint(map(id, role.trained.values()))]
            models = list(dict.fromkeys(role.model for role in trained))
            played = [role for model in models for role in playing[model]]
            joint = Joint(together, trained)
            engine = self._engine(Hosted(*models, *_heads(played)), joint)
            self._units.append(Unit(engine, joint, {role.name for role in trained}, self.stage, self._dist))
            host = self._together(engine) if self.spreads_weights else engine
            self._roles.host({role.name: host for role in played})

    def _engine(self, module: nn.Module, optimizer: Joint | None, config: dict[str, Any] | None = None) -> Any:
        import deepspeed

        config = config or self._filled(module)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]

    def _together(self, engine: Any) -> Host:
        """A function that runs a forward pass in which all processes gather weights."""

        def host(compute: Callable[[], Any]) -> Any:
            with all_together("a forward pass", self._dist.num_processes):
                return engine(compute)

        return host

    def _filled(self, module: nn.Module) -> dict[str, Any]:
        """The launcher's configuration for one model, with its ``auto`` values filled in."""
        return filled(self._config, self._dist.num_processes, width_of(module))

    # Training

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Sets the number of backward passes of each pass before the optimizers step."""
        for unit in self._units:
            unit.expect(backwards)

    def backward(self, loss: Tensor, role: str) -> None:
        """Adds the gradient of ``loss``; after an engine's last backward pass, gradients are sums over processes."""
        unit = next(unit for unit in self._units if role in unit.passes)
        with all_together("a backward", self._dist.num_processes):
            unit.backward(loss * self._dist.num_processes, role)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Excludes the parameters from the next step, whatever their gradients are."""
        ids = set(map(id, parameters))
        for unit in self._units:
            unit.forget(ids)

    def are_finite(self, optimizer: PassOptimizer) -> bool:
        """Checks this process's part of every gradient."""
        return are_finite(list(self._of(optimizer).gradients(optimizer)))

    def step(self, optimizer: PassOptimizer) -> float:
        """Clips by the norm over all processes, then steps."""
        return self._of(optimizer).step(optimizer)

    def skip(self, optimizer: PassOptimizer) -> None:
        """Discards the gradients and advances the schedule."""
        self._of(optimizer).drop_gradients()
        optimizer.skip()

    def drop_gradients(self, optimizers: list[PassOptimizer]) -> None:
        """Discards all gradients, reduced or not."""
        for unit in self._units:
            unit.drop_gradients()

    def _of(self, optimizer: PassOptimizer) -> Unit:
        return next(unit for unit in self._units if optimizer in unit.joint.optimizers)

    # Decoding

    def whole(self) -> AbstractContextManager[None]:
        """At stage 3, gathers all weights of the policy and disables DeepSpeed's hooks in forward passes."""
        return self._gathered() if self.spreads_weights else nullcontext()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        import deepspeed

        spread = [p for p in self._roles.role(POLICY).model.parameters() if not _is_gathered(p)]
        with ExitStack() as stack:
            with all_together("the gathering of the policy's weights", self._dist.num_processes):
                stack.enter_context(_quiet(self._policy_engine))
                stack.enter_context(deepspeed.zero.GatheredParameters(spread))
            yield

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """At stage 3, gathers each module's weights for each forward pass."""
        if not self.spreads_weights:
            yield
            return
        keeper = _keeper(self._policy_engine)
        with forwards_in_step(self._roles, self._dist, before=keeper.get_param_coordinator().reset_step):
            yield

    @property
    def _policy_engine(self) -> Any:
        return next(unit.engine for unit in self._units if POLICY in unit.passes)

    # Weights and states as one process has them

    def part(self, parameter: nn.Parameter) -> Tensor:
        """The piece that this process keeps. If DeepSpeed left the parameter gathered, that copy is freed, as it might
        become stale."""
        if not _is_spread(parameter):
            return parameter.detach()
        if _is_gathered(parameter):
            parameter.partition()
        return parameter.ds_tensor.data

    def num_stepped(self, parameter: nn.Parameter) -> int:
        """An equal share at stage 3; otherwise none, as the moments exist from the start."""
        return -(-_shape(parameter).numel() // self._dist.num_processes) if self.spreads_weights else 0

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The section for the piece that this process keeps, padded with zeros."""
        return _piece(parameter, full, self._dist) if _is_spread(parameter) else full

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Fills both the weights that forward passes read and those that the optimizer steps."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        own = self.cut(parameter, full)
        if _is_spread(parameter):  # by pieces: DeepSpeed cannot split a tensor that does not divide evenly
            safe_set_local_fp32_param(parameter, own)
        else:
            safe_set_full_fp32_param(parameter, full)
        self.part(parameter).copy_(own)

    def full(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Gathers one tensor at a time, and keeps them in the main process."""

        def gather(name: str, x: Tensor) -> Tensor:
            part = self.part(x) if parts is None else parts[name]
            if not _is_spread(x):
                return part
            pieces = self._dist.accelerator.gather(part.to(self._dist.device))
            return pieces[: x.ds_numel].view(x.ds_shape)

        return kept_by_main(tensors, gather, self._dist)

    def optimizer_state(self, optimizer: PassOptimizer) -> dict[str, Any]:
        """Gathers the moments of one parameter at a time, and keeps them in the main process."""
        with lost_told(self._dist.num_processes):
            state = self._of(optimizer).state(optimizer)
        return {"optimizer": state, "scheduler": optimizer.scheduler.state_dict()}

    def load_optimizer_state(self, optimizer: PassOptimizer, state: dict[str, Any]) -> None:
        """Loads this process's pieces of the state."""
        self._of(optimizer).load_state(optimizer, state["optimizer"])
        optimizer.scheduler.load_state_dict(state["scheduler"])


def check(deepspeed: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ``ConfigError`` if a DeepSpeed configuration contradicts that of the run, or configures something that
    Tether does itself."""
    check_deepspeed(deepspeed, config, sections=NOT_OURS, batches=BATCHES)
    refuse_few_bits(config, "ZeRO")


@dataclass(eq=False)
class Share:
    """Parameters that one optimizer steps for one role; a parameter group for DeepSpeed."""

    number: int
    """Position among DeepSpeed's groups."""
    optimizer: PassOptimizer
    parameters: Sequence[nn.Parameter]
    group: dict[str, Any]
    """Settings of the group; DeepSpeed replaces its parameters by the flat pieces that this process steps."""
    source: dict[str, Any]
    """The optimizer's own group, whose settings are changed by schedules."""
    scale: float | None = None
    """Factor of the gradients in the current step; None if the share takes no part in it."""
    is_forgotten: bool = False
    """Whether the share is excluded from the next step."""

    def step(self, group: dict[str, Any]) -> None:
        """Steps ``group`` by the optimizer's rule, in place of the optimizer's own groups."""
        own = self.optimizer.optimizer
        kept, own.param_groups = own.param_groups, [group]
        try:
            own.step()
        finally:
            own.param_groups = kept


class Joint(Optimizer):
    """Several optimizers that look like one to DeepSpeed, each stepped by its own rule and only in its turn.

    They keep their own groups, to which their schedules apply, and share one state.
    """

    def __init__(self, optimizers: Sequence[PassOptimizer], roles: Sequence[Role]) -> None:
        self.optimizers = list(optimizers)
        self.shares = _shares(optimizers, roles)
        super().__init__([share.group for share in self.shares], {})
        self._by_group = {id(share.group): share for share in self.shares}
        for optimizer in optimizers:
            optimizer.optimizer.state = self.state

    def step(self, closure: None = None) -> None:
        """Steps the groups that DeepSpeed left in ``param_groups`` and set gradients for."""
        for group in self.param_groups:
            share = self._by_group[id(group)]
            if share.scale is None or not group["params"]:
                continue
            group |= {name: value for name, value in share.source.items() if name != "params"}
            if share.scale < 1:
                for flat in group["params"]:
                    flat.grad.mul_(share.scale)
            share.step(group)

    def of(self, optimizer: PassOptimizer) -> list[Share]:
        """The shares that an optimizer steps."""
        return [share for share in self.shares if share.optimizer is optimizer]


def _shares(optimizers: Sequence[PassOptimizer], roles: Sequence[Role]) -> list[Share]:
    """The groups of the optimizers, each split by role, because a step may be for one role only."""
    shares, ids = [], [{id(p) for p in role.trained.values()} for role in roles]
    for optimizer in optimizers:
        for source in optimizer.optimizer.param_groups:
            parts = [[p for p in source["params"] if id(p) in own] for own in ids]
            for parameters in filter(None, parts):
                group = {**source, "params": list(parameters)}
                shares.append(Share(len(shares), optimizer, parameters, group, source))
    return shares


class Unit:
    """Models that one DeepSpeed engine trains."""

    def __init__(self, engine: Any, joint: Joint, passes: set[str], stage: int, dist: Dist) -> None:
        self.engine, self.joint, self.passes = engine, joint, passes
        self._stage, self._dist = stage, dist
        self._to_come = 0
        self._ran: set[str] = set()
        if stage < 3:  # here DeepSpeed expects the states of all shares after the first step of any
            self._make_states()

    def expect(self, backwards: Mapping[str, int]) -> None:
        """Sets the number of backward passes of each pass before the optimizers step."""
        self._to_come = sum(count for name, count in backwards.items() if name in self.passes)

    def backward(self, loss: Tensor, name: str) -> None:
        """Adds the gradient of ``loss``, averaged over processes."""
        self._to_come -= 1
        self.engine.set_gradient_accumulation_boundary(self._to_come <= 0)
        self.engine.backward(loss, scale_wrt_gas=False)
        self._ran.add(name)

    def forget(self, ids: Collection[int]) -> None:
        """Excludes parameters with these ids from the next step, if there are any gradients."""
        for share in self.joint.shares if self._ran else ():
            share.is_forgotten |= id(share.parameters[0]) in ids

    def gradients(self, optimizer: PassOptimizer) -> Iterator[Tensor]:
        """This process's parts of the gradients for an optimizer's next step."""
        for share in self.joint.of(optimizer) if self._has_gradients(optimizer) else ():
            if not share.is_forgotten:
                yield from self._gradients_of(share)

    def _gradients_of(self, share: Share) -> Sequence[Tensor]:
        from deepspeed.utils import safe_get_local_grad

        zero = self.engine.optimizer
        if self._stage == 3:
            return [safe_get_local_grad(p) for p in share.parameters]
        if zero.cpu_offload:
            return [zero.single_partition_of_fp32_groups[share.number].grad]
        return zero.averaged_gradients[share.number]

    def _has_gradients(self, optimizer: PassOptimizer) -> bool:
        return optimizer.name in self._ran if len(self.joint.optimizers) > 1 else bool(self._ran)

    def step(self, optimizer: PassOptimizer) -> float:
        """Clips and steps; returns the norm before clipping."""
        if not self._has_gradients(optimizer):
            optimizer.skip()
            return 0.0
        norms = [torch.linalg.vector_norm(grad.float()).to(self._dist.device) for grad in self.gradients(optimizer)]
        norm = float(self._dist.sum(torch.stack(norms).square().sum()).sqrt())
        limit = optimizer.max_grad_norm
        for share in self.joint.of(optimizer):
            if not share.is_forgotten:
                share.scale = 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))
        with all_together("an optimizer step", self._dist.num_processes):
            self.engine.step()
        optimizer.move_on()
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        """Discards gradients, whether reduced or not.

        DeepSpeed adds gradients to what an earlier backward pass of the same step left in its buffers. For a parameter
        that the first backward pass of the next step does not reach, that would be the gradient discarded here, so the
        buffers are zeroed.
        """
        from deepspeed.utils import safe_set_local_grad

        zero = self.engine.optimizer
        zero.zero_grad(set_to_none=True)
        for share in self.joint.shares:
            share.scale, share.is_forgotten = None, False
            if self._stage < 3:
                zero.averaged_gradients[share.number] = zero.all_grad_tensors[share.number] = None
            elif zero.offload_optimizer:
                for p in share.parameters:
                    safe_set_local_grad(p, torch.zeros_like(p.ds_tensor))
        if self._stage == 3:
            zero.grad_partitions_flat_buffer.zero_()
        elif zero.cpu_offload:
            zero.micro_step_id = -1  # so that the next backward pass is the first of a step
            zero.reset_cpu_buffers()
            flats = [flat.grad for flat in zero.single_partition_of_fp32_groups]
            for buffer in (*zero.accumulated_grads_in_cpu.values(), *flats):
                buffer.zero_()
        self._ran.clear()

    # The optimizers' states as one process has them

    def _flats(self, share: Share) -> list[Tensor]:
        """The flat pieces that this process steps for a share."""
        zero = self.engine.optimizer
        if self._stage < 3:
            return [zero.single_partition_of_fp32_groups[share.number]]
        groups = zero.sub_group_to_group_id
        return [flat for i, flat in enumerate(zero.fp32_partitioned_groups_flat) if groups[i] == share.number]

    def state(self, optimizer: PassOptimizer) -> dict[str, Any]:
        """The optimizer's state as if it had stepped whole parameters; moments only in the main process."""
        from deepspeed.utils import safe_get_full_optimizer_state

        sources = optimizer.optimizer.param_groups
        position = {id(p): i for i, p in enumerate(p for source in sources for p in source["params"])}
        groups = [{**source, "params": [position[id(p)] for p in source["params"]]} for source in sources]
        states: dict[int, dict[str, Any]] = {}
        for share in self.joint.of(optimizer):
            flat = self._flats(share)[0]
            known = self.joint.state.get(flat, {})
            for p in share.parameters if known else ():
                state = {}
                for name, value in known.items():
                    if _is_moment(value, flat):
                        value = safe_get_full_optimizer_state(p, name)
                    if self._dist.is_main:
                        state[name] = value.cpu().clone() if isinstance(value, Tensor) else value
                states[position[id(p)]] = state
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    def load_state(self, optimizer: PassOptimizer, saved: Mapping[str, Any]) -> None:
        """Restores the result of ``state``."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        sources, parameters = optimizer.optimizer.param_groups, []
        for source, group in zip(sources, saved["param_groups"], strict=True):
            source |= {name: value for name, value in group.items() if name != "params"}
            parameters += source["params"]
        if saved["state"] and not self.joint.state:
            self._make_states()
        states = {id(p): saved["state"].get(i) for i, p in enumerate(parameters)}
        for share in self.joint.of(optimizer) if self.joint.state else ():
            moments, scalars = self._moments(share), {}
            for p in share.parameters:
                state = states[id(p)] or {}
                for name in moments:
                    value = state.get(name)
                    value = torch.zeros(_shape(p)) if value is None else value
                    if _is_spread(p):  # by pieces, like the weights
                        piece = _piece(p, value.to(self._dist.device), self._dist)
                        safe_set_local_optimizer_state(p, piece, name)
                    else:
                        safe_set_full_optimizer_state(p, value.to(self._dist.device), name)
                scalars |= {name: value for name, value in state.items() if name not in moments}
            self._set_scalars(self._flats(share), scalars)

    def _set_scalars(self, flats: Sequence[Tensor], values: Mapping[str, Any]) -> None:
        """Sets the states that an optimizer keeps once for a piece, such as the number of its steps; 0 without a
        value."""
        for flat in flats:
            state = self.joint.state[flat]
            for name, old in state.items():
                if not _is_moment(old, flat):
                    state[name] = _like(values.get(name, 0), old)

    def _moments(self, share: Share) -> list[str]:
        """Names of the states that the optimizer keeps for each element that it steps."""
        flat = self._flats(share)[0]
        return [name for name, value in self.joint.state.get(flat, {}).items() if _is_moment(value, flat)]

    def _make_states(self) -> None:
        """Makes optimizers create their states by a step with gradients of 0 at learning rate 0; informs DeepSpeed."""
        zero = self.engine.optimizer
        for share in self.joint.shares:
            flats = self._flats(share)
            given = [flat.grad for flat in flats]
            for flat in flats:
                flat.grad = torch.zeros_like(flat)
            share.step({**share.source, "lr": 0.0, "weight_decay": 0.0, "params": flats})
            for flat, grad in zip(flats, given, strict=True):
                flat.grad = grad
            self._set_scalars(flats, {})
            if self._stage < 3 and not zero.cpu_offload:
                zero.averaged_gradients[share.number] = [torch.zeros_like(flat) for flat in flats]
        if self._stage == 3:  # by sub-group there, of which a share may have several
            for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
                zero.averaged_gradients[number] = [torch.zeros_like(flat)]
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()  # no share takes part in this step
        self.drop_gradients()


def _is_moment(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0


def _like(value: Any, example: Any) -> Any:
    """``value`` with the type of ``example``, and on its device."""
    if isinstance(example, Tensor):
        return torch.as_tensor(value, dtype=example.dtype, device=example.device).clone()
    return type(example)(value)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return parameter.ds_shape if _is_spread(parameter) else parameter.shape


def _piece(parameter: nn.Parameter, full: Tensor, dist: Dist) -> Tensor:
    """The piece of a whole parameter, or of one of its moments, that this process keeps at stage 3, zero-padded."""
    size = parameter.ds_tensor.numel()
    filled = full.new_zeros(size * dist.num_processes)
    filled[: full.numel()] = full.flatten()
    return filled[dist.rank * size :][:size]


def _is_spread(x: Tensor) -> bool:
    """Whether ZeRO-3 has sharded a parameter."""
    return hasattr(x, "ds_id")


def _is_gathered(x: nn.Parameter) -> bool:
    """Whether a sharded parameter is currently gathered, as DeepSpeed leaves small ones."""
    return x.ds_status.name == "AVAILABLE"


def _keeper(engine: Any) -> Any:
    """DeepSpeed's object that manages a model's weights at stage 3."""
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


@contextmanager
def _quiet(engine: Any) -> Iterator[None]:
    """Within this context, DeepSpeed's hooks are removed from a model: a forward pass neither gathers nor frees."""
    keeper = _keeper(engine)
    keeper.destroy()
    keeper.forward_hooks, keeper.backward_hooks = [], []
    for parameter in engine.module.parameters():
        parameter.ds_active_sub_modules.clear()
    try:
        yield
    finally:
        keeper.setup_zero_stage3_hooks()


def _heads(roles: Iterable[Role]) -> list[nn.Module]:
    return [role.head for role in roles if role.head is not None]


def _sharing(optimizers: Sequence[PassOptimizer], roles: Sequence[Role]) -> list[list[PassOptimizer]]:
    """Groups of optimizers that train parts of the same models."""
    model_of = {id(p): role.model for role in roles for p in role.trained.values()}
    found: list[tuple[set[nn.Module], list[PassOptimizer]]] = []
    for optimizer in optimizers:
        models, together = {model_of[id(p)] for p in optimizer.parameters}, [optimizer]
        for other in [each for each in found if each[0] & models]:
            found.remove(other)
            models, together = models | other[0], other[1] + together
        found.append((models, together))
    return [together for _, together in found]
