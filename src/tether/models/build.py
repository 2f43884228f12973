"""Loads the roles of a run, sharing weights as its configuration says."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from peft import PeftModel, PeftType
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config.schema import COPIED, RunConfig
from tether.errors import ConfigError, ModelError
from tether.models.adapters import (
    DEFAULT,
    adapter_parameters,
    add_reward,
    add_tokens,
    changed_config,
    check_continued,
    check_switched_off,
    check_tied,
    fill_adapter,
    grown,
    peft_lora_config,
    read_adapter,
    with_settings,
)
from tether.models.bitsandbytes import FewBits, is_quantized
from tether.models.classifiers import (
    check_adapter_head,
    classifier_on,
    empty_classifier,
    load_classifier,
    reads_last_token,
)
from tether.models.compiled import compile_layers
from tether.models.device import weight_dtype
from tether.models.fit import without_row
from tether.models.forward import check_causal, head_matches, state_size
from tether.models.heads import ScalarHead, value_head_file, with_bias
from tether.models.layers import num_rows, parameters_above
from tether.models.loading import load_causal_lm, load_config
from tether.models.paths import ADAPTER_CONFIG, absolute_source, is_adapter, own_weights
from tether.models.preprocessing import read_processor
from tether.models.roles import OFF, POLICY, REFERENCE, VALUE, ModelRoles, Role
from tether.models.rounding import frozen_copy
from tether.models.tokenizer import configured_ends, load_tokenizer


@dataclass(frozen=True)
class CriticSource:
    """A sequence classifier or a reward adapter that a critic is copied from."""

    path: str
    """Folder or hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with it."""
    label: int | str | None = None
    """For a classifier with several labels, the one whose logit is copied."""
    is_reward: bool = False
    """Whether it is the first reward source rather than a path in ``value.init``."""


def build_roles(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device | str,
    autocast_dtype: torch.dtype | None,
) -> ModelRoles:
    """Loads policy, reference and critic, sharing weights as configured. Reward adapters are added afterwards.

    Fresh adapters and heads depend on ``train.seed`` alone; the global random state is not changed.

    Args:
        tokenizer: the policy's.
        autocast_dtype: the autocast dtype of forward passes, None without autocast.

    Raises:
        ConfigError, ModelError: a path does not hold what its role needs, or two settings are incompatible.
    """
    source = critic_source(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        if config.model.lora is None:
            roles, adapted = _full_roles(config, autocast_dtype), None
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
    processor = None
    if adapted is None:  # with an adapter, the base has the processor's files
        processor = read_processor(config.model.path, policy.model.config, revision=config.model.revision)
    models = ModelRoles(
        roles,
        adapted=adapted,
        base_source=_base_source(config),
        tokenizer=tokenizer,
        device=device,
        autocast_dtype=autocast_dtype,
        detach_value=config.value.detach,
        offload_idle=config.train.offload_idle_roles,
        processor=processor,
    )
    return finished(models, config)


def finished(models: ModelRoles, config: RunConfig) -> ModelRoles:
    """Applies ``train.compile`` and ``train.gradient_checkpointing`` to the roles, and checks that they are causal.

    Raises:
        ModelError: one of the models also reads the tokens after a token.
    """
    if config.train.compile:
        for model in {role.model for role in models.all}:
            compile_layers(model)
    models.gradient_checkpointing(config.train.gradient_checkpointing)
    with models.use(POLICY) as model:
        head_matches(model)  # tested now, not in the middle of a pass
    for name in {role.model: role.name for role in models.all}.values():
        with models.use(name) as model:
            check_causal(model)
    models.make_copy_exact()
    return models


def _full_roles(config: RunConfig, autocast_dtype: torch.dtype | None) -> list[Role]:
    path = config.model.path
    model = _load_policy(config, path, weight_dtype(config.model.dtype, torch.float32), config.model.revision)
    trained = parameters_above(model, config.model.freeze_layers)
    roles = [Role(POLICY, model, path, "own weights", trained=trained)]
    if config.ppo.kl_coef > 0:
        roles.append(Role(REFERENCE, frozen_copy(model, autocast_dtype), path, "frozen copy", copies_policy=True))
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
    # Beside quantized layers, norms and heads are float32, as in QLoRA.
    dtype = weight_dtype(config.model.dtype, compute_dtype if bits is None else torch.float32)
    few_bits = None if bits is None else FewBits(bits, torch.device(device), compute_dtype)
    revision = config.model.revision if start is None else start.config.revision
    base = _load_policy(config, base_source, dtype, revision, few_bits, device)
    if start is None:
        settings = changed_config(peft_lora_config(lora, base), base_model_name_or_path=base_source, revision=revision)
    else:
        check_continued(lora, start, base)
        check_tied(path, start.config, base.config)
        add_tokens(base, start)
        settings = changed_config(
            start.config, base_model_name_or_path=base_source, task_type="CAUSAL_LM", inference_mode=False
        )
    adapted = with_settings(base, settings, lora, start)
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
    """A second adapter on the policy's base with a head: a copy of a reward adapter, or a fresh one that outputs 0."""
    if source is None:
        own = adapted.peft_config[DEFAULT]
        fresh = {"init_lora_weights": True} if own.peft_type == PeftType.LORA else {}
        settings = changed_config(own, modules_to_save=None, inference_mode=False, **fresh)
        adapted.add_adapter(VALUE, settings)
        head = ScalarHead(state_size(policy.model))
    else:
        head = add_reward(adapted, VALUE, source.path, _base_source(config), float32=autocast_dtype is not None)
        head = _critic_head(config, source, head)
    trained = adapter_parameters(adapted, VALUE) | _head_parameters(head)
    where, is_copy = ("new adapter", False) if source is None else (source.path, source.is_reward)
    return Role(VALUE, policy.model, where, "adapter on the policy's base", VALUE, head, trained, is_copy)


def _model_critic(
    config: RunConfig, source: CriticSource | None, policy: Role, tokenizer: PreTrainedTokenizerBase
) -> Role:
    """A separate sequence classifier: a copy of a reward model, or of the start policy with a head that outputs 0."""
    dtype = torch.float32 if config.model.lora else weight_dtype(config.model.dtype, torch.float32)
    where = config.model.path if source is None else source.path
    if source is not None:
        model = load_classifier(
            source.path,
            dtype=dtype,
            revision=source.revision,
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=source.trust_remote_code,
            label=source.label,
        )
    elif config.model.lora is None:
        model = copy.deepcopy(policy.model)
    else:
        model = _load_policy(config, config.model.path, dtype, config.model.revision)
    if is_quantized(model):
        raise ConfigError(
            f"value.kind model: {where} holds quantized weights, which a critic of its own cannot train; set "
            "value.kind to adapter or head, or value.init to another model"
        )
    if source is None:
        model = classifier_on(model)
    else:
        model.score = _critic_head(config, source, model.score)
    pad_as(model, tokenizer)
    trained, is_copy = dict(model.named_parameters()), source is not None and source.is_reward
    return Role(VALUE, model, where, "own weights", head=model.score, trained=trained, copies_reward=is_copy)


def _critic_head(config: RunConfig, source: CriticSource, head: ScalarHead) -> ScalarHead:
    """The head of a copied critic, with a bias if the scores of its source get shifted; 0 until the shift is known."""
    shifts = config.ppo.score_norm is not None or config.rewards[0].norm is not None or len(config.rewards) > 1
    return with_bias(head) if source.is_reward and shifts else head


def pad_as(classifier: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a classifier without a pad token one, which plain transformers needs to score several rows at once: the
    tokenizer's if the model has an embedding for it, otherwise the end token. It is stored in the text model's config.
    """
    settings, pad = classifier.config.get_text_config(), tokenizer.pad_token_id
    if getattr(settings, "pad_token_id", None) is None:
        has_row = pad is not None and pad < num_rows(classifier)
        settings.pad_token_id = pad if has_row else tokenizer.eos_token_id


def critic_source(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> CriticSource | None:
    """What the critic is copied from, or None if it starts from the policy or there is no critic.

    Raises:
        ConfigError: ``value.init`` names something that this kind of critic cannot be copied from.
    """
    kind, init = config.value_kind, config.value.init
    if kind in (None, "head") or init == "policy":
        return None
    if init in (None, "reward"):
        reward = config.rewards[0]
        if reward.type not in COPIED[kind]:
            return None
        origin = reward.model_dump(include={"revision", "trust_remote_code", "label"})
        source = CriticSource(reward.path, **origin, is_reward=True)
        why_not = _no_critic(source, config, tokenizer) if kind == "model" else None
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
    if kind == "adapter" and value_head_file(init) is None:
        check_adapter_head(init, "value.init")
    source = CriticSource(init, trust_remote_code=config.model.trust_remote_code)
    if kind == "model" and (why_not := _no_critic(source, config, tokenizer)):
        raise ConfigError(f"value.init: {why_not}; set value.init to policy")
    return source


def _no_critic(source: CriticSource, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why the model cannot give a value for each of the policy's tokens, or None if it can."""
    origin = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
    if load_tokenizer(source.path, **origin).get_vocab() != tokenizer.get_vocab():
        return (
            f"the tokenizer of {source.path} has a different vocabulary than the policy's, whose token ids the critic "
            "reads"
        )
    if not reads_last_token(empty_classifier(source.path, **origin)):
        return f"{source.path} is not a decoder, whose states know only the tokens before them"
    lacks = without_row(tokenizer, num_embeddings(source.path, **origin), policy_embeddings(config))
    return None if lacks is None else f"{source.path} has {lacks}"


def policy_embeddings(config: RunConfig) -> int:
    """``num_embeddings`` of the policy."""
    model = config.model
    return num_embeddings(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)


def num_embeddings(path: str, *, revision: str | None, trust_remote_code: bool) -> int:
    """Number of tokens that the model in ``path``, or the adapter's base with it, has embeddings for, by its
    configuration."""
    base, at = own_weights(path, revision)
    shape = load_config(base, revision=at, trust_remote_code=trust_remote_code)
    return grown(shape, path, revision).get_text_config().vocab_size


def check_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ``ModelError`` if an end token has no embedding. A pad token needs none: pads never reach the model."""
    rows = num_rows(model)
    ends = ({tokenizer.eos_token_id} - {None}) | configured_ends(model.generation_config)
    if beyond := sorted(token for token in ends if not 0 <= token < rows):
        raise ModelError(
            f"model.path: end token {beyond[0]} is outside of the model's vocabulary of {rows} tokens; "
            "the tokenizer or the generation config belongs to another model"
        )


def _load_policy(
    config: RunConfig,
    path: str,
    dtype: torch.dtype,
    revision: str | None,
    few_bits: FewBits | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Loads a language model with the options of ``model``."""
    return load_causal_lm(
        path,
        dtype=dtype,
        revision=revision,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        few_bits=few_bits,
        device=device,
    )


def _base_source(config: RunConfig) -> str:
    path, revision = config.model.path, config.model.revision
    return absolute_source(own_weights(path, revision)[0])


def _head_parameters(head: ScalarHead) -> dict[str, nn.Parameter]:
    return {f"head.{name}": parameter for name, parameter in head.named_parameters()}
