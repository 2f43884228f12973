"""The launcher's DeepSpeed configuration: checks it against a run, and fills in its ``auto`` values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from tether.config.schema import RunConfig
from tether.config.stage import StageConfig
from tether.errors import ConfigError

NOT_OURS = {
    "tensor_parallel": "models are sharded by ZeRO alone",
    "sequence_parallel_size": "models are sharded by ZeRO alone",
    "pipeline": "models are sharded by ZeRO alone",
    "torch_autocast": "train.bf16 sets it",
}
"""Sections of a DeepSpeed configuration that other keys of any run decide, or that no run can have."""
SIZES = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""Sizes in a DeepSpeed configuration that may be ``auto``, by the hidden size of the model."""


def check_deepspeed(
    deepspeed: Mapping[str, Any],
    config: RunConfig | StageConfig,
    *,
    sections: Mapping[str, str],
    batches: Mapping[str, str],
) -> None:
    """Raises ``ConfigError`` if a DeepSpeed configuration contradicts that of the run, or configures something that
    Tether does itself.

    Args:
        sections: further sections that other keys of this kind of run decide, and which do.
        batches: sizes that follow from the run's own, and from which; their values in the DeepSpeed configuration have
            no effect.
    """
    zero = deepspeed["zero_optimization"]
    if zero["stage"] not in (1, 2, 3):
        raise _unfit("zero_optimization.stage", zero["stage"], "1, 2 or 3; without DeepSpeed the launcher uses DDP")
    for key, instead in {**sections, **NOT_OURS}.items():
        if deepspeed.get(key):
            raise _unfit(key, deepspeed[key], f"none: {instead}")
    for key, instead in batches.items():
        if deepspeed.get(key, "auto") not in ("auto", 1):
            raise _unfit(key, deepspeed[key], f"auto: {instead}")
    clipping, limit = deepspeed.get("gradient_clipping", "auto"), config.train.max_grad_norm
    if clipping not in ("auto", limit) and (clipping or limit):
        raise _unfit("gradient_clipping", clipping, f"auto or train.max_grad_norm, which is {limit}")
    _check_precision(deepspeed, config)


def _check_precision(deepspeed: Mapping[str, Any], config: RunConfig | StageConfig) -> None:
    def asks_for(name: str) -> bool:
        return (deepspeed.get(name) or {}).get("enabled") is True

    if config.train.fp16:
        raise ConfigError(
            "train.fp16, or mixed_precision of the launch: got float16, which is refused under ZeRO, where losses are "
            "not scaled: set train.bf16, or launch the run without DeepSpeed"
        )
    if asks_for("fp16"):
        raise _unfit("fp16.enabled", "true", "auto: under ZeRO the only half precision is train.bf16")
    if asks_for("bf16") and not config.train.bf16:
        raise _unfit(
            "bf16.enabled", "true", "auto, or train.bf16: true. Weights are float32 and forwards run under autocast"
        )


def filled(
    config: Mapping[str, Any],
    num_processes: int,
    width: int,
    *,
    rows: int = 1,
    accumulation: int = 1,
    max_grad_norm: float = 0.0,
) -> dict[str, Any]:
    """A DeepSpeed configuration without ``auto``. Precision is left to Tether: weights keep their type, and forward
    passes run under its own autocast.

    Args:
        width: hidden size of the model.
        rows, accumulation: what one process reads in a forward pass, and how many of them make an optimizer step. Left
            out by callers that count micro-batches themselves.
        max_grad_norm: limit of the norm of all gradients; 0 leaves clipping to the caller.
    """
    config = copy.deepcopy(dict(config))
    for name in ("bf16", "fp16"):
        config.pop(name, None)
    config |= {
        "gradient_clipping": max_grad_norm,
        "train_batch_size": num_processes * rows * accumulation,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    zero = config["zero_optimization"]
    for name, value in list(zero.items()):
        if value == "auto":
            del zero[name]
            zero |= {name: SIZES[name](width)} if name in SIZES else {}
    if zero["stage"] == 1:
        zero["overlap_comm"] = False  # gradients are reduced once, at the end
    return config


def width_of(module: nn.Module) -> int:
    """Hidden size of a model, from which DeepSpeed's automatic sizes are derived."""
    config = next(part.config for part in module.modules() if hasattr(part, "config"))
    return config.get_text_config().hidden_size


def waits_on(deepspeed: Mapping[str, Any]) -> str | None:
    """Where a DeepSpeed configuration keeps a process's parts of weights when not in use; None for its own device."""
    device = (deepspeed["zero_optimization"].get("offload_param") or {}).get("device", "none")
    return None if device == "none" else device


def _unfit(key: str, got: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{key} in the DeepSpeed configuration: got {got}, wanted {wanted}")
