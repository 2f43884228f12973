"""Loads what a run saved: its configuration, and its policy, ready to answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config import text
from tether.config.chat import ChatKeys
from tether.config.load import load_config, read_file
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftStageConfig
from tether.machine.distributed import Dist
from tether.models.bitsandbytes import placed
from tether.models.checkpoints import run_folders
from tether.models.loading import load_causal_lm
from tether.models.paths import is_adapter
from tether.models.tokenizer import end_token_ids, stop_token_ids
from tether.train.build import sampling_of
from tether.train.folder import CONFIG
from tether.types import Sampling

DEFAULT_LENGTH = 256
"""Maximum number of tokens of an answer for a model that belongs to no run."""


def _section(file: Path) -> type[RunConfig] | type[SftStageConfig] | None:
    """The configuration class of a file called config.yaml, from its keys; None if its command trains no policies."""
    try:
        data = text.parse(read_file(file)).data
    except text.TextError:
        return RunConfig  # loading the configuration then reports what is wrong with it
    if not isinstance(data, dict) or "rewards" in data:
        return RunConfig
    read = data.get("data")
    return SftStageConfig if isinstance(read, dict) and "demonstrations" in read else None


def run_config(path: Path) -> RunConfig | None:
    """The configuration of a policy's PPO run, from its folder or that of a checkpoint in it; None if there is none."""
    config = policy_config(path)
    return config if isinstance(config, RunConfig) else None


def policy_config(path: Path) -> RunConfig | SftStageConfig | None:
    """``run_config`` for PPO and SFT runs."""
    file = next((folder / CONFIG for folder in run_folders(path) if (folder / CONFIG).is_file()), None)
    section = None if file is None else _section(file)
    return None if section is None else load_config(file, section=section)


def chat_keys(config: RunConfig | SftStageConfig | None) -> dict[str, Any]:
    """Settings for rendering conversations for a policy of this run; the defaults without a run."""
    return ChatKeys().chat if config is None else config.data.chat


@dataclass(frozen=True)
class SavedPolicy:
    """A policy and its sampling settings."""

    model: PreTrainedModel
    sampling: Sampling
    """As in its run; for a model that belongs to no run, at most 256 tokens at temperature 1."""


def load_saved_policy(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig | None,
    *,
    response_length: int | None,
    temperature: float | None,
    **options: Any,
) -> SavedPolicy:
    """Loads a model onto the device of this process.

    A model with an adapter is merged and kept in float32: in the half precision of its base, most of what PPO changed
    would be rounded away.

    Args:
        run: its sampling settings are used.
        response_length, temperature: override the run's, if given.
        options: for loading the model.
    """
    device = Dist().device
    dtype = torch.float32 if is_adapter(path, options.get("revision")) else None
    model = load_causal_lm(path, dtype=dtype, device=device, **options)
    placed(model, device)
    ends = model.generation_config
    if run is None:
        sampling = Sampling(DEFAULT_LENGTH, 1.0, end_token_ids(tokenizer, ends))
    else:
        sampling = sampling_of(run.sampling, stop_token_ids(tokenizer, ends, run.sampling.stop_token), tokenizer)
    if response_length is not None:
        sampling = replace(sampling, max_new_tokens=response_length)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    return SavedPolicy(model, sampling)
