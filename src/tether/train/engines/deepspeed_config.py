"""The launcher's DeepSpeed configuration: checks it against a run, and fills in its ``auto`` values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.train.engines.base import refuse_few_bits

NOT_OURS = {
    "optimizer": "train.optim, train.learning_rate and related keys set it",
    "scheduler": "train.lr_scheduler_type, train.warmup_ratio and train.lr_scheduler_kwargs set it",
    "hybrid_engine": "answers are decoded with weights that are gathered once per rollout",
    "tensor_parallel": "models are sharded by ZeRO alone",
    "sequence_parallel_size": "models are sharded by ZeRO alone",
    "pipeline": "models are sharded by ZeRO alone",
    "torch_autocast": "train.bf16 sets it",
}
"""Sections of a DeepSpeed configuration that are decided by other keys of a run."""
BATCHES = {
    "train_batch_size": "train.rollout_batch_size and ppo.num_mini_batches set it",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size sets it",
    "gradient_accumulation_steps": "train.micro_batch_size sets it",
}
"""Sizes that follow from a run's own; their values in the DeepSpeed configuration have no effect."""


def check(deepspeed: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ``ConfigError`` if a DeepSpeed configuration contradicts that of the run, or configures something that
    Tether does itself."""
    zero = deepspeed["zero_optimization"]
    if zero["stage"] not in (1, 2, 3):
        raise _unfit("zero_optimization.stage", zero["stage"], "1, 2 or 3; without DeepSpeed the launcher uses DDP")
    for key, instead in NOT_OURS.items():
        if deepspeed.get(key):
            raise _unfit(key, deepspeed[key], f"none: {instead}")
    for key, instead in BATCHES.items():
        if deepspeed.get(key, "auto") not in ("auto", 1):
            raise _unfit(key, deepspeed[key], f"auto: {instead}")
    clipping, limit = deepspeed.get("gradient_clipping", "auto"), config.train.max_grad_norm
    if clipping not in ("auto", limit) and (clipping or limit):
        raise _unfit("gradient_clipping", clipping, f"auto or train.max_grad_norm, which is {limit}")
    _check_precision(deepspeed, config)
    refuse_few_bits(config, "ZeRO")


def _check_precision(deepspeed: Mapping[str, Any], config: RunConfig) -> None:
    def asks_for(name: str) -> bool:
        return (deepspeed.get(name) or {}).get("enabled") is True

    if config.train.fp16:
        raise ConfigError(
            "train.fp16, or mixed_precision of the launch: got float16, which is refused under ZeRO, where losses are "
            "not scaled: set train.bf16, or launch the run with FSDP2 or DDP"
        )
    if asks_for("fp16"):
        raise _unfit("fp16.enabled", "true", "auto: under ZeRO the only half precision is train.bf16")
    if asks_for("bf16") and not config.train.bf16:
        raise _unfit(
            "bf16.enabled", "true", "auto, or train.bf16: true. Weights are float32 and forwards run under autocast"
        )


def filled(config: Mapping[str, Any], num_processes: int, width: int) -> dict[str, Any]:
    """A DeepSpeed configuration without ``auto``, for a model of hidden size ``width``.

    Tether handles micro-batches, clipping and autocast itself, so DeepSpeed is given one micro-batch and neither of the
    others.
    """
    config = copy.deepcopy(dict(config))
    for name in ("bf16", "fp16"):
        config.pop(name, None)
    config |= {
        "gradient_clipping": 0.0,
        "train_batch_size": num_processes,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    sizes = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero = config["zero_optimization"]
    for name, value in list(zero.items()):
        if value == "auto":
            del zero[name]
            zero |= {name: sizes[name]} if name in sizes else {}
    if zero["stage"] == 1:
        zero["overlap_comm"] = False  # gradients are reduced once, at the end
    return config


def waits_on(deepspeed: Mapping[str, Any]) -> str | None:
    """Where a DeepSpeed configuration keeps a process's parts of weights when not in use; None for its own device."""
    device = (deepspeed["zero_optimization"].get("offload_param") or {}).get("device", "none")
    return None if device == "none" else device


def _unfit(key: str, got: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{key} in the DeepSpeed configuration: got {got}, wanted {wanted}")
