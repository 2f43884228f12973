"""Reading adapter files and putting adapters on models. Only ``roles.py`` switches between a model's adapters."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import peft
import torch
from peft import (
    PeftConfig,
    PeftModel,
    PeftModelForCausalLM,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tether.config.model import LoraConfig
from tether.errors import ConfigError, ModelError
from tether.models.forward import state_size
from tether.models.heads import (
    ScalarHead,
    head_from,
    is_head_key,
    read_value_head,
    value_head_file,
)
from tether.models.layers import num_rows
from tether.models.paths import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_in_place,
    is_adapter,
    is_same_model,
    model_errors,
    some_of,
    stored_shapes,
)
from tether.models.products import with_plain_products, with_quick_products

DEFAULT = "default"
"""PEFT's name for the policy's adapter: the one that it saves at a folder's root."""
MODULE_PREFIX = "base_model.model."
"""The prefix that PEFT adds to the names of the adapted model's modules."""
NOT_LAYERS = {
    "ADALORA": "changes its ranks on its own schedule and cannot share its base while it trains",
    "ADAPTION_PROMPT": "puts virtual tokens into the attention",
    "POLY": "selects its weights by a task id, which prompts do not have",
    "SHADOW": "runs a second model beside the base",
    "XLORA": "selects its weights by an extra pass over every text",
}
"""PEFT methods that do more than change weights in a model's layers, and what they do."""
LINEAR = nn.Linear | Conv1D
"""Module types that ``all-linear`` selects."""
BYPASSED = {
    **dict.fromkeys(("mamba", "falcon_mamba"), ("dt_proj", "out_proj")),
    **dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h"), ("out_proj",)),
    "jamba": ("dt_proj",),
}
"""Linear modules that ``all-linear`` leaves out, by type of model: its code, or its fused kernel, reads their weights
without calling them, so that an adapter would not be applied. PEFT refuses one on ``out_proj``."""

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "lm_head", "embed_out")
"""Names of input and output embeddings in models."""

Config = TypeVar("Config", PeftConfig, PreTrainedConfig)


@dataclass(frozen=True)
class Adapter:
    """Contents of a PEFT adapter's files, with the scalar head of a reward adapter kept separate."""

    path: str
    """Folder or hub id."""
    config: PeftConfig
    """Its settings, with the head removed from ``modules_to_save``."""
    tensors: Mapping[str, Tensor]
    """Its weights under PEFT's names, without the head."""
    head: Mapping[str, Tensor]
    """The head's weights under the names of the adapted model; empty for the adapter of a language model."""


def read_adapter(path: str, revision: str | None = None) -> Adapter:
    """Reads a PEFT adapter's files.

    Raises:
        ModelError: the files do not exist or cannot be read.
    """
    with model_errors(path):
        config = PeftConfig.from_pretrained(path, revision=revision)
        tensors = load_peft_weights(path, device="cpu", revision=revision)
    bare = {name: name.removeprefix(MODULE_PREFIX) for name in tensors}
    head = {bare[name]: tensor for name, tensor in tensors.items() if is_head_key(bare[name])}
    rest = {name: tensor for name, tensor in tensors.items() if bare[name] not in head}
    kept = [m for m in getattr(config, "modules_to_save", None) or () if not is_head_key(f"{m}.weight")]
    if config.task_type == "SEQ_CLS":  # PEFT lists both possible names of a classifier's head
        kept = [module for module in kept if module != "classifier"]
    base = config.base_model_name_or_path and base_in_place(config.base_model_name_or_path, path)
    config = changed_config(config, modules_to_save=kept or None, base_model_name_or_path=base)
    return Adapter(path, config, rest, head)


def adapter_shapes(path: str, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """The shapes of a PEFT adapter's weights under PEFT's names, those of a head included. For local safetensors, only
    the header is read.

    Raises:
        ModelError: the files do not exist or cannot be read.
    """
    file = Path(path) / ADAPTER_WEIGHTS[0]
    with model_errors(path):
        if file.is_file():
            return stored_shapes(file)
        tensors = load_peft_weights(path, device="cpu", revision=revision)
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def merged(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """``model`` with the adapter merged into its weights.

    Raises:
        ModelError: the adapter does not fit the model, or is of a kind that cannot be merged.
    """
    add_tokens(model, adapter)
    _untie(model, adapter)
    with model_errors(adapter.path):
        adapted = with_adapter(model, changed_config(adapter.config, task_type=None))
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapter.config.peft_type.value
        raise ModelError(f"{adapter.path}: a {kind} adapter cannot be merged; wanted a LoRA adapter")
    place_adapter(adapted, DEFAULT, adapter)
    outer = model.get_output_embeddings()
    if _is_tied(adapter.config) and isinstance(outer, BaseTunerLayer):  # otherwise a shared weight is added to twice
        _separate(model, outer.base_layer)
    with model_errors(adapter.path):  # PEFT refuses some at the first layer that it cannot merge
        return adapted.merge_and_unload().eval()


def _untie(model: PreTrainedModel, adapter: Adapter) -> None:
    """Gives the output embeddings their own weights if they share the input's and the adapter changes one of the two.
    If PEFT was asked to tie them, it ties what it changes by itself."""
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    if outer is None or outer.weight is not inner.weight or _is_tied(adapter.config):
        return
    names = [name for name, module in model.named_modules() if module is inner or module is outer]
    changed = tuple(f".{name}.{what}" for name in names for what in ("lora_", "weight"))
    if any(part in key for key in adapter.tensors for part in changed):
        _separate(model, outer)


def _separate(model: PreTrainedModel, outer: nn.Module) -> None:
    """Gives the output embeddings their own weights."""
    outer.weight = nn.Parameter(outer.weight.detach().clone(), requires_grad=outer.weight.requires_grad)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _is_tied(config: PeftConfig) -> bool:
    """Whether the adapter's input embeddings are also its output embeddings if the base ties them."""
    return getattr(config, "ensure_weight_tying", False)


def num_tokens(shapes: Mapping[str, Sequence[int]]) -> int:
    """Number of rows of the full embeddings that an adapter contains, by its weights' shapes; 0 if it has none."""
    ends = tuple(f".{name}.weight" for name in EMBEDDINGS)
    return max((shape[0] for key, shape in shapes.items() if key.endswith(ends)), default=0)


def grown(shape: PreTrainedConfig, path: str, revision: str | None) -> PreTrainedConfig:
    """The model configuration with its vocabulary enlarged to that of the adapter in ``path``, if there is one."""
    if not is_adapter(path, revision):
        return shape
    changed = copy.deepcopy(shape)
    text = changed.get_text_config()
    text.vocab_size = max(text.vocab_size, num_tokens(adapter_shapes(path, revision)))
    return changed


def add_tokens(model: PreTrainedModel, adapter: Adapter) -> None:
    """Resizes the embeddings of ``model`` to the vocabulary that the adapter was trained with, if tokens were added to
    its base. The new rows are taken from the adapter.

    Raises:
        ModelError: the adapter does not have them in ``modules_to_save``.
    """
    size = num_tokens({name: tensor.shape for name, tensor in adapter.tensors.items()})
    before = num_rows(model)
    if size <= before:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    own = set(adapter.config.modules_to_save or ())
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    for module in (inner, outer):
        name = next((name for name, each in model.named_modules() if each is module), None)
        if name is None or (module is outer and module.weight is inner.weight and _is_tied(adapter.config)):
            continue
        given = adapter.tensors.get(f"{MODULE_PREFIX}{name}.weight")
        if given is None or len(given) != size or name.rpartition(".")[2] not in own:
            raise ModelError(
                f"{adapter.path}: was trained with {size} tokens, but its base has {before}, and {name} is not among "
                "its modules_to_save, so further training would lose the new tokens. Save the base with its tokens "
                f"added, and its embeddings as the adapter has them, as a folder, and name that as "
                f"base_model_name_or_path in {ADAPTER_CONFIG}; or merge the adapter with PEFT's AutoPeftModel"
            )
        with torch.no_grad():
            module.weight[before:] = given[before:]


def with_adapter(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Adds an adapter ``default`` to ``model`` in place, its weights initialized as the settings say.

    Raises:
        ValueError: the settings do not fit the model.
    """
    kind = PeftModelForCausalLM if config.task_type == "CAUSAL_LM" else PeftModel
    with warnings.catch_warnings():
        # PEFT reads a property that transformers 5.24 renamed; users cannot do anything about the warning.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        return with_quick_products(kind(with_plain_products(model), config, DEFAULT))


def with_settings(
    model: PreTrainedModel, settings: PeftConfig, lora: LoraConfig | None, start: Adapter | None
) -> PeftModel:
    """``with_adapter`` for the policy of a run.

    Args:
        lora: the configuration that the settings are from; needed without ``start``.
        start: the adapter that is trained further, whose settings they are; its weights are not loaded here.

    Raises:
        ConfigError: the configured settings do not fit the model.
        ModelError: those of the adapter do not.
    """
    if start is not None:
        with model_errors(start.path):
            return with_adapter(model, settings)
    try:
        return with_adapter(model, settings)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: got {lora.target_modules}: {error}") from error


def place_adapter(model: PeftModel, name: str, adapter: Adapter) -> None:
    """Loads the weights of ``adapter`` into the adapter ``name`` of ``model``.

    Raises:
        ModelError: a weight is missing, has no place, or has another shape.
    """
    wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    given = {key: x for key, x in adapter.tensors.items() if key in wanted or not _is_of_base(key, x, model)}
    missing, foreign = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    problems = [
        *([f"weights are missing: {some_of(missing)}"] if missing else []),
        *([f"weights have no place in {type(model.get_base_model()).__name__}: {some_of(foreign)}"] if foreign else []),
        *(
            f"{key} has shape {list(given[key].shape)}, wanted {list(wanted[key].shape)}"
            for key in sorted(wanted.keys() & given.keys())
            if given[key].shape != wanted[key].shape
        ),
    ]
    if problems:
        raise ModelError(f"{adapter.path}: the adapter does not fit its base model: {problems[0]}")
    set_peft_model_state_dict(model, given, adapter_name=name)


def _is_of_base(key: str, tensor: Tensor, model: PeftModel) -> bool:
    """Whether ``tensor`` is a copy of the base's own weights, which PEFT saves for embeddings that it adapts."""
    try:
        own = model.get_parameter(key)
    except AttributeError:
        return False
    return ".base_layer." in key and own.shape == tensor.shape and torch.equal(own.cpu(), tensor.to(own.dtype))


def peft_lora_config(lora: LoraConfig, model: PreTrainedModel) -> peft.LoraConfig:
    """PEFT's settings for a fresh adapter on ``model``."""
    leaves_some_out = lora.target_modules == "all-linear" and _bypassed(model)
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=sorted(target_names(model, "all-linear")) if leaves_some_out else lora.target_modules,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )


def without_casts(adapted: PeftModel) -> None:
    """Stops PEFT from converting the inputs of LoRA layers to the adapters' float32, for a model under autocast.

    Autocast would convert each copy back, and keep it for the gradient: the same numbers, with more work and memory.
    DoRA computes the norms of its weights in the type of its inputs, and is left alone.
    """
    for layer in adapted.modules():
        if type(layer) is LoraLinear and not layer.lora_variant:
            layer.cast_input_dtype_enabled = False


def adapter_parameters(model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter by name, including copies of full modules."""
    with flags_kept(model.parameters()):
        model.requires_grad_(False)
        model.set_requires_grad(adapter)
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def add_reward(model: PeftModel, name: str, path: str, base_source: str, *, float32: bool) -> ScalarHead:
    """Adds the reward adapter in ``path`` to the model as adapter ``name`` and returns its head.

    Raises:
        ModelError: it was trained on another base, does not fit it, or has no scalar head.
    """
    adapter = read_adapter(path)
    check_beside(path, adapter.config, next(iter(model.peft_config.values())).peft_type, base_source)
    head = head_from(reward_head(adapter), state_size(model.get_base_model()), path)
    config = changed_config(adapter.config, task_type="CAUSAL_LM", inference_mode=False)
    with model_errors(path):
        with_plain_products(model).add_adapter(name, config)
    with_quick_products(model)
    fill_adapter(model, name, adapter, float32=float32)
    return head


def check_beside(path: str, config: PeftConfig, own: peft.PeftType, base_source: str) -> None:
    """Raises ``ModelError`` if the reward adapter in ``path`` cannot share the policy's base with the policy's adapter.

    Args:
        config: the reward adapter's.
        own: PEFT method of the policy's adapter.
        base_source: the policy's base.
    """
    kind, base = config.peft_type, config.base_model_name_or_path or ""
    if kind != own:
        raise ModelError(
            f"{path}: got a {kind.value} adapter; wanted a {own.value} adapter, as the policy's is: one base carries "
            "adapters of one method. Use it as a reward of type model"
        )
    check_switched_off(path, config)
    if not is_same_model(base, base_source):
        raise ModelError(
            f"{path}: the reward adapter was trained on {base or 'an unnamed model'}, but the policy's base is "
            f"{base_source}. Adapters share one base: train the reward adapter on that base, or use it as a reward of "
            f"type model. If both are the same model, correct base_model_name_or_path in its {ADAPTER_CONFIG}"
        )


def reward_head(adapter: Adapter) -> Mapping[str, Tensor]:
    """The head's weights: from the adapter itself, or from a file beside it, as LLaMA-Factory saves them."""
    return adapter.head or (read_value_head(adapter.path) if value_head_file(adapter.path) else {})


def fill_adapter(model: PeftModel, name: str, adapter: Adapter, *, float32: bool) -> None:
    """Loads weights into an existing adapter.

    Args:
        float32: keeps copies of full modules, which PEFT leaves in the base's type, in float32; used with autocast.
    """
    if float32:
        for parameter in adapter_parameters(model, name).values():
            parameter.data = parameter.data.float()
    place_adapter(model, name, adapter)


def check_shareable(adapter: Adapter) -> None:
    """Raises ``ModelError`` if the adapter is not a LoRA adapter, or changes the base that other roles use."""
    if adapter.config.peft_type != peft.PeftType.LORA:
        raise ModelError(f"{adapter.path}: got a {adapter.config.peft_type.value} adapter; wanted a LoRA adapter")
    check_switched_off(adapter.path, adapter.config)


def check_switched_off(path: str, config: PeftConfig) -> None:
    """Raises ``ModelError`` if switching off the adapter in ``path`` does not give back its base."""
    kind = config.peft_type.value
    if config.is_prompt_learning or kind in NOT_LAYERS:
        why = NOT_LAYERS.get(kind, "puts virtual tokens before every text")
        raise ModelError(
            f"{path}: a {kind} adapter {why}; wanted one that is in the model's layers alone, such as LoRA, IA3, LoHa, "
            "LoKr, OFT or VeRA, so that its base can play the other roles"
        )
    bias, init = getattr(config, "bias", "none"), getattr(config, "init_lora_weights", None)
    changes = [
        *([f"bias={bias}"] if isinstance(bias, str) and bias != "none" else []),
        *([f"init_lora_weights={init}"] if _changes_base(init) else []),
    ]
    if changes:
        raise ModelError(
            f"{path}: an adapter with {changes[0]} changes the weights of its base, which other roles share. "
            "Convert it to a plain LoRA adapter, or merge it and give the merged folder"
        )


def check_tied(path: str, config: PeftConfig, shape: PreTrainedConfig) -> None:
    """Raises ``ModelError`` if the policy's adapter changes embeddings of a base of this shape and asks PEFT to tie
    them: PEFT only ties those of a model's first adapter, and other roles add adapters to the same base."""
    targets = config.target_modules if isinstance(config.target_modules, Iterable) else ()
    changed = {name.rpartition(".")[2] for name in (*targets, *(getattr(config, "modules_to_save", None) or ()))}
    is_asked = _is_tied(config) and shape.get_text_config().tie_word_embeddings
    if is_asked and changed & set(EMBEDDINGS):
        raise ModelError(
            f"{path}: an adapter with ensure_weight_tying that changes the embeddings cannot share its base with the "
            f"adapters of other roles. Merge it (`tether merge {path} -o DIR`), and name that folder as model.path"
        )


def _changes_base(init: bool | str | None) -> bool:
    return isinstance(init, str) and init.lower().startswith(("pissa", "olora", "corda", "loftq"))


def check_continued(lora: LoraConfig, start: Adapter, base: PreTrainedModel) -> None:
    """Raises ``ConfigError`` if ``model.lora`` does not match the adapter that is trained further.

    Only keys that the configuration sets are compared; all others are taken from the adapter.
    """
    config = start.config
    if config.peft_type != peft.PeftType.LORA:
        if lora.model_fields_set:
            kind = config.peft_type.value
            raise ConfigError(
                f"model.lora.{min(lora.model_fields_set)}: the adapter in {start.path} that is continued is a {kind} "
                "adapter, which keeps its settings; write `lora: {}`"
            )
        return
    pairs = {
        "r": (lora.r, config.r),
        "alpha": (lora.alpha, config.lora_alpha),
        "dropout": (lora.dropout, config.lora_dropout),
    }
    for key, (wanted, got) in pairs.items():
        if key in lora.model_fields_set and wanted != got:
            raise ConfigError(
                f"model.lora.{key}: {wanted}, but the adapter in {start.path} that is continued has {got}; "
                "leave the key out or set it to the adapter's"
            )
    if "target_modules" in lora.model_fields_set:
        wanted, got = (target_names(base, targets) for targets in (lora.target_modules, config.target_modules))
        if wanted != got:
            own = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules)
            raise ConfigError(
                f"model.lora.target_modules: {lora.target_modules}, but the adapter in {start.path} that is continued "
                f"targets {own}; leave the key out"
            )


def check_targets(lora: LoraConfig, shape: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Raises ``ConfigError`` if ``target_modules`` matches no module of a model of this shape, or one that PEFT cannot
    adapt; loads no weights."""
    key = "model.lora.target_modules"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=trust_remote_code)
    if not target_names(model, lora.target_modules):
        leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LINEAR)}
        raise ConfigError(
            f"{key}: {lora.target_modules} names no module of {type(model).__name__}; "
            f"its linear modules are {', '.join(sorted(leaves))}"
        )
    check_linear(model, lora.target_modules, key)
    way_out = _others(model, ())
    try:
        with torch.device("meta"):
            with_adapter(model, peft_lora_config(lora, model))
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        told = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{key}: {lora.target_modules}: PEFT cannot adapt {type(model).__name__}: {told}. {way_out}"
        ) from error


def check_linear(model: PreTrainedModel, targets: str | Iterable[str], key: str) -> None:
    """Raises ``ConfigError`` if ``target_modules`` matches a module that is of the type of a linear layer and computes
    something else, such as the router of some mixtures of experts, or one of ``BYPASSED``.

    Args:
        key: where ``targets`` come from, for the message.
    """
    modules = {name: model.get_submodule(name) for name in sorted(target_names(model, targets))}
    if unused := sorted(modules.keys() & _bypassed(model)):
        raise ConfigError(
            f"{key}: {targets} includes {unused[0]}, whose weight {type(model).__name__} also reads without calling "
            f"the module, so that an adapter on it would not be applied. {_others(model, unused)}"
        )
    odd = {name: module for name, module in modules.items() if not _is_product(module)}
    if odd:
        name, module = next(iter(odd.items()))
        raise ConfigError(
            f"{key}: {targets} includes {name}, a {type(module).__name__}, which is no plain linear layer, so that "
            f"PEFT cannot adapt it. {_others(model, odd)}"
        )


@torch.no_grad()
def _is_product(module: nn.Module) -> bool:
    """Whether a module gives one output for each row of its input, as its type promises to PEFT."""
    is_plain = not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward
    if is_plain or not module.weight.is_floating_point():  # PEFT knows the layers with few bits
        return True
    try:
        got = module(torch.zeros(1, module.in_features, device=module.weight.device, dtype=module.weight.dtype))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return isinstance(got, Tensor) and got.shape == (1, module.out_features)


def _others(model: PreTrainedModel, odd: Collection[str]) -> str:
    """What to write instead of targets that include the modules ``odd``, as a sentence."""
    every, left_out = ({name.rpartition(".")[2] for name in n} for n in (target_names(model, "all-linear"), odd))
    return f"Name others of its linear modules: [{', '.join(sorted(every - left_out))}]"


def linear_names(model: PreTrainedModel) -> set[str]:
    """Names of the bare model's linear modules, without its head."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))  # of a language model, of a classifier
    return {n for n, m in model.named_modules() if isinstance(m, LINEAR) and all(m is not head for head in heads)}


def _bypassed(model: PreTrainedModel) -> set[str]:
    """Those of them that are among ``BYPASSED``."""
    own = BYPASSED.get(model.config.get_text_config().model_type, ())
    return {name for name in linear_names(model) if name.rpartition(".")[2] in own}


def target_names(model: PreTrainedModel, targets: str | Iterable[str]) -> set[str]:
    """Names of the bare model's modules that match a PEFT ``target_modules``; ``all-linear`` leaves out
    ``BYPASSED``."""
    if targets == "all-linear":
        return linear_names(model) - _bypassed(model)
    names = {name for name, _ in model.named_modules()}
    if isinstance(targets, str):
        return {name for name in names if re.fullmatch(targets, name)}
    return {name for name in names if any(name == t or name.endswith(f".{t}") for t in targets)}


def changed_config(config: Config, **changes: Any) -> Config:
    """A copy of ``config`` with some fields changed."""
    changed = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


@contextmanager
def flags_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restores ``requires_grad`` of every parameter on exit."""
    flags = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
