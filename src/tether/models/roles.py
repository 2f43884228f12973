"""The roles of a run and the weights they use: policy, reference, value and reward adapters.

    sharing   policy                 reference                        value                       reward/NAME
    full      own weights            frozen copy                      own weights, or
                                                                      head on the policy
    LoRA      adapter ``default``    the start policy: adapters off,  adapter ``value`` + head,   adapter ``reward…``
              on the base            or frozen adapter ``reference``  or as in full               + head

This is the only file that switches adapters. By default the policy is active, everything is in eval mode (dropout is
never on) and exactly the trained parameters require gradients. Using a role changes the active adapter, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config.keys import counted
from tether.errors import CheckpointError
from tether.models.adapters import DEFAULT, adapter_parameters, add_reward, flags_kept, without_casts
from tether.models.bitsandbytes import num_weights, placed
from tether.models.forward import LogprobOutput, few_tokens, last_token_scores, response_outputs, response_values
from tether.models.layers import num_rows
from tether.models.merging import MergedAdapter
from tether.models.offload import Offloaded, has_own_memory
from tether.models.products import with_quick_products
from tether.models.recompute import recomputed_layers
from tether.types import MicroBatch

POLICY, REFERENCE, VALUE = "policy", "reference", "value"
OFF = ""
"""Used in place of an adapter name: the base with all adapters off."""
Host = Callable[[Callable[[], Any]], Any]
"""Runs a computation with the weights of a role and returns its result."""


def directly(compute: Callable[[], Any]) -> Any:
    """Returns the result of ``compute``, for weights that are not sharded."""
    return compute()


def check_names(own: Collection[str], saved: Collection[str], what: str) -> None:
    """Raises ``CheckpointError`` if a checkpoint holds tensors of other names than this run.

    Args:
        what: one of them, in words.
    """
    if odd := sorted(set(own) ^ set(saved)):
        where = "the checkpoint" if odd[0] in own else "this run's configuration"
        raise CheckpointError(f"no match for {counted(len(odd), what)}; the first is missing in {where}: {odd[0]}")


@dataclass(frozen=True)
class Role:
    """One role: a model, its active adapter and head, and its trained parameters."""

    name: str
    """``policy``, ``reference``, ``value`` or ``reward/NAME``."""
    model: PreTrainedModel
    """The model that runs: a causal language model, or the critic's own sequence classifier."""
    source: str
    """Where its weights came from."""
    sharing: str
    """What it shares with other roles."""
    adapter: str | None = None
    """PEFT's name for its adapter, ``OFF``, or None if its model has no adapters."""
    head: nn.Module | None = None
    """Maps its hidden states to scalars: a ``ScalarHead``, or a module of the caller's own."""
    trained: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Its trained parameters, by name."""
    copies_reward: bool = False
    """Whether it is a critic that starts as a copy of the first reward source, whose weight and normalization are not
    known yet."""
    copies_policy: bool = False
    """Whether it is a frozen copy of the start policy, with weights that autocast would round stored rounded."""


@dataclass(frozen=True)
class RoleRow:
    """One line of the table of roles."""

    role: str
    """``policy``, ``reference``, ``value`` or ``reward/NAME``."""
    source: str
    """Path, hub id, or how it was made."""
    parameters: int
    """Number of parameters that its forward uses, shared ones included."""
    trainable: int
    """Number of its parameters that are trained."""
    dtype: str
    """Data types of its parameters, the most frequent first."""
    sharing: str
    """What it shares with other roles."""
    bytes: int
    """Memory that its parameters take in addition to those of the roles above it."""


class Pass:
    """One forward and backward pass of the update over a micro-batch, and the roles it trains.

    ``with pass_(batch, temperature=1.0) as out:`` runs the forward pass. The backward pass belongs inside the ``with``,
    because recomputing activations needs the role's adapter.
    """

    def __init__(self, roles: ModelRoles, name: str, trains: tuple[str, ...]) -> None:
        self._roles = roles
        self.name = name
        """Name in metrics: ``policy``, or ``value`` for a pass of the critic alone."""
        self.trains = trains
        """Roles whose parameters the pass trains."""

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the pass trains, in a fixed order."""
        return [p for name in self.trains for p in self._roles.role(name).trained.values()]

    @contextmanager
    def __call__(self, batch: MicroBatch, *, temperature: float, with_entropy: bool = False) -> Iterator[LogprobOutput]:
        """The outputs of the pass for the batch's response tokens; None for those that it does not compute."""
        with self._roles.computing(self.name):
            with self._roles.autocast():
                out = self._roles.through(self.name)(lambda: self._outputs(batch, temperature, with_entropy))
            # Backward runs outside of autocast, which would round the float32 gradients of head and loss.
            yield out

    def _outputs(self, batch: MicroBatch, temperature: float, with_entropy: bool) -> LogprobOutput:
        role = self._roles.role(self.name)
        if POLICY not in self.trains:
            batch = replace(batch, token_ids=batch.token_ids.clamp(max=self._roles.critic_rows - 1))
            return LogprobOutput(None, None, response_values(role.model.base_model, role.head, batch))
        return response_outputs(
            role.model,
            batch,
            temperature=temperature,
            head=self._roles.role(VALUE).head if VALUE in self.trains else None,
            detach_head=self._roles.detach_value,
            with_entropy=with_entropy,
        )


class _Parts:
    """The modules and parameters of a model, collected once: walking a large model takes longer than switching it."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Puts every module in eval mode; training modes and ``requires_grad`` are restored on exit."""
        modes = [module.training for module in self.modules]
        try:
            self._set_modes([False] * len(modes))
            with flags_kept(self.parameters):
                yield
        finally:
            self._set_modes(modes)

    def _set_modes(self, modes: list[bool]) -> None:
        for module, mode in zip(self.modules, modes, strict=True):
            if module.training != mode:  # setting costs far more than reading
                module.training = mode


class ModelRoles:
    """The models of a run and what they share. Created by ``build_roles``.

    Args:
        roles: policy first, then reference and value if present.
        adapted: the PEFT model that the roles with an adapter share, or None.
        base_source: absolute path or hub id of the adapters' base model.
        tokenizer: the policy's.
        detach_value: keeps the value loss out of a trunk that policy and critic share.
        offload_idle: keeps separate frozen models on the CPU while they are not in use.
        processor: files that a full multimodal policy needs besides its tokenizer, by name; None for any other policy.
    """

    def __init__(
        self,
        roles: Iterable[Role],
        *,
        adapted: PeftModel | None,
        base_source: str,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str,
        autocast_dtype: torch.dtype | None,
        detach_value: bool,
        offload_idle: bool = False,
        processor: Mapping[str, bytes] | None = None,
    ) -> None:
        self._by_name = {role.name: role for role in roles}
        self._adapted = adapted
        self._adapters_off = False
        self._parts: dict[nn.Module, _Parts] = {}
        self._hosts: dict[str, Host] = {}
        self._recompute = False
        has_adapter, is_exact = bool(self.role(POLICY).adapter), autocast_dtype is None
        self._merged = MergedAdapter(adapted, self.policy_adapter) if has_adapter and is_exact else None
        self.base_source = base_source
        """Absolute path or hub id of the adapters' base model; of the policy itself if there are no adapters."""
        self.tokenizer = tokenizer
        """The tokenizer of policy and critic."""
        self.processor = processor or {}
        """Files that a full multimodal policy needs besides its tokenizer, by name; empty for any other policy."""
        self.device = torch.device(device)
        """The device of all roles."""
        self.autocast_dtype = autocast_dtype
        """The autocast dtype of forward passes, None without autocast."""
        self.detach_value = detach_value
        """Whether the value loss is kept out of the policy's weights."""
        self.offloads_idle = offload_idle
        """Whether separate frozen models are to wait on the CPU."""
        idle = self._idle_models() if offload_idle and has_own_memory(self.device) else set()
        self._take_over(idle)
        self._offloaded = {model: Offloaded(model, device=self.device) for model in idle}
        self.policy_rows = num_rows(self.role(POLICY).model)
        """Number of tokens that the policy has embeddings for."""
        self.critic_rows = num_rows(self.role(VALUE).model) if self.has_critic else None
        """Number of tokens that the critic has embeddings for. It reads ids beyond, which belong to no token, as the
        last of them: the policy of some models has more rows than there are tokens."""
        self._shapes = {name: parameter.shape for name, parameter in self.trained.items()}

    def _take_over(self, idle: set[PreTrainedModel]) -> None:
        """Puts models in eval mode and on the device, and lets gradients reach the trained parameters alone.

        Args:
            idle: models that do not go to the device.
        """
        models = {role.model for role in self._by_name.values()} | ({self._adapted} if self._adapted else set())
        for model in models:
            with_quick_products(model).requires_grad_(False).eval()
        for model in models - idle:
            placed(model, self.device)
        if self._adapted is not None and self.autocast_dtype is not None:
            without_casts(self._adapted)
        for role in self._by_name.values():
            if role.head is not None:
                role.head.requires_grad_(False).to(self.device)
            for parameter in role.trained.values():
                parameter.requires_grad_(True)

    def _idle_models(self) -> set[PreTrainedModel]:
        """Models that only frozen roles use."""
        trained = {role.model for role in self._by_name.values() if role.trained}
        return {role.model for role in self._by_name.values()} - trained

    # The roles

    @property
    def policy(self) -> PreTrainedModel | PeftModel:
        """The policy as its library saves it: the whole model, or the PEFT model that has it as adapter ``default``."""
        return self._adapted or self.role(POLICY).model

    @property
    def policy_adapter(self) -> str:
        """PEFT's name for the policy's adapter, which is active while no other role is in use."""
        return self.role(POLICY).adapter or DEFAULT

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference; there is none with ``kl_coef`` 0."""
        return REFERENCE in self._by_name

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic; there is none if advantages are computed from scores alone."""
        return VALUE in self._by_name

    def role(self, name: str) -> Role:
        """Returns a role by name."""
        assert name in self._by_name, f"no role {name}; there are {', '.join(self._by_name)}"
        return self._by_name[name]

    @property
    def all(self) -> list[Role]:
        """Every role, in the order of creation."""
        return list(self._by_name.values())

    @property
    def passes(self) -> list[Pass]:
        """The passes of the update over each micro-batch: one for a shared trunk, otherwise policy, then value."""
        if not self.has_critic:
            return [Pass(self, POLICY, (POLICY,))]
        if self._shares_trunk:
            return [Pass(self, POLICY, (POLICY, VALUE))]
        return [Pass(self, POLICY, (POLICY,)), Pass(self, VALUE, (VALUE,))]

    @property
    def _shares_trunk(self) -> bool:
        policy, value = self.role(POLICY), self.role(VALUE)
        return value.model is policy.model and value.adapter == policy.adapter

    def table(self) -> list[RoleRow]:
        """One row per role, in the order of creation."""
        seen: set[nn.Parameter] = set()
        rows = []
        for role in self._by_name.values():
            used = self._parameters_of(role)
            sizes: dict[str, int] = {}
            for p in used:
                sizes[str(p.dtype)] = sizes.get(str(p.dtype), 0) + num_weights(p)
            dtypes = [name.removeprefix("torch.") for name in sorted(sizes, key=sizes.get, reverse=True)]
            rows.append(
                RoleRow(
                    role=role.name,
                    source=role.source,
                    parameters=sum(num_weights(p) for p in used),
                    trainable=sum(p.numel() for p in role.trained.values()),
                    dtype=" + ".join(dtypes),
                    sharing=role.sharing,
                    bytes=sum(p.numel() * p.element_size() for p in used - seen),
                )
            )
            seen |= used
        return rows

    def _parameters_of(self, role: Role) -> set[nn.Parameter]:
        """The parameters that the role's forward uses."""
        used = set(role.model.parameters()) | set(role.head.parameters() if role.head else ())
        if role.adapter is not None:
            for name in self._adapted.peft_config:
                if name != role.adapter:
                    used -= set(adapter_parameters(self._adapted, name).values())
        return used

    # Using a role

    @contextmanager
    def use(self, role: str) -> Iterator[PreTrainedModel]:
        """The model of a role with its adapter switched on, in eval mode, under autocast if that is enabled.

        On exit, also after an exception, the previously active adapter, every ``requires_grad`` and the training mode
        of every module are restored. May be nested. To compute gradients, use a ``Pass`` instead.

        Args:
            role: ``policy``, ``reference``, ``value`` or ``reward/NAME``.
        """
        with self.computing(role), self.autocast():
            yield self.role(role).model

    @contextmanager
    def computing(self, role: str) -> Iterator[None]:
        """``use`` without autocast; layers are recomputed if gradients are enabled and checkpointing is on."""
        played = self.role(role)
        with_gradients = self._recompute and torch.is_grad_enabled()
        with (
            self._fetched(played.model),
            self._parts_of(played.model if played.adapter is None else self._adapted).in_eval_mode(),
            self._switched(played.adapter),
            recomputed_layers(played.model) if with_gradients else nullcontext(),
        ):
            yield

    @contextmanager
    def decoding(self) -> Iterator[PreTrainedModel]:
        """``use("policy")`` for one or more decoding steps; with merged weights inside of ``ready_to_decode``."""
        with self.use(POLICY) as model, self._merged.in_place() if self._merged else nullcontext():
            yield model

    def ready_to_decode(self) -> AbstractContextManager[None]:
        """Keeps the policy's adapter merged for ``decoding`` where that is faster and rounds in float32 only. The
        policy must not change meanwhile; other roles may be used."""
        return self._merged.ready() if self._merged else nullcontext()

    @contextmanager
    def fetched(self) -> Iterator[None]:
        """Keeps all weights on the device during a phase that uses offloaded roles many times. Without it, each use
        fetches them again."""
        with ExitStack() as stack:
            for model in self._offloaded:
                stack.enter_context(self._fetched(model))
            yield

    def _fetched(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        return self._offloaded[model].fetched() if model in self._offloaded else nullcontext()

    def _parts_of(self, model: nn.Module) -> _Parts:
        if model not in self._parts:
            self._parts[model] = _Parts(model)
        return self._parts[model]

    def autocast(self) -> AbstractContextManager[None]:
        """Autocast, if it is on."""
        return nullcontext() if self.autocast_dtype is None else torch.autocast(self.device.type, self.autocast_dtype)

    def switched_to(self, role: str) -> AbstractContextManager[None]:
        """Keeps the adapter of a role active while it is used many times. Without it, each use switches adapters and
        back, which in a large model takes longer than a forward pass needs to be launched. Other roles may be used
        meanwhile; a use of this one still needs ``use`` or a ``Pass``."""
        return self._switched(self.role(role).adapter)

    @contextmanager
    def _switched(self, adapter: str | None) -> Iterator[None]:
        """Makes ``adapter`` active; the previously active one is restored on exit."""
        if adapter is None:
            yield
            return
        before = self._active_adapter
        try:
            self._switch(adapter)
            yield
        finally:
            self._switch(before)
            assert self._adapted.active_adapter == (before or self.policy_adapter), "the adapter was not restored"

    @property
    def _active_adapter(self) -> str:
        return OFF if self._adapters_off else self._adapted.active_adapter

    def _switch(self, adapter: str) -> None:
        """Makes ``adapter`` active. PEFT also changes ``requires_grad``, which is restored immediately."""
        if adapter == self._active_adapter:
            return
        wanted, is_off = adapter or self.policy_adapter, adapter == OFF
        with flags_kept(self._parts_of(self._adapted).parameters):
            if self._adapters_off and not is_off:
                self._adapted.base_model.enable_adapter_layers()
            if self._adapted.active_adapter != wanted:
                self._adapted.set_adapter(wanted)
            if is_off and not self._adapters_off:
                self._adapted.base_model.disable_adapter_layers()
        self._adapters_off = is_off

    @torch.no_grad()
    def make_copy_exact(self) -> None:
        """Makes the copy of the start policy answer as the policy does, bit for bit: where rounded weights change its
        answers, because the model also uses them outside of products, they are copied anew."""
        policy, reference = self.role(POLICY).model, self._by_name.get(REFERENCE)
        if reference is None or not reference.copies_policy or self.autocast_dtype is None:
            return
        logits = []
        for name in (POLICY, REFERENCE):
            with self.use(name) as model:
                logits.append(model(input_ids=few_tokens(model), use_cache=False).logits.float())
        if torch.equal(*logits):
            return
        for own, original in zip(reference.model.parameters(), policy.parameters(), strict=True):
            if own.dtype != original.dtype:
                own.data = original.detach().clone()
        if reference.model in self._offloaded:
            self._offloaded[reference.model] = Offloaded(reference.model, device=self.device)

    # Outputs of roles

    @torch.no_grad()
    def score_pass(
        self, batch: MicroBatch, temperature: float, passes: Sequence[Pass] | None = None
    ) -> LogprobOutput:
        """Old log-probabilities, entropy and values, without gradients; bitwise equal to those of the update's passes.

        Args:
            passes: those to run. Default: all.
        """
        merged = LogprobOutput(None, None, None)
        for pass_ in self.passes if passes is None else passes:
            with pass_(batch, temperature=temperature, with_entropy=True) as out:
                merged = out.or_else(merged)
        return merged

    @torch.no_grad()
    def ref_logprobs(self, batch: MicroBatch, temperature: float) -> Float[Tensor, "M R"]:
        """Log-probabilities of the response tokens under the reference; 0 on padding."""
        with self.use(REFERENCE) as model:
            return self.through(REFERENCE)(lambda: response_outputs(model, batch, temperature=temperature)).logprobs

    @torch.no_grad()
    def reward_scores(
        self, name: str, ids: Int[Tensor, "M T"], mask: Bool[Tensor, "M T"], position_ids: Int[Tensor, "M T"]
    ) -> Float[Tensor, " M"]:
        """Scores of the reward adapter ``name`` at the last real token of each row."""
        role = self.role(f"reward/{name}")
        with self.use(role.name) as model:
            score = partial(last_token_scores, model.base_model, role.head, ids, mask, position_ids, causal=True)
            return self.through(role.name)(score)

    # Engines

    def through(self, role: str) -> Host:
        """What runs a computation with the role's weights: directly, or through the engine that shards them."""
        return self._hosts.get(role, directly)

    def host(self, hosts: Mapping[str, Host], trained: Mapping[str, Mapping[str, nn.Parameter]] | None = None) -> None:
        """Runs computations of roles through an engine from now on.

        Args:
            hosts: for each role, what runs a computation with its weights.
            trained: for each role whose trained parameters an engine replaced, the replacements under the same names.
        """
        self._hosts |= hosts
        for name, parameters in (trained or {}).items():
            self._by_name[name] = replace(self.role(name), trained=dict(parameters))
        self._parts.clear()

    # Changing roles

    def add_reward_adapter(self, name: str, path: str) -> None:
        """Loads the reward adapter in ``path`` onto the policy's base, as role ``reward/NAME``.

        Raises:
            ModelError: it was trained on another base, does not fit it, or has no scalar head.
        """
        assert self._adapted is not None, "reward adapters need an adapted policy; the configuration checks that"
        number = sum(role.startswith("reward/") for role in self._by_name)
        adapter = f"reward_{number}" if number else "reward"
        with flags_kept(self._adapted.parameters()):
            head = add_reward(self._adapted, adapter, path, self.base_source, float32=self.autocast_dtype is not None)
        for parameter in adapter_parameters(self._adapted, adapter).values():
            parameter.requires_grad_(False)
        placed(with_quick_products(self._adapted).eval(), self.device)
        if self.autocast_dtype is not None:
            without_casts(self._adapted)
        self._parts.pop(self._adapted, None)
        role = Role(
            f"reward/{name}",
            self.role(POLICY).model,
            path,
            "adapter on the policy's base",
            adapter=adapter,
            head=head.requires_grad_(False).to(self.device),
        )
        self._by_name[role.name] = role

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Sets whether passes with gradients recompute activations; forwards without gradients never do."""
        if enabled:
            for role in (POLICY, VALUE) if self.has_critic else (POLICY,):
                with recomputed_layers(self.role(role).model):
                    pass
        self._recompute = enabled

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Every trained parameter of policy and critic, as ``role.parameter``."""
        return {f"{role.name}.{name}": p for role in self._by_name.values() for name, p in role.trained.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The values of ``trained``."""
        return {name: p.detach() for name, p in self.trained.items()}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Tensor], fill: Callable[[nn.Parameter, Tensor], Any] = Tensor.copy_
    ) -> None:
        """Loads tensors of ``state_dict``, unsharded if an engine sharded them.

        Args:
            fill: sets the values of a parameter.

        Raises:
            CheckpointError: names or shapes are not those of this run.
        """
        own = self.trained
        check_names(own, state, "trained tensor")
        for name, parameter in own.items():
            if self._shapes[name] != state[name].shape:
                raise CheckpointError(
                    f"{name}: the checkpoint has shape {list(state[name].shape)}, this run {list(self._shapes[name])}"
                )
            fill(parameter, state[name])
