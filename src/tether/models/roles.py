"""Who plays which role, on which weights: policy, reference, value and reward adapters.

    sharing   policy                 reference                        value                       reward/NAME
    full      own weights            frozen copy                      own weights, or
                                                                      head on the policy
    LoRA      adapter ``default``    the start policy: adapters off,  adapter ``value`` + head,   adapter ``reward…``
              on the base            or frozen adapter ``reference``  or as in full               + head

This is the only file that switches adapters. At rest the policy is active, everything is in eval mode (dropout is never
on) and exactly the trained parameters require gradients; a role in use changes which adapter answers and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel, PeftType
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config.schema import RunConfig
from tether.errors import CheckpointError, ConfigError, ModelError
from tether.models.adapters import (
    DEFAULT,
    adapter_parameters,
    add_reward,
    changed_config,
    check_continued,
    check_switched_off,
    fill_adapter,
    flags_kept,
    peft_lora_config,
    read_adapter,
    with_adapter,
)
from tether.models.bitsandbytes import FewBits, is_quantized, num_weights, placed
from tether.models.compiled import compile_layers
from tether.models.forward import (
    LogprobOutput,
    check_causal,
    head_matches,
    last_token_scores,
    response_outputs,
    response_values,
)
from tether.models.heads import ScalarHead, state_size
from tether.models.layers import parameters_above
from tether.models.loading import classifier_on, load_causal_lm, load_classifier, load_tokenizer, pools_otherwise
from tether.models.offload import Offloaded, has_own_memory
from tether.models.paths import ADAPTER_CONFIG, absolute_source, adapter_base, is_adapter
from tether.models.products import with_quick_products
from tether.models.recompute import recomputed_layers
from tether.types import MicroBatch

POLICY, REFERENCE, VALUE = "policy", "reference", "value"
OFF = ""
"""In place of an adapter's name: the base with all adapters off."""
Host = Callable[[Callable[[], Any]], Any]
"""Runs a computation with the weights of a role and returns what it returns."""


def directly(compute: Callable[[], Any]) -> Any:
    """What ``compute`` returns, of weights that are all here."""
    return compute()


def _copied(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.copy_(values)


@dataclass(frozen=True)
class Role:
    """One role: a model, what of it is switched on, and what of it trains."""

    name: str
    """``policy``, ``reference``, ``value`` or ``reward/NAME``."""
    model: PreTrainedModel
    """The model that runs: a causal language model, or the critic's own sequence classifier."""
    source: str
    """Where its weights came from."""
    sharing: str
    """What it shares with other roles."""
    adapter: str | None = None
    """PEFT's name of its adapter, ``OFF``, or None if its model has no adapters."""
    head: ScalarHead | None = None
    """Makes numbers of its hidden states."""
    trained: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """What of it trains, by name."""


@dataclass(frozen=True)
class RoleRow:
    """One line of the table of roles."""

    role: str
    """``policy``, ``reference``, ``value`` or ``reward/NAME``."""
    source: str
    """Path, hub id, or how it was made."""
    parameters: int
    """Parameters that its forward goes through, shared ones included."""
    trainable: int
    """Parameters of it that train."""
    dtype: str
    """Types of its parameters, the most frequent first."""
    sharing: str
    """What it shares with other roles."""
    bytes: int
    """Memory that its parameters add to those of the roles above it."""


class Pass:
    """One forward and backward of the update over a micro-batch, and what it trains.

    ``with pass_(batch, temperature=1.0) as out:`` runs the forward; the backward belongs inside the ``with``, because
    recomputed activations need the role's adapter.
    """

    def __init__(self, roles: ModelRoles, name: str, trains: tuple[str, ...]) -> None:
        self._roles = roles
        self.name = name
        """Name in metrics: ``policy``, or ``value`` for a pass of the critic alone."""
        self.trains = trains
        """Roles whose parameters it trains."""

    def parameters(self) -> list[nn.Parameter]:
        """What it trains, in a fixed order."""
        return [p for name in self.trains for p in self._roles.role(name).trained.values()]

    @contextmanager
    def __call__(self, batch: MicroBatch, *, temperature: float, with_entropy: bool = False) -> Iterator[LogprobOutput]:
        """What the pass says of the batch's response tokens; None for what it does not compute."""
        with self._roles.computing(self.name):
            with self._roles.autocast():
                out = self._roles.through(self.name)(lambda: self._outputs(batch, temperature, with_entropy))
            # Backward runs out here: under autocast it would round the float32 gradients of head and loss.
            yield out

    def _outputs(self, batch: MicroBatch, temperature: float, with_entropy: bool) -> LogprobOutput:
        role = self._roles.role(self.name)
        if POLICY not in self.trains:
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
    """The modules and parameters of a model, gathered once: to walk a large model takes longer than to switch it."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Inside, every module is in eval mode; training modes and ``requires_grad`` come back at the end."""
        modes = [module.training for module in self.modules]
        try:
            self._set_modes([False] * len(modes))
            with flags_kept(self.parameters):
                yield
        finally:
            self._set_modes(modes)

    def _set_modes(self, modes: list[bool]) -> None:
        for module, mode in zip(self.modules, modes, strict=True):
            if module.training != mode:  # setting costs far more than asking
                module.training = mode


class ModelRoles:
    """The models of a run and who shares what. Made by ``build_roles``.

    Args:
        roles: policy first, then reference and value if there are such.
        adapted: the PEFT model that the roles with an adapter share, or None.
        base_source: absolute path or hub id of the model that adapters sit on.
        tokenizer: the policy's.
        detach_value: keeps the value loss out of a trunk that policy and critic share.
        offload_idle: keeps frozen models of their own on the CPU while nobody uses them.
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
    ) -> None:
        self._by_name = {role.name: role for role in roles}
        self._adapted = adapted
        self._adapters_off = False
        self._parts: dict[nn.Module, _Parts] = {}
        self._hosts: dict[str, Host] = {}
        self._recompute = False
        self.base_source = base_source
        """Absolute path or hub id of the model that adapters sit on; the policy's own where there are none."""
        self.tokenizer = tokenizer
        """The policy's tokenizer, which is the critic's too."""
        self.device = torch.device(device)
        """Where all roles are."""
        self.autocast_dtype = autocast_dtype
        """The type that forwards run in under autocast, None without it."""
        self.detach_value = detach_value
        """Whether the value loss is kept out of the policy's weights."""
        self.offloads_idle = offload_idle
        """Whether frozen models of their own are to wait on the CPU."""
        models = {role.model for role in self._by_name.values()} | ({adapted} if adapted else set())
        idle = self._idle_models() if offload_idle and has_own_memory(self.device) else set()
        for model in models:
            with_quick_products(model).requires_grad_(False).eval()
        for model in models - idle:
            placed(model, self.device)
        self._offloaded = {model: Offloaded(model, device=self.device) for model in idle}
        for role in self._by_name.values():
            if role.head is not None:
                role.head.requires_grad_(False).to(self.device)
            for parameter in role.trained.values():
                parameter.requires_grad_(True)
        self._shapes = {name: parameter.shape for name, parameter in self.trained.items()}

    def _idle_models(self) -> set[PreTrainedModel]:
        """Models that are one frozen role's alone."""
        trained = {role.model for role in self._by_name.values() if role.trained}
        return {role.model for role in self._by_name.values()} - trained

    # What there is

    @property
    def policy(self) -> PreTrainedModel | PeftModel:
        """The policy as its library saves it: the whole model, or the PEFT model whose adapter ``default`` it is."""
        return self._adapted or self.role(POLICY).model

    @property
    def policy_adapter(self) -> str:
        """PEFT's name of the policy's adapter, the one that is active at rest."""
        return self.role(POLICY).adapter or DEFAULT

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference: not at ``kl_coef`` 0."""
        return REFERENCE in self._by_name

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic: not where advantages come from scores alone."""
        return VALUE in self._by_name

    def role(self, name: str) -> Role:
        """The role of that name."""
        assert name in self._by_name, f"no role {name}; there are {', '.join(self._by_name)}"
        return self._by_name[name]

    @property
    def all(self) -> list[Role]:
        """Every role, in the order that they were made."""
        return list(self._by_name.values())

    @property
    def passes(self) -> list[Pass]:
        """What the update runs on each micro-batch: one pass for a shared trunk, otherwise policy, then value."""
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
        """One row a role, in the order that they were made."""
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
        """The parameters that the role's forward goes through."""
        used = set(role.model.parameters()) | set(role.head.parameters() if role.head else ())
        if role.adapter is not None:
            for name in self._adapted.peft_config:
                if name != role.adapter:
                    used -= set(adapter_parameters(self._adapted, name).values())
        return used

    # Using a role

    @contextmanager
    def use(self, role: str) -> Iterator[PreTrainedModel]:
        """The model of a role, its adapter switched on, in eval mode, under autocast if that is on.

        On exit, whatever happened inside, the adapter that was active before, every ``requires_grad`` and the training
        mode of every module are as they were. May be nested. Gradients: run backward inside a ``Pass`` instead.

        Args:
            role: ``policy``, ``reference``, ``value`` or ``reward/NAME``.
        """
        with self.computing(role), self.autocast():
            yield self.role(role).model

    @contextmanager
    def computing(self, role: str) -> Iterator[None]:
        """``use`` without autocast, and with recomputed layers where gradients are wanted and checkpointing is on."""
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
    def fetched(self) -> Iterator[None]:
        """Inside, no weights wait on the CPU: for a phase that uses their role many times. Without it each use fetches
        them anew."""
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

    @contextmanager
    def _switched(self, adapter: str | None) -> Iterator[None]:
        """Inside, ``adapter`` answers; the one that answered before comes back at the end."""
        if adapter is None:
            yield
            return
        before = OFF if self._adapters_off else self._adapted.active_adapter
        try:
            self._switch(adapter)
            yield
        finally:
            self._switch(before)
            assert self._adapted.active_adapter == (before or self.policy_adapter), "the adapter was not restored"

    def _switch(self, adapter: str) -> None:
        """Makes ``adapter`` answer. PEFT also sets ``requires_grad`` then, which is put back at once."""
        wanted, is_off = adapter or self.policy_adapter, adapter == OFF
        with flags_kept(self._parts_of(self._adapted).parameters):
            if self._adapters_off and not is_off:
                self._adapted.base_model.enable_adapter_layers()
            if self._adapted.active_adapter != wanted:
                self._adapted.set_adapter(wanted)
            if is_off and not self._adapters_off:
                self._adapted.base_model.disable_adapter_layers()
        self._adapters_off = is_off

    # What roles say

    @torch.no_grad()
    def score_pass(
        self,
        batch: MicroBatch,
        temperature: float,
        around: Callable[[Pass], AbstractContextManager[None]] = lambda pass_: nullcontext(),
    ) -> LogprobOutput:
        """Old log-probabilities, entropy and values, without gradients: the update's own passes, bitwise.

        Args:
            around: a context that each pass runs in.
        """
        merged = LogprobOutput(None, None, None)
        for pass_ in self.passes:
            with around(pass_), pass_(batch, temperature=temperature, with_entropy=True) as out:
                merged = LogprobOutput(*(new if new is not None else old for old, new in zip(merged, out, strict=True)))
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
        """What the reward adapter ``name`` says at the last real token of each row."""
        role = self.role(f"reward/{name}")
        with self.use(role.name) as model:
            score = partial(last_token_scores, model.base_model, role.head, ids, mask, position_ids, causal=True)
            return self.through(role.name)(score)

    # Engines

    def through(self, role: str) -> Host:
        """What runs a computation with the role's weights: it directly, or by the engine that they are spread by."""
        return self._hosts.get(role, directly)

    def host(self, hosts: Mapping[str, Host], trained: Mapping[str, Mapping[str, nn.Parameter]] | None = None) -> None:
        """Makes computations of roles go through an engine from now on.

        Args:
            hosts: by role, what runs a computation with its weights.
            trained: by role, what stands in for the parameters that train, under the same names, where an engine
                replaced them.
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
        """Whether passes with gradients recompute activations; forwards without gradients are never touched."""
        if enabled:
            for role in (POLICY, VALUE) if self.has_critic else (POLICY,):
                with recomputed_layers(self.role(role).model):
                    pass
        self._recompute = enabled

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Every parameter of policy and critic that trains, as ``role.parameter``."""
        return {f"{role.name}.{name}": p for role in self._by_name.values() for name, p in role.trained.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The values of ``trained``."""
        return {name: p.detach() for name, p in self.trained.items()}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Tensor], fill: Callable[[nn.Parameter, Tensor], None] = _copied
    ) -> None:
        """Takes over the tensors of ``state_dict``, put together where an engine spread them.

        Args:
            fill: gives a parameter its values.

        Raises:
            CheckpointError: names or shapes are not those of this run.
        """
        own = self.trained
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())
            where = "the checkpoint" if odd[0] in own else "this run's configuration"
            raise CheckpointError(f"{len(odd)} trained tensors do not match, the first is missing in {where}: {odd[0]}")
        for name, parameter in own.items():
            if self._shapes[name] != state[name].shape:
                raise CheckpointError(
                    f"{name}: the checkpoint has shape {list(state[name].shape)}, this run {list(self._shapes[name])}"
                )
            fill(parameter, state[name])


# Building


@dataclass(frozen=True)
class CriticSource:
    """A sequence classifier or a reward adapter that a critic is copied from."""

    path: str
    """Folder or hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run Python code that comes with it."""


def build_roles(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device | str,
    autocast_dtype: torch.dtype | None,
) -> ModelRoles:
    """Loads policy, reference and critic as the configuration shares them. Reward adapters are added afterwards.

    Fresh adapters and heads depend on ``train.seed`` alone; the global random state is left as it was.

    Args:
        tokenizer: the policy's.
        autocast_dtype: the type that forwards run in under autocast, None without it.

    Raises:
        ConfigError, ModelError: a path does not hold what its role needs, or two settings do not fit together.
    """
    source = critic_source(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        if config.model.lora is None:
            roles, adapted = _full_roles(config), None
        else:
            roles, adapted = _lora_roles(config, device=device, autocast_dtype=autocast_dtype)
        policy = roles[0]
        check_token_ids(policy.model, tokenizer)
        if config.value_kind == "adapter":
            roles.append(_adapter_critic(config, source, adapted, policy, autocast_dtype=autocast_dtype))
        elif config.value_kind == "model":
            roles.append(_model_critic(config, source, policy, tokenizer))
        elif config.value_kind == "head":
            head = ScalarHead(state_size(policy.model))
            own = _head_parameters(head)
            roles.append(Role(VALUE, policy.model, "new head", "head on the policy", policy.adapter, head, own))
    models = ModelRoles(
        roles,
        adapted=adapted,
        base_source=_base_source(config),
        tokenizer=tokenizer,
        device=device,
        autocast_dtype=autocast_dtype,
        detach_value=config.value.detach,
        offload_idle=config.train.offload_idle_roles,
    )
    if config.train.compile:
        for model in {role.model for role in models.all}:
            compile_layers(model)
    models.gradient_checkpointing(config.train.gradient_checkpointing)
    with models.use(POLICY) as model:
        head_matches(model)  # now, and not in the middle of a pass
    for name in {role.model: role.name for role in models.all}.values():
        with models.use(name) as model:
            check_causal(model)
    return models


def _full_roles(config: RunConfig) -> list[Role]:
    path = config.model.path
    model = _load_policy(config, path, _dtype(config, torch.float32), config.model.revision)
    trained = parameters_above(model, config.model.freeze_layers)
    roles = [Role(POLICY, model, path, "own weights", trained=trained)]
    if config.ppo.kl_coef > 0:
        roles.append(Role(REFERENCE, copy.deepcopy(model), path, "frozen copy"))
    return roles


def _lora_roles(
    config: RunConfig, *, device: torch.device | str, autocast_dtype: torch.dtype | None
) -> tuple[list[Role], PeftModel]:
    path, lora = config.model.path, config.model.lora
    base_source = _base_source(config)
    start = read_adapter(path, config.model.revision) if is_adapter(path, config.model.revision) else None
    if start is not None:
        check_switched_off(path, start.config)
        if start.head:
            raise ModelError(f"model.path: {path} is a reward adapter (it holds a head); wanted a language model's")
    bits, compute_dtype = config.model.quantization, autocast_dtype or torch.float32
    # Beside quantised layers, norms and heads are float32, as in QLoRA.
    dtype = _dtype(config, compute_dtype if bits is None else torch.float32)
    few_bits = None if bits is None else FewBits(bits, torch.device(device), compute_dtype)
    revision = config.model.revision if start is None else start.config.revision
    base = _load_policy(config, base_source, dtype, revision, few_bits)
    if start is None:
        settings = changed_config(peft_lora_config(lora, base), base_model_name_or_path=base_source, revision=revision)
    else:
        check_continued(lora, start, base)
        settings = changed_config(
            start.config, base_model_name_or_path=base_source, task_type="CAUSAL_LM", inference_mode=False
        )
    try:
        adapted = with_adapter(base, settings)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: {error}") from error
    if start is not None:
        fill_adapter(adapted, DEFAULT, start, float32=autocast_dtype is not None)
    trained = adapter_parameters(adapted, DEFAULT)
    roles = [Role(POLICY, base, path, "adapter on the base", DEFAULT, trained=trained)]
    if config.ppo.kl_coef > 0 and start is None:
        roles.append(Role(REFERENCE, base, path, "the base, adapters off", OFF))
    elif config.ppo.kl_coef > 0:
        adapted.add_adapter(REFERENCE, changed_config(start.config, inference_mode=False))
        fill_adapter(adapted, REFERENCE, start, float32=autocast_dtype is not None)
        roles.append(Role(REFERENCE, base, path, "frozen adapter on the base", REFERENCE))
    return roles, adapted


def _adapter_critic(
    config: RunConfig,
    source: CriticSource | None,
    adapted: PeftModel,
    policy: Role,
    *,
    autocast_dtype: torch.dtype | None,
) -> Role:
    """A second adapter on the policy's base with a head: a copy of a reward adapter, or a fresh one that says 0."""
    if source is None:
        own = adapted.peft_config[DEFAULT]
        fresh = {"init_lora_weights": True} if own.peft_type == PeftType.LORA else {}
        settings = changed_config(own, modules_to_save=None, inference_mode=False, **fresh)
        adapted.add_adapter(VALUE, settings)
        head = ScalarHead(state_size(policy.model))
    else:
        head = add_reward(adapted, VALUE, source.path, _base_source(config), float32=autocast_dtype is not None)
    trained = adapter_parameters(adapted, VALUE) | _head_parameters(head)
    where = "new adapter" if source is None else source.path
    return Role(VALUE, policy.model, where, "adapter on the policy's base", VALUE, head, trained)


def _model_critic(
    config: RunConfig, source: CriticSource | None, policy: Role, tokenizer: PreTrainedTokenizerBase
) -> Role:
    """A sequence classifier of its own: a copy of a reward model, or of the start policy with a head that says 0."""
    dtype = torch.float32 if config.model.lora else _dtype(config, torch.float32)
    where = config.model.path if source is None else source.path
    if source is not None:
        model = load_classifier(
            source.path,
            dtype=dtype,
            revision=source.revision,
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=source.trust_remote_code,
        )
    elif config.model.lora is None:
        model = copy.deepcopy(policy.model)
    else:
        model = _load_policy(config, config.model.path, dtype, config.model.revision)
    if is_quantized(model):
        raise ConfigError(
            f"value.kind model: {where} holds weights in few bits, which a critic of its own cannot train; set "
            "value.kind to adapter or head, or value.init to another model"
        )
    if source is None:
        model = classifier_on(model)
    if model.config.pad_token_id is None:  # plain transformers wants one to score several rows at once
        model.config.pad_token_id = padding_id(model, tokenizer)
    return Role(VALUE, model, where, "own weights", head=model.score, trained=dict(model.named_parameters()))


def padding_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The pad token if the model has a row for it, otherwise the end token."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None and pad < _vocabulary_size(model) else tokenizer.eos_token_id


def critic_source(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> CriticSource | None:
    """What the critic is copied from, or None where it starts from the policy or there is none.

    Raises:
        ConfigError: ``value.init`` names something that this kind of critic cannot be copied from.
    """
    kind, init = config.value_kind, config.value.init
    if kind in (None, "head") or init == "policy":
        return None
    if init in (None, "reward"):
        reward = config.rewards[0]
        wanted = ("adapter",) if kind == "adapter" else ("model", "adapter")
        if reward.type not in wanted:
            why_not = f"the first reward is of type {reward.type}, wanted {' or '.join(wanted)}"
        else:
            source = CriticSource(reward.path, **reward.model_dump(include={"revision", "trust_remote_code"}))
            why_not = _no_critic(source, tokenizer) if kind == "model" else None
        if why_not is None:
            return source
        if init is None:
            return None
        raise ConfigError(f"value.init reward: {why_not}; set value.init to policy")
    if kind == "adapter" and not is_adapter(init):
        raise ConfigError(
            f"value.init: {init} holds no {ADAPTER_CONFIG}; a critic of kind adapter is copied from a reward "
            "adapter on the policy's base. Set value.kind to model for a sequence classifier"
        )
    source = CriticSource(init, trust_remote_code=config.model.trust_remote_code)
    if kind == "model" and (why_not := _no_critic(source, tokenizer)):
        raise ConfigError(f"value.init: {why_not}; set value.init to policy")
    return source


def _no_critic(source: CriticSource, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why the model gives no value of each of the policy's tokens, or None if it can."""
    origin = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
    if load_tokenizer(source.path, **origin).get_vocab() != tokenizer.get_vocab():
        return (
            f"the tokenizer of {source.path} has another vocabulary than the policy's, whose token ids the critic reads"
        )
    if pools_otherwise(source.path, **origin):
        return f"{source.path} is no decoder, whose states know only the tokens before them"
    return None


def check_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ``ModelError`` if an end token has no embedding. A pad token needs none: pads never reach the model."""
    rows = _vocabulary_size(model)
    configured = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if beyond := sorted(token for token in ends if token >= rows):
        raise ModelError(
            f"model.path: end token {beyond[0]} is outside of the model's vocabulary of {rows} tokens; "
            "tokenizer or generation config belong to another model"
        )


def _load_policy(
    config: RunConfig, path: str, dtype: torch.dtype, revision: str | None, few_bits: FewBits | None = None
) -> PreTrainedModel:
    """A language model under the options of ``model``."""
    return load_causal_lm(
        path,
        dtype=dtype,
        revision=revision,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        few_bits=few_bits,
    )


def _dtype(config: RunConfig, auto: torch.dtype) -> torch.dtype:
    return auto if config.model.dtype == "auto" else getattr(torch, config.model.dtype)


def _base_source(config: RunConfig) -> str:
    path, revision = config.model.path, config.model.revision
    return absolute_source(adapter_base(path, revision) if is_adapter(path, revision) else path)


def _vocabulary_size(model: PreTrainedModel) -> int:
    return model.get_input_embeddings().weight.shape[0]


def _head_parameters(head: ScalarHead) -> dict[str, nn.Parameter]:
    return {f"head.{name}": parameter for name, parameter in head.named_parameters()}
