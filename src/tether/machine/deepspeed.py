"""DeepSpeed: its import and the launcher's settings for the first Accelerator of a process, and sharded weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from transformers.integrations import unset_hf_deepspeed_config

from tether.errors import ConfigError
from tether.machine.deepspeed_config import waits_on


def import_before_group() -> None:
    """Imports DeepSpeed before there is a process group.

    transformers imports it when a model is first saved. By then its functions would keep the group as the default of
    their parameters; gloo's threads would outlive the group, and one that is late aborts a process that ends.
    """
    import deepspeed  # noqa: F401


def plugin_of_launch() -> DeepSpeedPlugin:
    """The DeepSpeed plugin of the launcher's configuration.

    Models are created whole and sharded afterwards, because heads and adapters are created from their weights.

    Raises:
        ConfigError: DeepSpeed is not installed, or the configuration cannot be read.
    """
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "the launcher's configuration asks for DeepSpeed, which is not installed: "
            "pip install --no-build-isolation 'tether[deepspeed]'"
        )
    import deepspeed

    # On CPUs, DeepSpeed would compile shared-memory communication at the start, which ZeRO does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        return DeepSpeedPlugin(zero3_init_flag=False)
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed configuration of the launch: {error}") from error


def load_whole() -> None:
    """Makes transformers load whole models from now on, even if arguments of its trainer made it shard them."""
    unset_hf_deepspeed_config()


def partition(module: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Shards a model on the CPU, one parameter at a time, so that no device ever holds all of it.

    Args:
        config: a ``filled`` configuration of stage 3.
    """
    import deepspeed

    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    deepspeed.zero.Init(
        module=module,
        config_dict_or_path=config,
        remote_device=waits_on(config),
        pin_memory=bool((config["zero_optimization"].get("offload_param") or {}).get("pin_memory", False)),
    )


def gathered(parameters: Iterable[nn.Parameter], *, changed_by_main: bool = False) -> AbstractContextManager[None]:
    """A context in which every process has the whole of these parameters, if they are sharded.

    Args:
        changed_by_main: whether they then get the values that the main process has given them.
    """
    import deepspeed

    return deepspeed.zero.GatheredParameters([*parameters], modifier_rank=0 if changed_by_main else None)
