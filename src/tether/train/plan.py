"""What a run would do, without loading a weight: arithmetic, roles, and an estimate of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from tether.config.load import dump_config
from tether.config.schema import RunConfig
from tether.models.adapters import peft_lora_config
from tether.models.loading import bf16_supported
from tether.models.paths import adapter_base, is_adapter
from tether.train.distributed import Dist
from tether.train.run import check, check_data, load_data

BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
ADAM_BYTES = 8
GRAD_BYTES = 4
LOGIT_CHUNK = 256
ACTIVATION_FACTOR = 34
"""Bytes kept for backward by one transformer layer, for each token and hidden unit, with 16-bit activations and a fused
attention kernel. Source: Korthikanti et al. 2022, eq. 1 without its attention term, https://arxiv.org/abs/2205.05198"""


@dataclass(frozen=True)
class RolePlan:
    """One model of the run."""

    role: str
    source: str
    parameters: int
    """Parameters that this role adds; what it shares with another counts there."""
    trainable: int
    dtype: str
    sharing: str
    weight_bytes: int


@dataclass(frozen=True)
class Plan:
    """What ``tether plan`` prints."""

    config: str
    """The resolved configuration as YAML."""
    arithmetic: list[tuple[str, str]]
    """Batch sizes and counts, named."""
    num_updates: int
    roles: list[RolePlan]
    memory: dict[str, int]
    """Estimated peak bytes of each phase."""


def plan(config: RunConfig) -> Plan:
    """Works out a run. Reads tokenizer, prompts and model configurations; loads no weights and writes nothing.

    Raises:
        ConfigError, DataError, ModelError: whatever would stop the run before its models load.
    """
    check(config)
    tokenizer, prompts, eval_prompts = load_data(config)
    check_data(config, tokenizer, prompts, eval_prompts)
    count, longest = len(prompts.prompts), max(len(p.token_ids) for p in prompts.prompts)
    updates, rollout = config.num_updates(count), config.train.rollout_batch_size
    epochs, minis = config.ppo.num_ppo_epochs, config.ppo.num_mini_batches
    arithmetic = [
        ("prompts", f"{count} of {prompts.num_rows} rows ({prompts.num_too_long} too long), longest {longest} tokens"),
        ("held-out prompts", str(len(eval_prompts.prompts)) if eval_prompts else "none"),
        ("updates", f"{updates} of {rollout} answers = {updates * rollout} episodes"),
        ("passes over the prompts", f"{updates * rollout / count:.3g}"),
        (
            "optimizer steps",
            f"{updates * epochs * minis} ({epochs} epochs × {minis} mini-batches of {config.mini_batch_size})",
        ),
        ("micro-batches", f"{rollout // config.train.micro_batch_size} of {config.train.micro_batch_size} answers"),
    ]
    device = Dist().device
    bf16 = config.train.bf16 if config.train.bf16 is not None else bf16_supported(device)
    roles = plan_roles(config, bf16=bf16)
    shape = model_config(config.model.path, config)
    memory = estimate_memory(config, roles, shape, longest, bf16=bf16)
    return Plan(dump_config(config), arithmetic, updates, roles, memory)


def model_config(path: str, config: RunConfig) -> PretrainedConfig:
    """Configuration of the model in ``path``, or of an adapter's base."""
    base = adapter_base(path) if is_adapter(path) else path
    return AutoConfig.from_pretrained(base, trust_remote_code=config.model.trust_remote_code)


def plan_roles(config: RunConfig, *, bf16: bool) -> list[RolePlan]:
    """The roles of a run with what each adds to memory."""
    lora, shape = config.model.lora, model_config(config.model.path, config)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(shape)
    size = _count(base)
    auto = torch.bfloat16 if lora and bf16 else torch.float32
    dtype = auto if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    name = str(dtype).removeprefix("torch.")
    backbone = _count(base.base_model)
    hidden = shape.get_text_config().hidden_size
    head, has_reference = hidden, config.ppo.kl_coef > 0
    value, source = config.value_kind, config.value.init or "reward or policy"
    if lora is None:
        roles = [_role("policy", config.model.path, size, size, dtype, "own weights")]
        if has_reference:
            roles.append(_role("reference", config.model.path, size, 0, dtype, "frozen copy"))
    else:
        adapted = get_peft_model(base, peft_lora_config(lora, base), autocast_adapter_dtype=False)
        adapter = sum(p.numel() for n, p in adapted.named_parameters() if "lora_" in n)
        roles = [
            _role("base", config.model.path, size, 0, dtype, "shared by the roles below"),
            _role("policy", config.model.path, adapter, adapter, torch.float32, "adapter on the base"),
        ]
        if has_reference and is_adapter(config.model.path):
            roles.append(_role("reference", config.model.path, adapter, 0, torch.float32, "frozen adapter on the base"))
        elif has_reference:
            roles.append(RolePlan("reference", config.model.path, 0, 0, name, "the base, adapters off", 0))
    if value == "head":
        roles.append(_role("value", "new head", head, head, torch.float32, "head on the policy"))
    elif value == "model":
        roles.append(_role("value", source, backbone + head, backbone + head, torch.float32, "own weights"))
    else:
        roles.append(_role("value", source, adapter + head, adapter + head, torch.float32, "adapter on the base"))
    for reward_name, reward in zip(config.reward_names, config.rewards, strict=True):
        label = f"reward {reward_name}"
        if reward.type == "model":
            of = AutoConfig.from_pretrained(
                adapter_base(reward.path) if is_adapter(reward.path) else reward.path,
                trust_remote_code=reward.trust_remote_code,
                num_labels=1,
            )
            with torch.device("meta"):
                classifier = AutoModelForSequenceClassification.from_config(of)
            kept = getattr(of, "dtype", None) or torch.float32
            kept = kept if reward.dtype == "auto" else getattr(torch, reward.dtype)
            roles.append(_role(label, reward.path, _count(classifier), 0, kept, "own weights"))
        elif reward.type == "adapter":
            roles.append(_role(label, reward.path, adapter + head, 0, torch.float32, "adapter on the base"))
        else:
            roles.append(RolePlan(label, f"{reward.path}:{reward.name}", 0, 0, "", "Python function", 0))
    return roles


def estimate_memory(
    config: RunConfig, roles: list[RolePlan], shape: PretrainedConfig, longest: int, *, bf16: bool
) -> dict[str, int]:
    """Estimated peak bytes while answering, scoring and updating, for queries of at most ``longest`` tokens."""
    text = shape.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = longest + config.sampling.response_length
    unit = 2 if bf16 else 4
    weights = sum(role.weight_bytes for role in roles)
    trainable = sum(role.trainable for role in roles)
    kept = weights + ADAM_BYTES * trainable
    rows, micro = min(config.sampling.batch_size, config.train.rollout_batch_size), config.train.micro_batch_size
    cache = rows * width * text.num_hidden_layers * 2 * heads * head_dim * unit
    chunk = 3 * LOGIT_CHUNK * text.vocab_size * 4
    layers = 2 if config.train.gradient_checkpointing else text.num_hidden_layers
    activations = micro * width * text.hidden_size * layers * ACTIVATION_FACTOR * unit // 2
    one_layer = micro * width * text.hidden_size * ACTIVATION_FACTOR * unit // 2
    return {
        "weights and optimizer": kept,
        "rollout": kept + cache + rows * text.vocab_size * 4 * 3,
        "log-probabilities and values": kept + one_layer + chunk,
        "update": kept + GRAD_BYTES * trainable + activations + chunk,
    }


def _role(role: str, source: str, parameters: int, trainable: int, dtype: torch.dtype, sharing: str) -> RolePlan:
    name = str(dtype).removeprefix("torch.")
    return RolePlan(role, source, parameters, trainable, name, sharing, parameters * BYTES.get(dtype, 4))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
