"""From a path to a tokenizer or a model. Nothing is ever left at random: a weight that a checkpoint lacks is an error.

A path is a folder or a hub id. It holds a full model, or a PEFT adapter, which is loaded on the base model that it
names and merged into it; adapters that stay adapters are the business of ``roles.py``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from tether.config.schema import TrainConfig
from tether.config.source import SourceConfig
from tether.config.stage import StageTrainConfig
from tether.errors import ConfigError, ModelError
from tether.models.adapters import MODULE_PREFIX, Adapter, changed_config, merged, read_adapter
from tether.models.bitsandbytes import FewBits, is_quantized, keep_differentiable, placement, whole
from tether.models.chat import turn_end
from tether.models.fit import has_few_bits, is_classifier
from tether.models.gguf import gguf_source, own_tokens, plain_config, plain_model
from tether.models.heads import (
    HEAD_NAMES,
    VALUE_HEAD_FILES,
    ScalarHead,
    head_from,
    is_head_key,
    no_value_head,
    read_value_head,
    state_size,
    value_head_file,
)
from tether.models.paths import (
    MODEL_WEIGHTS,
    downloaded,
    is_adapter,
    model_errors,
    own_weights,
    some_of,
    weight_files,
)
from tether.models.processor import is_intel
from tether.models.products import with_quick_products

POOLED_HEADS = ("classifier", "classification_head", "logits_proj")
"""What the heads of classifiers are called whose families pool otherwise than at the last token."""
HEADS = ("score", *POOLED_HEADS)
"""The same, and that of the others."""
OUTPUT_LAYERS = (
    *(f"{name}.weight" for name in (*HEAD_NAMES, "classifier", "logits_proj")),
    "classifier.out_proj.weight",
    "classification_head.out_proj.weight",
)
"""The last layers of classifiers' heads, with a row for each label."""
MISTRAL = "MistralCommonBackend"
"""transformers' class around mistral-common's tokenizers."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")

# Devices


def default_device() -> torch.device:
    """The accelerator of this machine, or else the CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def bf16_supported(device: torch.device | str) -> bool:
    """Whether the hardware multiplies bfloat16 matrices faster than float32 ones, so that bf16 autocast saves time.

    Of CPUs these are such with AMX, and such with AVX512-BF16 that are not Intel's: on an AMD EPYC (Zen 5) bfloat16 is
    1.9 times as fast, on an Intel Xeon whose AMX is not at hand half as fast.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind == "cpu":
        abilities = torch.cpu.get_capabilities()
        return bool(abilities.get("amx_bf16") or (abilities.get("avx512_bf16") and not is_intel()))
    return False


def half_dtype(keys: TrainConfig | StageTrainConfig | SourceConfig, device: torch.device | str) -> torch.dtype | None:
    """The type that ``keys`` ask for forwards to run in under autocast; None for that of the weights.

    Args:
        device: says whether it is bfloat16 where they leave ``bf16`` out.
    """
    if keys.fp16:
        return torch.float16
    is_bf16 = bf16_supported(device) if keys.bf16 is None else keys.bf16
    return torch.bfloat16 if is_bf16 else None


# Tokenizers


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or that of its base for an adapter that brings none.

    It is left as it is: pads never reach a model here, so a tokenizer needs no pad token.
    """
    code, is_local = {"trust_remote_code": trust_remote_code}, Path(path).exists()
    brings_none = is_local and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES)
    if brings_none and is_adapter(path):
        base, at = own_weights(path)
        return load_tokenizer(base, revision=at, **code)
    place, file = _place(path)
    options = {"revision": revision, **code, **file}
    with model_errors(path):
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
        except OSError:
            if is_local or not is_adapter(path, revision):
                raise
            base, at = own_weights(path, revision)
            return load_tokenizer(base, revision=at, **code)
    if type(tokenizer).__name__ == MISTRAL:
        tokenizer = _without_mistral_common(path, options)
    if not file:
        return tokenizer
    return own_tokens(tokenizer, load_config(path, revision=revision).get_text_config().vocab_size)


def _without_mistral_common(path: str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer in ``path`` from the files that transformers reads without mistral-common.

    Where that package is installed, which vLLM brings, transformers takes its tokenizer for every model that has a
    tekken.json; that one has no chat template, and tells none of its special tokens.

    Raises:
        ModelError: there are no such files, or this release of transformers does not let one choose.
    """
    try:
        with model_errors(path):
            tokenizer = AutoTokenizer.from_pretrained(path, mistral_format=False, **options)
    except ModelError as error:
        raise ModelError(
            f"{path}: its tokenizer is in tekken.json, for mistral-common, and cannot be had without it ({error}); "
            "wanted tokenizer.json and tokenizer_config.json beside it, with a chat template: add those of a copy of "
            "the model in the format of transformers"
        ) from error
    if type(tokenizer).__name__ == MISTRAL:
        raise ModelError(
            f"{path}: transformers reads its tokenizer by mistral-common, which has no chat template. Take the model "
            "from a folder without tekken.json, uninstall mistral-common, or update transformers"
        )
    return tokenizer


def load_generation_config(path: str, *, revision: str | None = None) -> GenerationConfig | None:
    """What came with the model in ``path`` about generation, or with the base of the adapter there, if anything."""
    for place, at in dict.fromkeys([(path, revision), own_weights(path, revision)]):
        try:
            return GenerationConfig.from_pretrained(_place(place)[0], revision=at)
        except OSError:
            continue
    return None


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None, stop_token: str | None
) -> frozenset[int]:
    """Tokens that end an answer.

    Args:
        generation_config: the policy's; its end tokens count beside the tokenizer's and the chat template's.
        stop_token: ``sampling.stop_token``: ``eos``, one token, or None for no end but the length.

    Raises:
        ConfigError: ``stop_token`` is not one token, or the model has no end token.
    """
    if stop_token is None:
        return frozenset()
    if stop_token != "eos":
        return frozenset({_token_id(tokenizer, stop_token)})
    configured = getattr(generation_config, "eos_token_id", None)
    ends = {configured} if isinstance(configured, int) else set(configured or ())
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    if (closing := turn_end(tokenizer)) is not None:
        ends.add(closing)
    if not ends:
        raise ConfigError(
            "sampling.stop_token eos: neither the model's generation config nor its tokenizer has an end token; "
            "set sampling.stop_token to the token that ends an answer, or to null"
        )
    return frozenset(ends)


def end_at(model: PreTrainedModel | PeftModel, stops: Collection[int]) -> None:
    """Makes the model's generation config end answers at all of these tokens, also after it was saved and loaded.

    One that says how to sample and not that it samples, which transformers does not save once it was changed, samples.
    """
    generation = model.generation_config
    configured = generation.eos_token_id
    ends = {configured} if isinstance(configured, int) else set(configured or ())
    if not ends >= set(stops):
        generation.eos_token_id = sorted(ends | set(stops))
        try:
            generation.validate(strict=True)
        except ValueError:
            generation.do_sample = True


def _token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    vocabulary = tokenizer.get_vocab()
    if text in vocabulary:
        return vocabulary[text]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ConfigError(
            f"sampling.stop_token {text!r}: got {tokenizer.convert_ids_to_tokens(ids)} from the tokenizer, wanted one "
            "token of its vocabulary"
        )
    return ids[0]


# Models


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype | None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    few_bits: FewBits | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """The language model in ``path``, in eval mode; an adapter is merged into its base in float32, then cast.

    Args:
        dtype: of the weights; None: as saved.
        few_bits: holds the linear layers in 4 or 8 bits, on their device.
        device: where weights go that are saved in few bits; all others wait on the CPU for the caller.

    Raises:
        ModelError: it is not there, is a classifier, or some of its weights are missing; or it is an adapter, and
            ``few_bits`` are asked for.
    """
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if few_bits is not None:
        _check_full(path, revision, few_bits)
        options |= few_bits.options()
    if is_adapter(path, revision):
        adapter = read_adapter(path, revision)
        if adapter.head:
            raise ModelError(f"{path}: got a reward adapter (it holds a head); wanted the adapter of a language model")
        base, at = own_weights(path, revision)
        of_base = {"dtype": torch.float32, "revision": at}
        model = merged(whole(load_causal_lm(base, device=device, **of_base, **options), base), adapter)
        return _cast(model, dtype or _saved_dtype(adapter, trust_remote_code))
    if gguf_source(path) is not None:
        return _dequantised(path, dtype or torch.float32, revision, options)
    shape = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    if is_classifier(shape):
        raise ModelError(f"{path}: got a sequence classifier; wanted a causal language model")
    options = placement(shape, device) | options
    model, info = _from_pretrained(AutoModelForCausalLM, path, dtype=dtype or "auto", revision=revision, **options)
    _check_complete(info, path)
    return model


def _dequantised(path: str, dtype: torch.dtype, revision: str | None, options: Mapping[str, Any]) -> PreTrainedModel:
    """The language model in a GGUF file: de-quantised in float32, then cast."""
    if options.get("quantization_config") is not None:
        raise ModelError(
            f"{path}: a GGUF file is de-quantised as it is read, and bitsandbytes reads model folders; give the model "
            "as a folder: its own, or the one that a run with LoRA writes to `base` in its output_dir"
        )
    place, file = _place(path)
    model, info = _from_pretrained(
        AutoModelForCausalLM, place, dtype=torch.float32, revision=revision, **file, **options
    )
    _check_complete(info, path)
    return _cast(plain_model(model, options["attn_implementation"]), dtype)


def _place(path: str) -> tuple[str, dict[str, str]]:
    """What ``from_pretrained`` is given for ``path``: the folder or hub id, and the file there if it is in GGUF."""
    source = gguf_source(path)
    return (path, {}) if source is None else (source.folder, {"gguf_file": source.file})


def load_classifier(path: str, **options: Any) -> PreTrainedModel:
    """The decoder with a scalar head in ``path``, as ``load_reward_model`` gives it, for callers that need one.

    Raises:
        ModelError: as ``load_reward_model``, or it is of a family that pools otherwise than at the last token.
    """
    model = load_reward_model(path, **options)
    _check_decoder(model, path)
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
) -> PreTrainedModel:
    """The sequence classifier with one label in ``path``, in eval mode; an adapter is merged into its base.

    A decoder's ``score`` is a float32 ``ScalarHead``. A head under another known name, or with a bias, is taken over
    whole. Other families (BERT, RoBERTa, DeBERTa, …) keep the pooling and the head of their class.

    Args:
        dtype: of the weights, a decoder's head aside; None: as saved.
        few_bits: holds the linear layers in 4 or 8 bits, on their device.
        device: where weights go that are saved in few bits; all others wait on the CPU for the caller.

    Raises:
        ModelError: it is not there, has more labels than one, no head, several, or weights that are missing or that
            have no place in the model; or it is an adapter, and ``few_bits`` are asked for.
    """
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if few_bits is not None:
        _check_full(path, revision, few_bits)
        options |= few_bits.options(heads=HEADS)
    if is_adapter(path, revision):
        return _adapted_classifier(read_adapter(path, revision), dtype, options, device=device)
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    if is_classifier(config) and config.num_labels != 1:
        raise ModelError(f"{path}: got a classifier with {config.num_labels} labels; wanted one label (num_labels=1)")
    options = placement(config, device) | options
    model, info = _from_pretrained(
        AutoModelForSequenceClassification, path, dtype=dtype or "auto", revision=revision, num_labels=1, **options
    )
    heads = {name for name in info["unexpected_keys"] if is_head_key(name) and reads_last_token(model)}
    foreign = sorted(n for n in set(info["unexpected_keys"]) - heads if not _is_unused(n, model))
    if foreign:
        raise ModelError(f"{path}: holds weights that have no place in {type(model).__name__}: {some_of(foreign)}")
    _check_complete(info, path, but={"score.weight"} if reads_last_token(model) else ())
    if not reads_last_token(model):
        return model
    tensors = read_tensors(path, heads, revision=revision)
    if "score.weight" not in info["missing_keys"]:
        tensors["score.weight"] = model.score.weight
    model.score = head_from(tensors, model.score.in_features, path)
    return model


def _check_full(path: str, revision: str | None, few_bits: FewBits) -> None:
    """Raises ``ModelError`` for an adapter, which would have to be merged into weights in few bits."""
    if is_adapter(path, revision):
        raise ModelError(
            f"{path}: an adapter cannot be merged into a base in {few_bits.bits}: write the merged model by "
            f"`tether merge {path} -o FOLDER`, and name that folder"
        )


def _is_unused(name: str, model: PreTrainedModel) -> bool:
    """Whether a weight has no part in the score: of a language model's head, or of a pooler that this very class of
    transformers saved and does without."""
    own_pooler = f"{model.base_model_prefix}.pooler."
    return name.startswith("lm_head.") or (
        name.startswith(own_pooler) and type(model).__name__ in (model.config.architectures or ())
    )


def load_merged_classifier(path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The sequence classifier that the adapter in ``path`` makes of its base, of any family and number of labels, in
    eval mode; the weights have the base's type.

    Raises:
        ModelError: the adapter does not fit its base, or holds no head.
    """
    adapter = read_adapter(path)
    tensors = {name.removeprefix(MODULE_PREFIX): tensor for name, tensor in adapter.tensors.items()} | adapter.head
    outputs = [tensors[name] for name in OUTPUT_LAYERS if name in tensors]
    if len(outputs) != 1:
        raise ModelError(f"{path}: wanted an adapter with one head, {' or '.join(OUTPUT_LAYERS)}; got {len(outputs)}")
    options = {"trust_remote_code": trust_remote_code}
    return _adapted_classifier(adapter, None, options, num_labels=outputs[0].shape[0])


def _adapted_classifier(
    adapter: Adapter,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
    *,
    num_labels: int = 1,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """The classifier that an adapter makes of its base; merged in float32, then cast."""
    base, code = adapter.config.base_model_name_or_path, {"trust_remote_code": options["trust_remote_code"]}
    of_base = {"dtype": torch.float32, "revision": adapter.config.revision, **options}
    dtype = dtype or _saved_dtype(adapter, **code)
    shape = load_config(base, revision=adapter.config.revision, **code)
    if num_labels == 1 and _is_headed(adapter, base, shape, **code):
        model = classifier_on(whole(load_causal_lm(base, device=device, **of_base), base))
        return _with_head(_cast(merged(model, adapter), dtype), adapter)
    model, info = _from_pretrained(
        AutoModelForSequenceClassification, base, num_labels=num_labels, **placement(shape, device), **of_base
    )
    if not reads_last_token(model) or num_labels != 1:
        tensors = adapter.tensors | {f"{MODULE_PREFIX}{name}": tensor for name, tensor in adapter.head.items()}
        mine = {name.removeprefix(MODULE_PREFIX) for name in tensors}
        others = [each for each in info["mismatched_keys"] if each[0] not in mine]
        _check_complete({**info, "mismatched_keys": others}, base, but=mine)
        heads = {name.partition(".")[0] for name in mine} & set(HEADS)
        kept = [*(adapter.config.modules_to_save or ()), *sorted(heads)]
        settings = changed_config(adapter.config, modules_to_save=kept)
        return _cast(merged(whole(model, base), replace(adapter, config=settings, tensors=tensors)), dtype)
    _check_complete(info, base, but={"score.weight"})
    return _with_head(_cast(merged(whole(model, base), adapter), dtype), adapter)


def _is_headed(adapter: Adapter, base: str, shape: PreTrainedConfig, *, trust_remote_code: bool) -> bool:
    """Whether the adapter's classifier is a head on its base's language model, as ``tether reward`` trains one, and
    not what transformers makes of the base: that one has another trunk (the model with its eyes and not the text model
    alone) or would hold its missing head in few bits.
    """
    if is_classifier(shape):
        return False
    with model_errors(base), torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(shape, trust_remote_code=trust_remote_code)
    leaves = tuple(f"{name}." for name, module in classifier.named_modules() if next(module.children(), None) is None)
    has_place = all(name.removeprefix(MODULE_PREFIX).startswith(leaves) for name in adapter.tensors)
    return reads_last_token(classifier) and (has_few_bits(shape) or not has_place)


def _with_head(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The classifier with the adapter's head, in float32."""
    model.score = head_from(adapter.head, model.score.in_features, adapter.path)
    return model


def check_classifier(path: str, key: str) -> None:
    """Raises ``ModelError`` if a local folder holds a full model that is no classifier with one label.

    Args:
        key: the configuration key that named it, for the message.
    """
    folder = Path(path)
    if (beside := value_head_file(folder)) is not None:
        raise ModelError(
            f"{key}: {path} keeps its head in {beside.name}, as LLaMA-Factory does; wanted a model with a head of its "
            "own. As a reward it is of type value_head"
        )
    if not (folder / "config.json").is_file() or is_adapter(path):
        return
    with model_errors(path):
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    labels = settings.get("num_labels") or len(settings.get("id2label", range(2)))  # 2 is left out
    if labels != 1 and any(kind.endswith("ForSequenceClassification") for kind in settings.get("architectures") or ()):
        raise ModelError(f"{key}: {path} is a classifier with {labels} labels; wanted one label (num_labels=1)")
    names = _tensor_names(folder)
    if names and not any(is_head_key(name) or name.partition(".")[0] in POOLED_HEADS for name in names):
        raise ModelError(
            f"{key}: {path} holds no scalar head; wanted a model trained as a sequence classifier with num_labels=1"
        )


def reads_last_token(model: PreTrainedModel) -> bool:
    """Whether the classifier is a decoder, whose head reads the state of the last token."""
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


def pools_otherwise(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> bool:
    """Whether the classifier in ``path`` is of a family that reads more than the last token; loads no weights."""
    base, at = own_weights(path, revision)
    config = load_config(base, revision=at, trust_remote_code=trust_remote_code)
    with model_errors(path), torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    return not reads_last_token(model)


def load_value_head_model(
    path: str, *, revision: str | None = None, **options: Any
) -> tuple[PreTrainedModel, ScalarHead]:
    """The language model in ``path`` with the value head beside it, as LLaMA-Factory saves reward models.

    The folder holds a full causal language model, or a PEFT adapter of one, and ``value_head.safetensors`` or
    ``value_head.bin`` with ``v_head.summary.weight`` and ``v_head.summary.bias``.

    Args:
        options: as ``load_causal_lm`` takes them.

    Raises:
        ModelError: the model or its head is not there, or does not fit.
    """
    head = read_value_head(downloaded(path, revision, VALUE_HEAD_FILES))
    model = load_causal_lm(path, revision=revision, **options)
    return model, head_from(head, state_size(model), path)


def check_value_head(path: str, key: str) -> None:
    """Raises ``ModelError`` if a local folder has no value head beside its model.

    Args:
        key: the configuration key that named it, for the message.
    """
    folder = Path(path)
    if not folder.is_dir() or value_head_file(folder) is not None:
        return
    if any(is_head_key(name) for name in _tensor_names(folder)):
        raise ModelError(f"{key}: {path} holds its head among its own weights; use type model")
    raise ModelError(f"{key}: {no_value_head(folder)}")


def _tensor_names(folder: Path) -> list[str]:
    """Names of the weights in a folder, as far as they are in safetensors."""
    names = []
    with model_errors(str(folder)):
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    names += tensors.keys()
    return names


def classifier_on(model: PreTrainedModel) -> PreTrainedModel:
    """A sequence classifier with one label on the trunk of a causal language model, its head says 0 of everything.

    Raises:
        ModelError: transformers has no classifier of this kind of model.
    """
    config = changed_config(model.config, num_labels=1)
    code = {"trust_remote_code": hasattr(config, "auto_map")}  # it runs already: the model is there
    with model_errors(type(model).__name__), torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, **code)
    _check_decoder(classifier, type(model).__name__)
    if type(classifier.base_model) is not type(model.base_model):
        names = f"{type(model).__name__} and {type(classifier).__name__}"
        raise ModelError(f"{names} have different trunks: use value.kind head")
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    classifier.score = ScalarHead(classifier.score.in_features)
    return classifier.eval()


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a full model.

    Raises:
        ModelError: it is not there or of an unknown kind.
    """
    place, file = _place(path)
    with model_errors(path):
        config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=trust_remote_code, **file)
    return plain_config(config) if file else config


def read_tensors(path: str, names: Iterable[str], *, revision: str | None = None) -> dict[str, Tensor]:
    """The named tensors of a full model's checkpoint; names that it does not hold are left out."""
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


def _from_pretrained(auto_class: type, path: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in eval mode, and which weights were missing or unexpected.

    Raises:
        ModelError: it cannot be loaded, or its attention kernel cannot be used here.
    """
    options = {name: value for name, value in options.items() if value is not None}
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing and unexpected weights: callers judge those themselves
    try:
        with model_errors(path), _attention_errors(options.get("attn_implementation")):
            model, info = auto_class.from_pretrained(
                path, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    finally:
        logging.set_verbosity(level)
    if is_quantized(model):
        keep_differentiable(model)
    return with_quick_products(model).eval(), info


@contextmanager
def _attention_errors(kernel: str | None) -> Iterator[None]:
    """Names the key where the package of an attention kernel is missing, which transformers finds before it loads."""
    try:
        yield
    except ImportError as error:
        if kernel is None:
            raise
        raise ModelError(
            f"model.attn_implementation: got {kernel}, which cannot be used here: {error} Install what it needs, or "
            "leave the key out"
        ) from error


def _saved_dtype(adapter: Adapter, trust_remote_code: bool) -> torch.dtype:
    """The type that the adapter's base was saved in."""
    base, revision = adapter.config.base_model_name_or_path, adapter.config.revision
    return load_config(base, revision=revision, trust_remote_code=trust_remote_code).dtype or torch.float32


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """``model`` with its weights in ``dtype``; buffers, such as rotary frequencies, keep their own type."""
    for parameter in model.parameters():
        assert parameter.is_floating_point() and parameter.itemsize > 1, "a number of few bits is no weight by itself"
        parameter.data = parameter.data.to(dtype)
    return model


def _check_decoder(model: PreTrainedModel, path: str) -> None:
    if not reads_last_token(model):
        raise ModelError(
            f"{path}: {type(model).__name__} has no head called score; wanted a decoder (GPT-2, Llama, Qwen2, …) "
            "trained as a sequence classifier"
        )


def _check_complete(info: Mapping[str, Any], path: str, *, but: Iterable[str] = ()) -> None:
    """Raises ``ModelError`` if weights were missing or had another shape, which leaves them random."""
    if missing := sorted(set(info["missing_keys"]) - set(but)):
        raise ModelError(f"{path}: weights are missing from the checkpoint and would be random: {some_of(missing)}")
    for name, got, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(f"{path}: {name} has shape {list(got)}, its configuration wants {list(wanted)}")
