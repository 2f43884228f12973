"""Weights in 4 or 8 bits and 8-bit AdamW moments with bitsandbytes: availability and creation.

Also handles checkpoints that were quantized elsewhere, by any method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from tether.config.base import Quantization
from tether.errors import ConfigError, ModelError
from tether.models.fit import has_few_bits
from tether.models.paths import ADAPTER_CONFIG, model_errors


def check_bitsandbytes(wanted: str, key: str, device: torch.device | str) -> None:
    """Raises ``ConfigError`` if bitsandbytes is not installed or does not work on this device.

    Args:
        wanted: the configured value, for the message.
        key: its configuration key.
        device: where the model will be.
    """
    try:
        version("bitsandbytes")
    except PackageNotFoundError as error:
        raise ConfigError(f"{key} {wanted} needs the package bitsandbytes: pip install 'tether[quant]'") from error
    import bitsandbytes

    kind, known = torch.device(device).type, sorted(bitsandbytes.supported_torch_devices)
    if kind not in known:
        raise ConfigError(f"{key} {wanted}: bitsandbytes works on {', '.join(known)}, but the run computes on {kind}")


def adamw_8bit(parameters: Sequence[nn.Parameter], **options: Any) -> Optimizer:
    """AdamW whose moments are stored in 8 bits, each block of them with its own scale.

    Args:
        options: those of torch's AdamW.

    Source: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861
    """
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **options)


@dataclass(frozen=True)
class FewBits:
    """How the linear layers of a model are stored in 4 or 8 bits.

    4bit: NormalFloat, with double quantization of its scales. 8bit: LLM.int8(), with outlier features in 16 bits.

    Sources: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314; Dettmers et al. 2022,
    https://arxiv.org/abs/2208.07339
    """

    bits: Quantization
    device: torch.device
    """The device of the layers, on which they are loaded."""
    compute_dtype: torch.dtype
    """The type in which 4-bit weights are multiplied."""

    def options(self, *, heads: Sequence[str] | None = None) -> dict[str, Any]:
        """Arguments of ``from_pretrained``.

        Args:
            heads: modules that are not quantized; None: the output embedding and what is tied to it.
        """
        kept = {"llm_int8_skip_modules": None if heads is None else list(heads)}
        if self.bits == "4bit":
            nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
            settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=self.compute_dtype, **nf4, **kept)
        else:
            settings = BitsAndBytesConfig(load_in_8bit=True, **kept)
        return {"quantization_config": settings, "device_map": {"": self.device}}


def is_quantized(model: nn.Module) -> bool:
    """Whether the model holds quantized weights, which cannot be trained or cast."""
    return bool(getattr(model, "is_quantized", False))


def placement(shape: PreTrainedConfig, device: torch.device | str | None) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that place a model whose checkpoint itself holds quantized weights.

    Many methods (GPTQ, AWQ, FP8, …) load such weights directly onto the device that computes with them.

    Args:
        device: None leaves it to transformers.
    """
    return {"device_map": {"": torch.device(device)}} if device is not None and has_few_bits(shape) else {}


def whole(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The model with weights that an adapter can be merged into: de-quantized to float32 if they are quantized.

    Args:
        path: where it was loaded from, for messages.

    Raises:
        ModelError: it cannot be de-quantized.
    """
    if not is_quantized(model):
        return model
    method = getattr(model.config.quantization_config, "quant_method", "their method")
    try:
        with model_errors(path):
            return model.dequantize(torch.float32)
    except ModelError as error:
        raise ModelError(
            f"{path}: holds quantized weights, into which an adapter can be merged only after de-quantization, which "
            f"transformers cannot do for {getattr(method, 'value', method)} here ({error}). Name the model that "
            f"was quantized, or a de-quantized copy, as base_model_name_or_path in the adapter's {ADAPTER_CONFIG}"
        ) from error


def placed(model: nn.Module, device: torch.device) -> None:
    """Moves the model to the device, unless it is quantized: then it and its adapters are there since loading."""
    if not is_quantized(model):
        model.to(device)


def keep_differentiable(model: nn.Module) -> None:
    """Keeps 4-bit weights in a layout that supports gradients.

    On a CPU that multiplies bfloat16, bitsandbytes repacks the weights of a module in eval mode permanently in its
    first forward without gradients, and the product with repacked weights has no backward.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False


def num_weights(parameter: nn.Parameter) -> int:
    """Number of weights in a parameter, also if 4-bit weights share bytes in pairs or DeepSpeed has sharded it."""
    state = getattr(parameter, "quant_state", None)
    return getattr(parameter, "ds_numel", parameter.numel()) if state is None else state.shape.numel()
