"""Loads classifiers: decoders with a scalar head, and families that pool differently.

As in ``loading.py``, no weight is left at random: a head that a checkpoint lacks is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from safetensors import safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from tether.errors import ModelError
from tether.models.adapters import MODULE_PREFIX, Adapter, adapter_shapes, changed_config, merged, read_adapter
from tether.models.bitsandbytes import FewBits, placement, whole
from tether.models.fit import has_few_bits, is_classifier
from tether.models.forward import state_size
from tether.models.heads import (
    BESIDE_ADAPTER,
    HEAD_NAMES,
    VALUE_HEAD_FILES,
    ScalarHead,
    head_from,
    is_head_key,
    no_value_head,
    read_value_head,
    value_head_file,
)
from tether.models.loading import (
    cast,
    check_complete,
    check_full,
    from_pretrained,
    load_causal_lm,
    load_config,
)
from tether.models.paths import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL_WEIGHTS,
    downloaded,
    is_adapter,
    model_errors,
    own_weights,
    some_of,
    stored_shapes,
    weight_files,
)

POOLED_HEADS = ("classifier", "classification_head", "logits_proj")
"""Names of the heads of classifiers that do not pool at the last token."""
HEADS = ("score", *POOLED_HEADS)
"""Names of the heads of all classifiers."""
OUTPUT_MODULES = ("classifier", "logits_proj", "classifier.out_proj", "classification_head.out_proj")
"""The last layers of ``POOLED_HEADS``, with one row per label."""
OUTPUT_LAYERS = tuple(f"{name}.weight" for name in (*HEAD_NAMES, *OUTPUT_MODULES))
"""Weights of the last layers of all heads."""


def load_classifier(path: str, **options: Any) -> PreTrainedModel:
    """``load_reward_model`` for callers that need a decoder with a scalar head.

    Raises:
        ModelError: as ``load_reward_model``, or the model does not pool at the last token.
    """
    model = load_reward_model(path, **options)
    if not reads_last_token(model):
        raise ModelError(
            f"{path}: {type(model).__name__} has no head called score; wanted a decoder (GPT-2, Llama, Qwen2, …) "
            "trained as a sequence classifier"
        )
    return model


def load_reward_model(
    path: str,
    *,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    few_bits: FewBits | None = None,
    device: torch.device | str | None = None,
    label: int | str | None = None,
) -> PreTrainedModel:
    """Loads the sequence classifier with one label in ``path``, in eval mode; an adapter is merged into its base.

    A decoder's ``score`` is a float32 ``ScalarHead``. A head under another known name, or with a bias, is loaded
    completely. Other families (BERT, RoBERTa, DeBERTa, …) keep the pooling and the head of their class.

    Args:
        dtype: of the weights other than a decoder's head; None: as saved.
        few_bits: keeps the linear layers in 4 or 8 bits, on its device.
        device: for checkpoints saved as quantized weights; all others are loaded on the CPU.
        label: for a classifier with several labels, the only one to keep, by name or number.

    Raises:
        ModelError: it does not exist, has several labels or lacks ``label``, has no head or several, or has missing or
            unexpected weights; or it is an adapter and ``few_bits`` is given.
    """
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if few_bits is not None:
        check_full(path, revision, few_bits)
        options |= few_bits.options(heads=HEADS)
    if not is_adapter(path, revision):
        return _full_classifier(path, revision, dtype, options, device=device, label=label)
    adapter = read_adapter(path, revision)
    if label is None:
        return _adapted_classifier(adapter, dtype, options, device=device)
    every = _adapted_classifier(adapter, dtype, options, num_labels=_num_labels(adapter), device=device)
    return _with_one_label(every, label, path)


def _full_classifier(
    path: str,
    revision: str | None,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
    *,
    device: torch.device | str | None,
    label: int | str | None,
) -> PreTrainedModel:
    """The classifier of a full checkpoint, each of whose weights has its place."""
    config = load_config(path, revision=revision, trust_remote_code=options["trust_remote_code"])
    if label is None and is_classifier(config) and config.num_labels != 1:
        raise ModelError(f"{path}: got a classifier with {config.num_labels} labels; wanted one label (num_labels=1)")
    labels = 1 if label is None else config.num_labels
    where = {"revision": revision, **placement(config, device), **options}
    model, info = from_pretrained(
        AutoModelForSequenceClassification, path, dtype=dtype or "auto", num_labels=labels, **where
    )
    has_known_head = reads_last_token(model) and label is None
    heads = {name for name in info["unexpected_keys"] if is_head_key(name) and has_known_head}
    foreign = sorted(n for n in set(info["unexpected_keys"]) - heads if not _is_unused(n, model))
    if foreign:
        raise ModelError(f"{path}: holds weights that have no place in {type(model).__name__}: {some_of(foreign)}")
    check_complete(info, path, but={"score.weight"} if has_known_head else ())
    if label is not None:
        return _with_one_label(model, label, path)
    if not reads_last_token(model):
        return model
    tensors = read_tensors(path, heads, revision=revision)
    if "score.weight" not in info["missing_keys"]:
        tensors["score.weight"] = model.score.weight
    model.score = head_from(tensors, model.score.in_features, path)
    return model


def _with_one_label(model: PreTrainedModel, label: int | str, path: str) -> PreTrainedModel:
    """Reduces the classifier to one of its labels: the last layer of its head keeps only that label's row."""
    row = label_number(model.config, label, path)
    layers = dict(model.named_modules())
    name = next((n for n in ("score", *OUTPUT_MODULES) if isinstance(layers.get(n), torch.nn.Linear)), None)
    if name is None:
        raise ModelError(f"{path}: the head of {type(model).__name__} has no last layer with a row for each label")
    whole = layers[name]
    head = ScalarHead(whole.in_features, bias=whole.bias is not None)
    with torch.no_grad():
        head.weight.copy_(whole.weight[row : row + 1])
        if whole.bias is not None:
            head.bias.copy_(whole.bias[row : row + 1])
    model.set_submodule(name, head.to(whole.weight.device))
    model.config.num_labels = model.num_labels = 1
    return model


def label_number(config: PreTrainedConfig, label: int | str, path: str) -> int:
    """Number of a classifier's label.

    Raises:
        ModelError: it has no label with this name or number.
    """
    names = config.id2label
    found = [number for number, name in names.items() if label in (number, name)]
    if len(found) != 1:
        raise ModelError(
            f"{path}: has no label {label!r}; wanted one of {', '.join(f'{n} ({name})' for n, name in names.items())}"
        )
    return found[0]


def _is_unused(name: str, model: PreTrainedModel) -> bool:
    """Whether a weight has no part in the score: it belongs to a language model head, or to a pooler that this very
    class of transformers saved and does not use."""
    own_pooler = f"{model.base_model_prefix}.pooler."
    return name.startswith("lm_head.") or (
        name.startswith(own_pooler) and type(model).__name__ in (model.config.architectures or ())
    )


def load_merged_classifier(path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Loads the adapter in ``path``, merged into its base, as a sequence classifier of any family and number of labels,
    in eval mode and in the base's type.

    Raises:
        ModelError: the adapter does not fit its base, or holds no head.
    """
    adapter = read_adapter(path)
    options = {"trust_remote_code": trust_remote_code}
    return _adapted_classifier(adapter, None, options, num_labels=_num_labels(adapter))


def _num_labels(adapter: Adapter) -> int:
    """Number of labels of an adapter's classifier.

    Raises:
        ModelError: it holds no head, or several.
    """
    tensors = {name.removeprefix(MODULE_PREFIX): tensor for name, tensor in adapter.tensors.items()} | adapter.head
    outputs = [tensors[name] for name in OUTPUT_LAYERS if name in tensors]
    if len(outputs) != 1:
        raise ModelError(
            f"{adapter.path}: wanted an adapter with one head, {' or '.join(OUTPUT_LAYERS)}; got {len(outputs)}"
        )
    return outputs[0].shape[0]


def _adapted_classifier(
    adapter: Adapter,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
    *,
    num_labels: int = 1,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """The classifier of an adapter, merged into its base in float32, then cast."""
    base, code = adapter.config.base_model_name_or_path, {"trust_remote_code": options["trust_remote_code"]}
    of_base = {"dtype": torch.float32, "revision": adapter.config.revision, **options}
    shape = load_config(base, revision=adapter.config.revision, **code)
    dtype = dtype or shape.dtype or torch.float32
    if num_labels == 1 and _is_headed(adapter, base, shape, **code):
        model = classifier_on(whole(load_causal_lm(base, device=device, **of_base), base))
        return _with_head(cast(merged(model, adapter), dtype), adapter)
    model, info = from_pretrained(
        AutoModelForSequenceClassification, base, num_labels=num_labels, **placement(shape, device), **of_base
    )
    if not reads_last_token(model) or num_labels != 1:
        tensors = adapter.tensors | {f"{MODULE_PREFIX}{name}": tensor for name, tensor in adapter.head.items()}
        mine = {name.removeprefix(MODULE_PREFIX) for name in tensors}
        others = [each for each in info["mismatched_keys"] if each[0] not in mine]
        check_complete({**info, "mismatched_keys": others}, base, but=mine)
        heads = {name.partition(".")[0] for name in mine} & set(HEADS)
        kept = [*(adapter.config.modules_to_save or ()), *sorted(heads)]
        settings = changed_config(adapter.config, modules_to_save=kept)
        return cast(merged(whole(model, base), replace(adapter, config=settings, tensors=tensors)), dtype)
    check_complete(info, base, but={"score.weight"})
    return _with_head(cast(merged(whole(model, base), adapter), dtype), adapter)


def _is_headed(adapter: Adapter, base: str, shape: PreTrainedConfig, *, trust_remote_code: bool) -> bool:
    """Whether the adapter's classifier is a head on its base's language model, as ``tether reward`` trains one, rather
    than transformers' classifier for the base, which has another trunk (the full multimodal model instead of its text
    model) or would quantize its missing head.
    """
    if is_classifier(shape):
        return False
    classifier = _empty(shape, base, trust_remote_code=trust_remote_code)
    leaves = tuple(f"{name}." for name, module in classifier.named_modules() if next(module.children(), None) is None)
    has_place = all(name.removeprefix(MODULE_PREFIX).startswith(leaves) for name in adapter.tensors)
    return reads_last_token(classifier) and (has_few_bits(shape) or not has_place)


def _with_head(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """Gives the classifier the adapter's head, in float32."""
    model.score = head_from(adapter.head, model.score.in_features, adapter.path)
    return model


def check_classifier(
    path: str,
    key: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    label: int | str | None = None,
    label_key: str | None = None,
) -> None:
    """Raises ``ModelError`` if a model is not a classifier with one label, or an adapter has no head; loads no weights.

    For a model on the hub, only the configuration is checked.

    Args:
        key: the configuration key of ``path``, for the message.
        label: for a classifier with several labels, the one that is kept.
        label_key: the configuration key of ``label``; None if there is none.
    """
    folder = Path(path)
    if (beside := value_head_file(folder)) is not None:
        raise ModelError(
            f"{key}: {path} keeps its head in {beside.name}, as LLaMA-Factory and TRL do; wanted a model with a head "
            "of its own. To use it as a reward, set type value_head"
        )
    if is_adapter(path, revision):
        check_adapter_head(path, key, revision, num_labels=None if label is not None else 1)
        return
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    shapes = _shapes(folder)
    if label is not None:
        label_number(config, label, f"{label_key}: {path}")
    else:
        outputs = [shapes[name][0] for name in OUTPUT_LAYERS if name in shapes]
        count = outputs[0] if outputs else config.num_labels if is_classifier(config) else 1
        if count != 1:
            names = ", ".join(map(str, config.id2label.values()))
            way_out = "" if label_key is None else f", or {label_key}, the label whose logit is the score: {names}"
            raise ModelError(
                f"{key}: {path} is a classifier with {count} labels; wanted one label (num_labels=1){way_out}"
            )
    if shapes and not _has_head(shapes):
        raise ModelError(
            f"{key}: {path} holds no scalar head; wanted a model trained as a sequence classifier with num_labels=1"
        )


def check_adapter_head(path: str, key: str, revision: str | None = None, *, num_labels: int | None = 1) -> None:
    """Raises ``ModelError`` if an adapter has no head, by its weights, or by its settings if those are not local.

    Args:
        num_labels: what its head must have, if its weights are local; None for any number.
    """
    with model_errors(path):
        settings = PeftConfig.from_pretrained(path, revision=revision)
    is_here = (Path(path) / ADAPTER_WEIGHTS[0]).is_file()
    shapes = adapter_shapes(path) if is_here else {}
    names = [name.removeprefix(MODULE_PREFIX) for name in shapes]
    counts = [shapes[name][0] for name in shapes if name.removeprefix(MODULE_PREFIX) in OUTPUT_LAYERS]
    if num_labels is not None and counts and counts[0] != num_labels:
        raise ModelError(
            f"{key}: {path} is the adapter of a classifier with {counts[0]} labels; wanted one label (num_labels=1)"
        )
    kept = names or [f"{name}.weight" for name in getattr(settings, "modules_to_save", None) or ()]
    is_known = bool(names) or settings.task_type not in ("SEQ_CLS", None)
    if is_known and not _has_head(kept):
        raise ModelError(
            f"{key}: {path} is an adapter without a head (task_type {settings.task_type}); wanted the adapter of a "
            "sequence classifier with one label, which brings its head"
        )


def _has_head(names: Iterable[str]) -> bool:
    """Whether the names of weights include a classifier's head, of any family."""
    return any(is_head_key(name) or name.partition(".")[0] in POOLED_HEADS for name in names)


def reads_last_token(model: PreTrainedModel) -> bool:
    """Whether the classifier is a decoder, whose head reads the state of the last token."""
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


def empty_classifier(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The classifier in ``path``, or on the base of the adapter there, without weights."""
    base, at = own_weights(path, revision)
    config = load_config(base, revision=at, trust_remote_code=trust_remote_code)
    return _empty(config, path, trust_remote_code=trust_remote_code)


def _empty(config: PreTrainedConfig, source: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The classifier of a configuration, without weights; ``source`` names it in messages."""
    with model_errors(source), torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)


def load_value_head_model(
    path: str, *, revision: str | None = None, **options: Any
) -> tuple[PreTrainedModel, ScalarHead]:
    """Loads the language model in ``path`` and the value head beside it, as LLaMA-Factory saves reward models.

    The folder holds a full causal language model, or a PEFT adapter of one, and ``value_head.safetensors`` or
    ``value_head.bin`` with ``v_head.summary.weight`` and ``v_head.summary.bias``. Beside an adapter, the file may also
    be ``pytorch_model.bin``, as TRL saves models with a value head.

    Args:
        options: as ``load_causal_lm`` takes them.

    Raises:
        ModelError: the model or its head is missing, or they do not fit together.
    """
    files = (*VALUE_HEAD_FILES, *((ADAPTER_CONFIG, BESIDE_ADAPTER) if is_adapter(path, revision) else ()))
    head = read_value_head(downloaded(path, revision, files))
    model = load_causal_lm(path, revision=revision, **options)
    return model, head_from(head, state_size(model), path)


def check_value_head(path: str, key: str) -> None:
    """Raises ``ModelError`` if a local folder has no value head beside its model.

    Args:
        key: the configuration key of ``path``, for the message.
    """
    folder = Path(path)
    if not folder.is_dir() or value_head_file(folder) is not None:
        return
    if any(map(is_head_key, _shapes(folder))):
        raise ModelError(f"{key}: {path} holds its head among its own weights; use type model")
    raise ModelError(f"{key}: {no_value_head(folder)}")


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a folder's safetensors files, by name."""
    with model_errors(str(folder)):
        files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
        return {name: shape for file in files for name, shape in stored_shapes(file).items()}


def classifier_of(config: PreTrainedConfig, name: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The sequence classifier with one label for language models of a configuration, without weights.

    Args:
        name: the language model's class, for messages.

    Raises:
        ModelError: transformers has no such classifier, or one that does not read the last token.
    """
    config = changed_config(config, num_labels=1)
    wanted = "reward models and separate critics are. A critic may also be a head on the policy: value.kind head"
    auto = AutoModelForSequenceClassification.__name__
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and auto not in getattr(config, "auto_map", {}):
        raise ModelError(f"{name}: there is no sequence classifier of this kind, as {wanted}")
    classifier = _empty(config, name, trust_remote_code=trust_remote_code)
    if not reads_last_token(classifier):
        raise ModelError(f"{name}: {type(classifier).__name__} is no decoder with a head called score, as {wanted}")
    return classifier


def check_has_classifier(shape: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """``classifier_of`` for a language model that is not loaded yet. One within a model of texts and images is left to
    ``classifier_on``: which part of the configuration is its own is known when it is loaded.

    Raises:
        ModelError: as ``classifier_of``.
    """
    if shape.get_text_config() is shape:
        names = [*(shape.architectures or ()), f"a {shape.model_type} model"]
        classifier_of(shape, names[0], trust_remote_code=trust_remote_code)


def classifier_on(model: PreTrainedModel) -> PreTrainedModel:
    """A sequence classifier with one label on the trunk of a causal language model; its head always outputs 0.

    Raises:
        ModelError: transformers has no classifier for this kind of model.
    """
    name, own_code = type(model).__name__, getattr(model.config, "auto_map", {})  # already trusted: the model is loaded
    classifier = classifier_of(model.config, name, trust_remote_code=bool(own_code))
    if type(classifier.base_model) is not type(model.base_model):
        raise ModelError(f"{name} and {type(classifier).__name__} have different trunks: use value.kind head")
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    classifier.score = ScalarHead(classifier.score.in_features)
    return classifier.eval()


def read_tensors(path: str, names: Iterable[str], *, revision: str | None = None) -> dict[str, Tensor]:
    """Reads the named tensors of a full model's checkpoint; names that it does not hold are left out."""
    wanted = set(names)
    if not wanted:
        return {}
    folder = downloaded(path, revision, MODEL_WEIGHTS)
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_tensor(name) for name in wanted & set(tensors.keys())}
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
            found |= {name: tensors[name] for name in wanted & tensors.keys()}
    return found
