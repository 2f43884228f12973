"""The policy on the hub, with its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from tether.compat.trl.config import PPOConfig
from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.models.saving import MANIFEST, files_written
from tether.report.text import number, one_line

CARD = "README.md"
CURVES = ("objective/scores", "objective/kl", "objective/entropy", "rollout/length")
"""Metrics that a card gives of the first and the last update."""


def model_name(args: PPOConfig) -> str:
    """Name of the model without its owner: of ``hub_model_id``, or of the output folder."""
    return (args.hub_model_id or Path(args.output_dir).name).rpartition("/")[2]


def open_repository(args: PPOConfig, *, token: str | None = None, private: bool | None = None) -> str:
    """Makes the repository that is pushed to, unless it is there; returns its full name.

    Raises:
        ConfigError: the hub refuses, or cannot be reached.
    """
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        url = HfApi(token=token or args.hub_token).create_repo(
            name, private=args.hub_private_repo if private is None else private, exist_ok=True
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip(" .\n").splitlines()
        raise ConfigError(
            f"push_to_hub: no repository {name} could be opened: {reason[0] if reason else type(error).__name__}. Log "
            "in by `hf auth login`, or set hub_model_id and hub_token"
        ) from error
    return url.repo_id


def upload(
    args: PPOConfig, repository: str, message: str, *, blocking: bool, token: str | None, revision: str | None
) -> CommitInfo | Future[CommitInfo]:
    """Pushes the policy that is saved in the output folder, and its card."""
    return HfApi(token=token or args.hub_token).upload_folder(
        repo_id=repository,
        folder_path=args.output_dir,
        allow_patterns=[*(name for name in files_written(args.output_dir) if name != MANIFEST), CARD],
        commit_message=message,
        revision=revision or args.hub_revision,
        run_as_future=not blocking,
    )


def model_card(
    name: str,
    config: RunConfig,
    history: Sequence[Mapping[str, Any]],
    *,
    is_adapter: bool,
    dataset_name: str | None,
    tags: Sequence[str],
) -> str:
    """The text of a hub page.

    Args:
        history: metrics of updates and evaluations.
        is_adapter: whether the policy is a PEFT adapter.
    """
    base = None if Path(config.model.path).exists() or " " in config.model.path else config.model.path
    data = ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        datasets=[dataset_name] if dataset_name else None,
        tags=sorted({"ppo", "tether", *tags}),
    )
    ppo, train = config.ppo, config.train
    lines = [
        f"# {one_line(name, 96)}",
        f"{'A LoRA adapter of' if is_adapter else 'Fine-tuned from'} {base or 'a local model'} by PPO with Tether"
        + (f" on {one_line(dataset_name, 96)}." if dataset_name else "."),
        "## Training",
        f"Rewards: {', '.join(one_line(reward, 96) for reward in config.reward_names)}. "
        f"KL coefficient {ppo.kl_coef:g}, learning rate {config.learning_rate:g}, {train.rollout_batch_size} answers "
        f"an update of at most {config.sampling.response_length} tokens at temperature "
        f"{config.sampling.temperature:g}, {ppo.num_ppo_epochs} epochs of {ppo.num_mini_batches} mini-batches.",
        _table([row for row in history if "objective/scores" in row]),
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(line for line in lines if line) + "\n"


def _table(updates: Sequence[Mapping[str, Any]]) -> str:
    """First and last update; nothing before the first."""
    if not updates:
        return ""
    first, last = updates[0], updates[-1]
    rows = [f"| {n} | {number(first[n])} | {number(last[n])} |" for n in CURVES if n in first and n in last]
    return "\n".join([f"| | update {first['step']} | update {last['step']} |", "|---|---|---|", *rows])
