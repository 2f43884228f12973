"""Loads language models. No weight is ever left at random: one that a checkpoint lacks is an error.

A path is a folder or a hub id. It holds a full model, or a PEFT adapter, which is merged into the base model that it
names. Adapters that stay adapters are handled in ``roles.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from tether.errors import ModelError
from tether.models.adapters import merged, read_adapter
from tether.models.bitsandbytes import FewBits, is_quantized, keep_differentiable, placement, whole
from tether.models.fit import is_classifier
from tether.models.gguf import gguf_source, place_of, plain_config, plain_model
from tether.models.paths import (
    is_adapter,
    model_errors,
    own_weights,
    some_of,
)
from tether.models.products import with_quick_products


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
    """Loads the language model in ``path``, in eval mode; an adapter is merged into its base in float32, then cast.

    Args:
        dtype: of the weights; None: as saved.
        few_bits: keeps the linear layers in 4 or 8 bits, on its device.
        device: for checkpoints saved as quantized weights; all others are loaded on the CPU.

    Raises:
        ModelError: it does not exist, is a classifier, or lacks some of its weights; or it is an adapter and
            ``few_bits`` is given.
    """
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if few_bits is not None:
        check_full(path, revision, few_bits)
        options |= few_bits.options()
    if is_adapter(path, revision):
        adapter = read_adapter(path, revision)
        if adapter.head:
            raise ModelError(f"{path}: got a reward adapter (it holds a head); wanted the adapter of a language model")
        base, at = own_weights(path, revision)
        of_base = {"dtype": torch.float32, "revision": at}
        model = merged(whole(load_causal_lm(base, device=device, **of_base, **options), base), adapter)
        if dtype is None:
            dtype = load_config(base, revision=at, trust_remote_code=trust_remote_code).dtype or torch.float32
        return cast(model, dtype)
    if gguf_source(path) is not None:
        return _dequantized(path, dtype or torch.float32, revision, options)
    shape = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    if is_classifier(shape):
        raise ModelError(f"{path}: got a sequence classifier; wanted a causal language model")
    options = placement(shape, device) | options
    model, info = from_pretrained(AutoModelForCausalLM, path, dtype=dtype or "auto", revision=revision, **options)
    check_complete(info, path)
    return model


def _dequantized(path: str, dtype: torch.dtype, revision: str | None, options: Mapping[str, Any]) -> PreTrainedModel:
    """Loads the language model in a GGUF file: de-quantized in float32, then cast."""
    if options.get("quantization_config") is not None:
        raise ModelError(
            f"{path}: a GGUF file is de-quantized when it is read, but bitsandbytes reads model folders; give the "
            "model as a folder: its own, or the one that a run with LoRA writes to `base` in its output_dir"
        )
    place, file = place_of(path)
    model, info = from_pretrained(
        AutoModelForCausalLM, place, dtype=torch.float32, revision=revision, **file, **options
    )
    check_complete(info, path)
    return cast(plain_model(model, options["attn_implementation"]), dtype)


def check_full(path: str, revision: str | None, few_bits: FewBits) -> None:
    """Raises ``ModelError`` for an adapter, which cannot be merged into quantized weights."""
    if is_adapter(path, revision):
        raise ModelError(
            f"{path}: an adapter cannot be merged into a base in {few_bits.bits}: write the merged model with "
            f"`tether merge {path} -o FOLDER`, and name that folder"
        )


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Loads the configuration of a full model.

    Raises:
        ModelError: it does not exist or is of an unknown kind.
    """
    place, file = place_of(path)
    with model_errors(path):
        config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=trust_remote_code, **file)
    return plain_config(config) if file else config


def from_pretrained(auto_class: type, path: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads a model in eval mode, and returns which weights were missing or unexpected.

    Raises:
        ModelError: it cannot be loaded, or its attention kernel is not available.
    """
    options = {name: value for name, value in options.items() if value is not None}
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # no report of missing and unexpected weights: callers check those themselves
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
    """Names the key if the package of an attention kernel is missing, which transformers notices before loading."""
    try:
        yield
    except ImportError as error:
        if kernel is None:
            raise
        raise ModelError(
            f"model.attn_implementation: got {kernel}, which cannot be used here: {error} Install what it needs, or "
            "leave the key out"
        ) from error


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Casts the weights of ``model`` to ``dtype``; buffers, such as rotary frequencies, keep their own type."""
    for parameter in model.parameters():
        assert parameter.is_floating_point() and parameter.itemsize > 1, "a number of few bits is no weight by itself"
        parameter.data = parameter.data.to(dtype)
    return model


def check_complete(info: Mapping[str, Any], path: str, *, but: Iterable[str] = ()) -> None:
    """Raises ``ModelError`` if weights were missing or had another shape, which leaves them random. Names in ``but``
    may be missing."""
    if missing := sorted(set(info["missing_keys"]) - set(but)):
        raise ModelError(f"{path}: weights are missing from the checkpoint and would be random: {some_of(missing)}")
    for name, got, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(f"{path}: {name} has shape {list(got)}, but its configuration wants {list(wanted)}")
