"""Devices: which one computes, which types it multiplies fast, and who made the processor."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

from tether.config.schema import TrainConfig
from tether.config.source import SourceConfig
from tether.config.stage import StageTrainConfig

HALF = (torch.bfloat16, torch.float16)
"""Types of half precision."""
INFORMATION = Path("/proc/cpuinfo")
"""The file in which Linux describes the processor."""


def default_device() -> torch.device:
    """The accelerator of this machine, or the CPU if there is none."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a device; of a CPU, those of its machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.accelerator.get_memory_info(device)[1]


def bf16_supported(device: torch.device | str) -> bool:
    """Whether the hardware multiplies bfloat16 matrices faster than float32 ones, so that bf16 autocast saves time.

    Among CPUs, these are those with AMX, and those with AVX512-BF16 that are not Intel's: on an AMD EPYC (Zen 5),
    bfloat16 is 1.9 times as fast; on an Intel Xeon without usable AMX, it is half as fast.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind == "cpu":
        abilities = torch.cpu.get_capabilities()
        return bool(abilities.get("amx_bf16") or (abilities.get("avx512_bf16") and not is_intel()))
    return False


def is_x86() -> bool:
    """Whether this is a processor with the x86 instructions."""
    return torch.cpu.get_capabilities().get("architecture") == "x86_64"


@cache
def half_is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of bfloat16 or float16 more slowly than float32 ones. False for processors
    that are not x86, on which this was not measured."""
    abilities = torch.cpu.get_capabilities()
    if not is_x86():
        return False
    if dtype == torch.bfloat16:
        return not bf16_supported("cpu")
    return not (abilities.get("amx_fp16") or abilities.get("avx512_fp16"))


def half_dtype(keys: TrainConfig | StageTrainConfig | SourceConfig, device: torch.device | str) -> torch.dtype | None:
    """The autocast dtype of forward passes that ``keys`` ask for; None for that of the weights.

    Args:
        device: decides whether to use bfloat16 if ``bf16`` is not set.
    """
    if keys.fp16:
        return torch.float16
    is_bf16 = bf16_supported(device) if keys.bf16 is None else keys.bf16
    return torch.bfloat16 if is_bf16 else None


def weight_dtype(name: str, auto: torch.dtype | None) -> torch.dtype | None:
    """The type that a key ``dtype`` names; ``auto`` if it is ``auto``."""
    return auto if name == "auto" else getattr(torch, name)


@cache
def is_intel() -> bool:
    """Whether the processor is Intel's, according to the operating system."""
    told = INFORMATION.read_text(encoding="utf-8") if INFORMATION.exists() else platform.processor()
    return "Intel" in told
