"""DeepSpeed before the first Accelerator of a process: its import, and the launcher's settings for it."""

from __future__ import annotations

from importlib.util import find_spec

from accelerate.utils import DeepSpeedPlugin
from transformers.integrations import unset_hf_deepspeed_config

from tether.errors import ConfigError


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
