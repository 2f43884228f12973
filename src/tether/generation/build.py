"""Which engine generates answers."""

from __future__ import annotations

from tether.config.schema import RunConfig
from tether.generation.hf import HFGenerator
from tether.generation.vllm import VLLMGenerator
from tether.models.roles import ModelRoles
from tether.types import Generator


def build_generator(config: RunConfig, roles: ModelRoles) -> Generator:
    """The generator that a run asks for: the policy's own forward, or vLLM."""
    if config.sampling.vllm is not None:
        return VLLMGenerator(config, roles)
    return HFGenerator(
        roles.decoding,
        phase=roles.ready_to_decode,
        batch_size=config.sampling.batch_size,
        device=roles.device,
        is_static=config.sampling.cache_implementation == "static",
    )
