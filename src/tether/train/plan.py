"""The plan of a run, without loading weights: arithmetic, roles, and an estimate of memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tether.algo import logits_at_once
from tether.config.base import Quantization
from tether.config.keys import counted
from tether.config.load import check_kind, dump_config, dump_settings
from tether.config.rewards import (
    AdapterReward,
    EnsembleReward,
    FunctionReward,
    HttpReward,
    JudgeReward,
    OwnModelReward,
    ReadyReward,
    RewardConfig,
    ValueHeadReward,
    reward_names,
)
from tether.config.schema import RunConfig
from tether.data.bad_rows import UNUSABLE
from tether.errors import ConfigError
from tether.models.adapters import (
    DEFAULT,
    MODULE_PREFIX,
    adapter_parameters,
    adapter_shapes,
    linear_names,
    peft_lora_config,
    with_adapter,
)
from tether.models.build import critic_source
from tether.models.device import default_device, half_dtype, total_memory, weight_dtype
from tether.models.fit import has_few_bits
from tether.models.forward import state_size
from tether.models.heads import is_head_key, read_value_head, value_head_file
from tether.models.layers import parameters_above
from tether.models.loading import load_config
from tether.models.merging import MOST_BYTES
from tether.models.paths import is_adapter, own_weights
from tether.models.rounding import rounded_weights
from tether.rewards.build import try_sources
from tether.train.folder import check_folder
from tether.train.inputs import check, check_batches, check_data, first_answer, load_data, resolved
from tether.train.optim import MOMENT_BYTES

BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
AVERAGE_BYTES = GRAD_BYTES = 4
QUANTIZED_BYTES = {"4bit": 0.516, "8bit": 1.0}
"""Bytes per weight of a linear layer, including the scales of blocks of 64. Source: Dettmers et al. 2023, section 3,
https://arxiv.org/abs/2305.14314"""
ACTIVATION_FACTOR = 34
"""Bytes kept for backward by one transformer layer, for each token and hidden unit, with 16-bit activations and a fused
attention kernel. Source: Korthikanti et al. 2022, eq. 1 without its attention term, https://arxiv.org/abs/2205.05198"""
CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Configuration keys of models that change logits after the head; logits of all response tokens are then in memory at
once."""


@dataclass(frozen=True)
class Spreading:
    """Which of weights, gradients and optimizer states an engine shards: each of n processes then has 1/n of them."""

    weights: bool = False
    gradients: bool = False
    moments: bool = False
    copy_bytes: int = 0
    """Bytes of ZeRO's own copy per trained parameter, of which each of n processes has 1/n."""


ENGINES = {
    "DDP": Spreading(),
    "ZeRO-1": Spreading(moments=True, copy_bytes=4),
    "ZeRO-2": Spreading(gradients=True, moments=True, copy_bytes=4),
    "ZeRO-3": Spreading(weights=True, gradients=True, moments=True, copy_bytes=4),
    "FSDP2": Spreading(weights=True, gradients=True, moments=True),
}
"""Engines for several processes, and what each shards."""


@dataclass(frozen=True)
class RolePlan:
    """One model of the run."""

    role: str
    source: str
    parameters: int
    """Parameters that this role adds; those shared with another role are counted there."""
    trainable: int
    dtype: str
    sharing: str
    weight_bytes: int
    is_whole: bool = False
    """Whether no engine shards it: a reward model in few bits or compiled, or one that is not to be sharded."""


@dataclass(frozen=True)
class Plan:
    """What ``tether plan`` prints."""

    config: str
    """The resolved configuration as YAML."""
    settings: str
    """The same without the keys that are at their defaults: what was set, and what was derived from it."""
    arithmetic: list[tuple[str, str]]
    """Names and values of batch sizes and counts."""
    num_updates: int
    roles: list[RolePlan]
    memory: dict[str, int]
    """Estimated peak bytes of each phase, in a single process."""
    engines: dict[str, dict[str, int]]
    """The same for each of several processes, by engine; empty for a single process."""
    loading: dict[str, int]
    """Estimated bytes of CPU memory that each process needs while models load, by engine that shards weights: every
    process creates every model whole before it keeps its part."""
    notes: list[str]
    """Warnings about what may still go wrong."""


def plan(config: RunConfig, num_processes: int = 1) -> Plan:
    """Plans a run. Reads tokenizer, prompts and model configurations, and calls reward functions for a trial answer;
    asks no services, loads no weights and writes nothing.

    Args:
        num_processes: number of processes that the run would be launched in.

    Raises:
        ConfigError, DataError, ModelError: anything that would stop the run before its models are loaded.
    """
    check_kind(config, RunConfig, "plan")
    check(config)
    check_batches(config, num_processes)
    config = resolved(config, num_processes)
    data = load_data(config)
    notes = check_data(config, data)
    try_sources(config.rewards, config.reward_names, first_answer(data), data.tokenizer, asks_services=False)
    try:
        check_folder(config)
    except ConfigError as error:  # as the run itself will say, unless the folder is changed until then
        notes.append(str(error))
    prompts, eval_prompts = data.prompts, data.eval_prompts
    count, longest = len(prompts.prompts), prompts.longest_query
    updates, rollout = config.num_updates(count), config.train.rollout_batch_size
    epochs, minis = config.ppo.num_ppo_epochs, config.ppo.num_mini_batches
    rows, answers = counted(prompts.num_rows, "row"), counted(rollout, "answer")
    steps = f"{counted(epochs, 'epoch')} × {counted(minis, 'mini-batch')}"
    dropped = f"{prompts.num_too_long} too long" + (f", {prompts.num_bad} {UNUSABLE}" if prompts.num_bad else "")
    arithmetic = [
        ("prompts", f"{count:,} of {rows} ({dropped}), longest {counted(longest, 'token')}"),
        ("held-out prompts", str(len(eval_prompts.prompts)) if eval_prompts else "none"),
        ("updates", f"{updates:,} of {answers}{_each(config)} = {counted(updates * rollout, 'episode')}"),
        ("passes over the prompts", f"{updates * config.prompts_per_update / count:.3g}"),
        ("optimizer steps", f"{updates * epochs * minis:,} ({steps} of {counted(config.mini_batch_size, 'answer')})"),
        ("micro-batches", _micro_batches(config, num_processes)),
    ]
    roles = plan_roles(config, data.tokenizer)
    shape = model_config(config.model.path, config)
    demonstration = max((each.num_tokens for each in data.demonstrations), default=0)
    memory = estimate_memory(config, roles, shape, longest, demonstration=demonstration)
    engines = {} if num_processes == 1 else ENGINES
    if config.sampling.vllm is not None:
        engines = {name: spreading for name, spreading in engines.items() if spreading == Spreading()}
    each = {
        name: estimate_memory(config, roles, shape, longest, num_processes, spreading, demonstration=demonstration)
        for name, spreading in engines.items()
    }
    loading = {name: _while_loading(roles) for name, spreading in engines.items() if spreading.weights}
    continues = is_adapter(config.model.path, config.model.revision)
    whole, settings = dump_config(config, continues=continues), dump_settings(config)
    return Plan(whole, settings, arithmetic, updates, roles, memory, each, loading, notes)


def _each(config: RunConfig) -> str:
    """Describes how many answers each prompt gets, if more than one."""
    answers = config.sampling.num_generations
    return "" if answers == 1 else f" ({counted(config.prompts_per_update, 'prompt')} × {answers})"


def _micro_batches(config: RunConfig, num_processes: int) -> str:
    train, each = config.train, "" if num_processes == 1 else f" in each of {num_processes} processes"
    if train.max_tokens_per_micro_batch is not None:
        return f"of at most {train.max_tokens_per_micro_batch} tokens{each}"
    at_once = config.answers_at_once(num_processes)
    return f"{train.rollout_batch_size // at_once:,} of {counted(-(-at_once // num_processes), 'answer')}{each}"


def model_config(path: str, config: RunConfig) -> PreTrainedConfig:
    """Configuration of the model in ``path``, or of its base if it is an adapter."""
    revision = config.model.revision if path == config.model.path else None
    base, revision = own_weights(path, revision)
    return load_config(base, revision=revision, trust_remote_code=config.model.trust_remote_code)


def plan_roles(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[RolePlan]:
    """The roles of a run and what each adds to memory; ``config`` must be resolved."""
    with torch.device("meta"):
        shape = model_config(config.model.path, config)
        base = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.model.trust_remote_code)
    policy = _adapted_policy(config, base) if config.model.lora else _full_policy(config, base)
    rewards = _rewards(config.rewards, [f"reward {name}" for name in config.reward_names])
    source = critic_source(config, tokenizer)
    critic = [_critic(config, base, source and source.path)] if config.ppo.has_critic else []
    return [*policy, *critic, *rewards]


def _full_policy(config: RunConfig, base: PreTrainedModel) -> list[RolePlan]:
    path, size, dtype = config.model.path, _count(base), weight_dtype(config.model.dtype, torch.float32)
    trained = sum(p.numel() for p in parameters_above(base, config.model.freeze_layers).values())
    roles = [_role("policy", path, size, trained, dtype, "own weights")]
    return roles + ([_reference(config, base, size, dtype)] if config.ppo.kl_coef > 0 else [])


def _reference(config: RunConfig, base: PreTrainedModel, size: int, dtype: torch.dtype) -> RolePlan:
    """The frozen copy of a full policy; what autocast rounds is stored rounded."""
    whole = _role("reference", config.model.path, size, 0, dtype, "frozen copy")
    half = half_dtype(config.train, default_device())
    if half is None or dtype != torch.float32:
        return whole
    counts = {half: sum(weight.numel() for weight in rounded_weights(base))}
    counts[dtype] = size - counts[half]
    names = [str(each).removeprefix("torch.") for each in sorted(counts, key=counts.get, reverse=True) if counts[each]]
    num_bytes = sum(count * BYTES[each] for each, count in counts.items())
    return replace(whole, dtype=" + ".join(names), weight_bytes=num_bytes)


def _adapted_policy(config: RunConfig, base: PreTrainedModel) -> list[RolePlan]:
    path = config.model.path
    bits = config.model.quantization
    precision = half_dtype(config.train, default_device()) if bits is None else None
    dtype = weight_dtype(config.model.dtype, precision or torch.float32)
    adapter = _adapter_size(config, base)
    roles = [
        _frozen("base", path, base, dtype, "shared by the roles below", bits),
        _role("policy", path, adapter, adapter, torch.float32, "adapter on the base"),
    ]
    if config.ppo.kl_coef == 0:
        return roles
    if is_adapter(path, config.model.revision):
        return [*roles, _role("reference", path, adapter, 0, torch.float32, "frozen adapter on the base")]
    return [*roles, _role("reference", path, 0, 0, dtype, "the base, adapters off")]


def _critic(config: RunConfig, base: PreTrainedModel, source: str | None) -> RolePlan:
    head = state_size(base)
    if config.value_kind == "head":
        return _role("value", "new head", head, head, torch.float32, "head on the policy")
    if config.value_kind == "model":
        if source is not None:
            shape, code = model_config(source, config), {"trust_remote_code": config.model.trust_remote_code}
            shape.num_labels = 1
            with torch.device("meta"):
                size = _count(AutoModelForSequenceClassification.from_config(shape, **code))
        else:
            size = _count(base.base_model) + head
        return _role("value", source or config.model.path, size, size, torch.float32, "own weights")
    size = head + (_adapter_size(config, base) if source is None else _saved_adapter_size(source))
    return _role("value", source or "new adapter", size, size, torch.float32, "adapter on the base")


def _rewards(rewards: Sequence[RewardConfig], labels: Sequence[str]) -> list[RolePlan]:
    """One line per source; for an ensemble, one line per member."""
    roles = []
    for label, reward in zip(labels, rewards, strict=True):
        if isinstance(reward, EnsembleReward):
            roles += _rewards(reward.members, [f"{label}/{name}" for name in reward_names(reward.members)])
        else:
            roles.append(_reward(label, reward))
    return roles


def _reward(label: str, reward: RewardConfig) -> RolePlan:
    match reward:
        case FunctionReward():
            return RolePlan(label, f"{reward.path}:{reward.name}", 0, 0, "", "Python function", 0)
        case ReadyReward():
            return RolePlan(label, reward.type, 0, 0, "", "ready-made function", 0)
        case HttpReward():
            return RolePlan(label, reward.url, 0, 0, "", "service", 0)
        case JudgeReward():
            return RolePlan(label, f"{reward.model} at {reward.base_url}", 0, 0, "", "service", 0)
        case AdapterReward():
            size = _saved_adapter_size(reward.path) + _saved_head_size(reward.path)
            return _role(label, reward.path, size, 0, torch.float32, "adapter on the base")
        case OwnModelReward():
            base, revision = own_weights(reward.path, reward.revision)
            code = {"trust_remote_code": reward.trust_remote_code}
            of = load_config(base, revision=revision, **code)
            of.num_labels = 1
            is_beside = isinstance(reward, ValueHeadReward)
            with torch.device("meta"):
                auto = AutoModelForCausalLM if is_beside else AutoModelForSequenceClassification
                judge = auto.from_config(of, **code)
            dtype = weight_dtype(reward.dtype, getattr(of, "dtype", None) or torch.float32)
            role = _frozen(label, reward.path, judge, dtype, "own weights", reward.quantization)
            size = role.parameters + (state_size(judge) if is_beside else 0)
            is_fixed = base == reward.path and has_few_bits(of)  # an adapter is merged into unquantized weights
            is_whole = reward.processes in ("all", "one") or not reward.can_be_sharded or is_fixed
            return replace(role, parameters=size, is_whole=is_whole)


def _adapter_size(config: RunConfig, base: PreTrainedModel) -> int:
    """Number of parameters of the policy's adapter: the existing one if it is trained further, or a new one."""
    if is_adapter(config.model.path, config.model.revision):
        return _saved_adapter_size(config.model.path, config.model.revision)
    with torch.device("meta"):
        fresh = with_adapter(copy.deepcopy(base), peft_lora_config(config.model.lora, base))
    return sum(p.numel() for p in adapter_parameters(fresh, DEFAULT).values())


def _saved_adapter_size(path: str, revision: str | None = None) -> int:
    """Number of parameters of an adapter, without its head."""
    shapes = adapter_shapes(path, revision)
    return sum(prod(shape) for name, shape in shapes.items() if not is_head_key(name.removeprefix(MODULE_PREFIX)))


def _saved_head_size(path: str) -> int:
    """Number of parameters of a reward adapter's head, which is among its weights or in a separate file."""
    shapes = adapter_shapes(path)
    own = [prod(shape) for name, shape in shapes.items() if is_head_key(name.removeprefix(MODULE_PREFIX))]
    beside = {} if own or value_head_file(path) is None else read_value_head(path)
    return sum(own) + sum(tensor.numel() for tensor in beside.values())


def estimate_memory(
    config: RunConfig,
    roles: list[RolePlan],
    shape: PreTrainedConfig,
    longest: int,
    num_processes: int = 1,
    spreading: Spreading | None = None,
    *,
    demonstration: int = 0,
) -> dict[str, int]:
    """Estimated peak bytes of the phases of an update in one process, for queries of at most ``longest`` tokens.

    Args:
        num_processes: number of processes of the run.
        spreading: what an engine shards over them.
        demonstration: number of tokens of the longest demonstration; 0 without any.
    """
    spreading = spreading or Spreading()

    def part(num_bytes: int, is_spread: bool) -> int:
        return -(-num_bytes // num_processes) if is_spread else num_bytes

    text = shape.get_text_config()
    width = longest + config.sampling.response_length
    unit = 2 if config.train.bf16 or config.train.fp16 else 4
    weights = sum(part(role.weight_bytes, spreading.weights and not role.is_whole) for role in roles)
    trainable = sum(role.trainable for role in roles)
    at_once = max(role.trainable for role in roles)  # policy and critic alternate; a head is negligible
    averaged = sum(role.trainable for role in roles if role.role == "policy") if config.train.ema_decay else 0
    moments = part(int(MOMENT_BYTES[config.train.optim] * trainable), spreading.moments)
    copies = part(spreading.copy_bytes * trainable, True)
    kept = weights + moments + copies + part(AVERAGE_BYTES * averaged, spreading.weights)
    answers = sum(role.weight_bytes for role in roles if role.role in ("policy", "base"))
    gathered = answers if spreading.weights and config.train.ds3_gather_for_generation else 0
    rows = min(config.sampling.batch_size, -(-config.train.rollout_batch_size // num_processes))
    budget, micro = config.train.max_tokens_per_micro_batch, config.train.micro_batch_size
    tokens = budget or micro * width
    shown = max(budget, demonstration) if budget and demonstration else (micro or 0) * demonstration
    engine = _engine_bytes(config, answers, num_processes)
    between = 0 if engine and config.sampling.vllm.enable_sleep_mode else engine
    decoding = engine or rows * (width * _cached_numbers(text) * unit + text.vocab_size * 4 * 3)
    chunk = 2 * logits_at_once(default_device()) * 4
    if any(getattr(text, key, None) not in (None, 1.0) for key in CHANGES_LOGITS):
        responses = max(-(-tokens // width) * config.sampling.response_length, shown)
        chunk += 2 * responses * text.vocab_size * unit  # the logits and their gradient
    layers = 2 if config.train.gradient_checkpointing else text.num_hidden_layers
    activations = max(tokens, shown) * text.hidden_size * layers * ACTIVATION_FACTOR * unit // 2
    one_layer = tokens * text.hidden_size * ACTIVATION_FACTOR * unit // 2
    merged = _merged_bytes(roles) if not engine and unit == 4 and default_device().type == "cpu" else 0
    gradients = part(GRAD_BYTES * at_once, spreading.gradients)
    return {
        "weights and optimizer": kept,
        **({"vLLM": engine} if engine else {}),
        "rollout": kept + gathered + merged + decoding,
        "log-probabilities and values": kept + between + one_layer + chunk,
        "update": kept + between + gradients + activations + chunk,
    }


def _engine_bytes(config: RunConfig, policy: int, num_processes: int) -> int:
    """Bytes that vLLM takes in each process; 0 without it.

    Args:
        policy: bytes of the policy's weights, of which it has a copy.
    """
    if config.sampling.vllm is None:
        return 0
    device, share = default_device(), config.sampling.vllm.gpu_memory_utilization
    if device.type == "cpu":  # there the share is for keys and values alone
        return policy + int(share * total_memory(device) / num_processes)
    return int(share * total_memory(device))


def _cached_numbers(text: PreTrainedConfig) -> int:
    """How many numbers the keys and values of one token have in all layers; 0 for a model without attention, whose
    states do not grow with the text."""
    num_heads = getattr(text, "num_attention_heads", None)
    if num_heads is None:
        return 0
    heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return text.num_hidden_layers * 2 * heads * head_dim


def _merged_bytes(roles: Sequence[RolePlan]) -> int:
    """Bytes of the base's merged weights beside its own while answers are generated in float32."""
    base = next((role for role in roles if role.role == "base"), None)
    return min(base.weight_bytes, MOST_BYTES) if base is not None and base.dtype == "float32" else 0


def _while_loading(roles: Sequence[RolePlan]) -> int:
    """Bytes of the models that wait for an engine to shard them: those of roles together, reward models one by one."""
    judges = [role.weight_bytes for role in roles if role.role.startswith("reward ") and not role.is_whole]
    return sum(role.weight_bytes for role in roles if not role.role.startswith("reward ")) + max(judges, default=0)


def _role(role: str, source: str, parameters: int, trainable: int, dtype: torch.dtype, sharing: str) -> RolePlan:
    name = str(dtype).removeprefix("torch.")
    return RolePlan(role, source, parameters, trainable, name, sharing, parameters * BYTES.get(dtype, 4))


def _frozen(
    role: str, source: str, model: PreTrainedModel, dtype: torch.dtype, sharing: str, bits: Quantization | None
) -> RolePlan:
    """A role that adds a complete frozen model, whose linear layers may be in 4 or 8 bits."""
    whole = _role(role, source, _count(model), 0, dtype, sharing)
    if bits is None:
        return whole
    linear = sum(model.get_submodule(name).weight.numel() for name in linear_names(model))
    others = (whole.parameters - linear) * BYTES.get(dtype, 4)
    return replace(whole, dtype=f"{bits} + {whole.dtype}", weight_bytes=others + int(linear * QUANTIZED_BYTES[bits]))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
