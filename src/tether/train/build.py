"""Builds the parts of a run and its trainer from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed

from tether.config.schema import RunConfig, SamplingConfig
from tether.generation.build import build_generator
from tether.machine.distributed import Dist
from tether.models.build import build_roles
from tether.models.device import half_dtype
from tether.models.offload import has_own_memory
from tether.models.roles import ModelRoles
from tether.models.stop_strings import StopStrings
from tether.models.tokenizer import end_at, stop_token_ids
from tether.rewards.build import build_rewards
from tether.train.callbacks import Callbacks
from tether.train.display import Display, tell_sources
from tether.train.engines.build import build_engine
from tether.train.gguf import with_base
from tether.train.inputs import RunData
from tether.train.log import RunLog
from tether.train.parts import Parts
from tether.train.sharing import shared, shared_generator
from tether.train.trainer import PPOTrainer
from tether.types import RewardSource, Sampling


def build_trainer(
    config: RunConfig,
    data: RunData,
    dist: Dist,
    *,
    read: Mapping[str, str],
    rewards: RewardSource | None,
    log: RunLog,
    callbacks: Sequence[TrainerCallback],
) -> PPOTrainer:
    """Loads the models and builds the trainer.

    Args:
        read: ``fingerprints`` of the data, models and files.
        rewards: a reward source of the caller's own, used instead of ``config.rewards``.
    """
    set_seed((config.train.seed + dist.rank) % 2**32)
    events = Callbacks(callbacks, config, len(data.prompts.prompts))
    if config.train.offload_idle_roles and not has_own_memory(dist.device):
        log.message(f"train.offload_idle_roles: nothing is moved, as {dist.device} and the CPU share their memory")
    log.phase("loading models", 0, 1)
    parts = build_parts(config, data, rewards, dist)
    tell_roles(parts.roles, log.display)
    return PPOTrainer(config, parts, read=read, log=log, callbacks=events)


def build_parts(config: RunConfig, data: RunData, rewards: RewardSource | None, dist: Dist) -> Parts:
    """Models, generator and reward sources for a resolved configuration."""
    tokenizer = data.tokenizer
    config = with_base(config)
    engine = build_engine(dist)
    device = torch.device("cpu") if engine.spreads_weights else dist.device
    precision = half_dtype(config.train, dist.device)
    roles = dist.each(lambda: build_roles(config, tokenizer, device=device, autocast_dtype=precision))
    if rewards is not None:
        source = shared(lambda _: rewards, dist=dist)
    else:
        source = build_rewards(
            config.rewards,
            config.reward_names,
            roles=roles,
            tokenizer=tokenizer,
            device=dist.device,
            now=config.data.chat_template_now,
            offload_idle=config.train.offload_idle_roles,
            shards=engine.spreads_weights,
            shared=partial(shared, dist=dist, engine=engine),
        )
    engine.place(roles)
    generator = dist.each(lambda: build_generator(config, roles))
    stops = stop_token_ids(tokenizer, roles.policy.generation_config, config.sampling.stop_token)
    if config.sampling.stop_token == "eos":
        end_at(roles.policy, stops)
    return Parts(
        roles=roles,
        generator=shared_generator(generator, dist, engine, gather=config.train.ds3_gather_for_generation),
        rewards=source,
        tokenizer=tokenizer,
        sampling=sampling_of(config.sampling, stops, tokenizer),
        prompts=data.prompts.prompts,
        eval_prompts=data.held_out,
        demonstrations=data.demonstrations,
        dist=dist,
        engine=engine,
    )


def sampling_of(
    config: SamplingConfig, stop_token_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase
) -> Sampling:
    """Sampling settings of a run's answers.

    Args:
        tokenizer: the policy's.
    """
    strings = config.stop_strings
    text_ends = StopStrings(tokenizer, strings, longest=config.response_length) if strings else None
    return Sampling(
        config.response_length, config.temperature, stop_token_ids, config.top_p, config.top_k, text_ends
    )


def tell_roles(roles: ModelRoles, display: Display) -> None:
    """Shows what each role is loaded from, and how many parameters it uses and trains."""
    table = roles.table()
    tell_sources([(row.role, row.source, row.sharing) for row in table], display)
    rows = [[row.role, row.parameters, row.trainable, row.dtype] for row in table]
    display.table("parameters that each role uses and trains", ["role", "uses", "trains", "dtype"], rows)
