"""What a stage starts from: a tokenizer, and a full model or an adapter, which ``model.lora`` trains further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config import launched
from tether.config.model import ModelConfig
from tether.config.stage import StageConfig
from tether.errors import ConfigError
from tether.models.adapters import (
    Adapter,
    add_tokens,
    changed_config,
    check_continued,
    check_shareable,
    check_targets,
    grown,
    peft_lora_config,
    read_adapter,
    with_settings,
)
from tether.models.chat import check_template_kwargs, templated
from tether.models.classifiers import check_has_classifier
from tether.models.device import weight_dtype
from tether.models.fit import (
    check_language_model,
    check_tokens,
    check_trainable,
    has_few_bits,
    is_classifier,
    positions,
)
from tether.models.loading import load_config
from tether.models.paths import absolute_source, is_adapter, own_weights
from tether.models.preprocessing import read_processor
from tether.models.tokenizer import end_token_ids, load_generation_config, load_tokenizer


def origin(config: ModelConfig) -> dict[str, Any]:
    """Revision and remote-code setting of the model, as arguments of the functions that load it."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def load_templated(config: StageConfig) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """Loads the tokenizer with the chat template of the run; also returns the tokens that end an answer.

    Raises:
        ConfigError, ModelError: it cannot be loaded, does not fit the chat template, or has no end token.
    """
    model, data = config.model, config.data
    tokenizer = templated(load_tokenizer(model.path, **origin(model)), data.chat_template)
    check_template_kwargs(tokenizer, data.chat_template_kwargs)
    return tokenizer, end_token_ids(tokenizer, load_generation_config(model.path, revision=model.revision))


def check_fit(
    config: StageConfig,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[tuple[int, Sequence[int]]],
    kind: str,
    *,
    takes_classifier: bool,
) -> None:
    """Checks the data against the model's own configuration; loads no weights.

    Args:
        texts: row and token ids of every text of the run.
        kind: name of a text in messages.
        takes_classifier: whether the run trains a sequence classifier, and may start from one.

    Raises:
        ConfigError: a text has more tokens than the model has positions, or a token without an embedding; LoRA matches
            none of its modules; its weights are quantized and would be trained themselves, or sharded.
        ModelError: it is a classifier, and a language model is wanted; or the other way round, and there is no
            classifier of its kind.
    """
    model = config.model
    base, revision = own_weights(model.path, model.revision)
    shape = load_config(base, **origin(model) | {"revision": revision})
    if not takes_classifier:
        check_language_model(base, shape)
    check_trainable(model.path, shape, with_lora=model.lora is not None)
    if launched.uses_deepspeed() and has_few_bits(shape):
        raise ConfigError(
            f"model.path: {base} holds quantized weights, wanted none under ZeRO: they cannot be sharded. Launch the "
            "run with DDP"
        )
    limit = positions(shape)
    for row, ids in texts:
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"data.max_length {config.data.max_length}: the {kind} in row {row} has {len(ids)} tokens, the model "
                f"has {limit} positions. Set it to at most {limit}"
            )
    shape = grown(shape, model.path, model.revision)
    check_tokens(model.path, shape, tokenizer, ((kind, row, ids) for row, ids in texts))
    if base == model.path and not is_classifier(shape):
        if model.lora is not None:
            check_targets(model.lora, shape, trust_remote_code=model.trust_remote_code)
        if takes_classifier:
            check_has_classifier(shape, trust_remote_code=model.trust_remote_code)


def loading_options(config: ModelConfig, *, precision: torch.dtype | None, device: torch.device) -> dict[str, Any]:
    """How the model is loaded: in float32 if its weights are trained, in the autocast dtype if they are frozen.

    Args:
        precision: the autocast dtype of forward passes, None without autocast.
        device: where to load a base with quantized weights.
    """
    auto = (precision if config.lora is not None else None) or torch.float32
    return {
        "dtype": weight_dtype(config.dtype, auto),
        "attn_implementation": config.attn_implementation,
        "device": device,
    }


def start_adapter(config: ModelConfig) -> Adapter | None:
    """The adapter in ``model.path``, None if it holds a full model."""
    return read_adapter(config.path, config.revision) if is_adapter(config.path, config.revision) else None


def processor_of(config: ModelConfig, model: PreTrainedModel | PeftModel) -> dict[str, bytes]:
    """Files of the start model's processor that are saved with a full model; an adapter's base has its own."""
    return {} if config.lora is not None else read_processor(config.path, model.config, revision=config.revision)


def base_of(config: ModelConfig, start: Adapter | None) -> tuple[str, dict[str, Any]]:
    """Path and origin of what is loaded: the base of an adapter that is trained further, otherwise ``model.path``."""
    if start is None or config.lora is None:
        return config.path, origin(config)
    return start.config.base_model_name_or_path, origin(config) | {"revision": start.config.revision}


def with_lora(
    model: PreTrainedModel, config: ModelConfig, start: Adapter | None, *, task_type: str, kept: str | None = None
) -> PeftModel:
    """Adds a LoRA adapter to ``model``, with the configured settings, or with those of the adapter that is trained
    further, whose weights are not loaded yet.

    Args:
        kept: a module that is fully trained and saved with the adapter.

    Raises:
        ConfigError: ``model.lora`` does not fit the model, or the adapter that is trained further.
        ModelError: the adapter that is trained further changes its base.
    """
    path, of = base_of(config, start)
    if start is None:
        settings = peft_lora_config(config.lora, model)
    else:
        check_shareable(start)
        check_continued(config.lora, start, model)
        add_tokens(model, start)
        settings = start.config
    modules = [*(settings.modules_to_save or ()), *([kept] if kept else [])]
    changes = {"base_model_name_or_path": absolute_source(path), "revision": of["revision"], "inference_mode": False}
    settings = changed_config(settings, task_type=task_type, modules_to_save=modules or None, **changes)
    made = with_settings(model, settings, config.lora, start)
    for parameter in made.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()  # a copy of a full module; loss scaling needs float32 gradients
    return made
