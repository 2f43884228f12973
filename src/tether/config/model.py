"""Keys of the model that a run trains; every stage has them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from tether.config.base import Quantization, Section


class LoraConfig(Section):
    """A LoRA adapter; keys have PEFT's meaning."""

    r: PositiveInt = 16
    """Rank of the adapter."""
    alpha: PositiveFloat = 32
    """Scaling: the adapter's output is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the adapter's input, in ``tether sft``. PPO and ``tether reward`` run with all dropout off; there it
    is only written into the saved adapter."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: ``all-linear``, a regular expression, or a list of names. Of Mamba, Falcon-H1,
    Nemotron-H and the like, ``all-linear`` leaves out modules whose weights the model also reads by themselves, past an
    adapter (``out_proj``, ``dt_proj``)."""

    @field_validator("target_modules")
    @classmethod
    def _compiles(cls, targets: str | list[str]) -> str | list[str]:
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"{targets!r} is not a regular expression: {error}") from error
        elif not targets:
            raise ValueError("an empty list names no module; wanted all-linear, a regular expression, or names")
        return targets


class ModelConfig(Section):
    """The policy."""

    path: str
    """Hub id or folder of the fine-tuned model to start from: a full model or a PEFT adapter. A GGUF file also works
    and is de-quantized: ``model.gguf``, a folder that holds one, or ``ORG/NAME/FILE.gguf`` on the hub. With LoRA, the
    de-quantized model is written to ``base`` in ``output_dir``, and the saved adapter names it as its base."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. ``auto``: float32 for full fine-tuning; with LoRA, the adapters are float32, and the frozen
    base is bfloat16 under bf16 autocast and float16 under fp16 autocast. Trainable weights in bfloat16 lose most small
    updates to rounding."""
    attn_implementation: str | None = None
    """Attention implementation, by its name in transformers. Default: the model's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    freeze_layers: NonNegativeInt = 0
    """Number of transformer layers, counted from the first, that stay frozen together with the embeddings (and a head
    tied to them). For full fine-tuning only; a separate critic (kind model) still trains all of its layers."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter instead of all weights. ``lora: {}`` uses the defaults. If ``path`` is an adapter, of LoRA
    or another PEFT method, ``lora: {}`` continues to train that adapter."""
    quantization: Quantization | None = None
    """Store the linear layers of the frozen base in 4 bits (``4bit``: NF4 with double quantization, as in QLoRA) or 8
    bits (``8bit``: LLM.int8()). Needs lora and ``pip install 'tether[quant]'``. All other weights have type ``dtype``,
    for which ``auto`` then means float32. Sources: https://arxiv.org/abs/2305.14314;
    https://arxiv.org/abs/2208.07339."""

    @model_validator(mode="after")
    def _quantized_weights_stay(self) -> ModelConfig:
        if self.quantization is not None and self.lora is None:
            raise ValueError(
                f"quantization {self.quantization}: quantized weights cannot be trained themselves; add `lora: {{}}`"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_train_less(self) -> ModelConfig:
        if self.freeze_layers and self.lora is not None:
            raise ValueError(
                f"freeze_layers {self.freeze_layers} is for full fine-tuning; with lora only the adapter trains: leave "
                "it out, and choose the layers by lora.target_modules"
            )
        return self


def check_weights(model: ModelConfig, *, fp16: bool) -> None:
    """Raises ``ValueError`` for weights in bfloat16 under float16 autocast."""
    if fp16 and model.dtype == "bfloat16":
        raise ValueError(
            "model.dtype bfloat16 and train.fp16 request two different half-precision types: leave model.dtype out, or "
            "set train.bf16 instead of train.fp16"
        )
