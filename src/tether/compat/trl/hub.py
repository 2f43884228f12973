"""Pushes the policy to the hub, with its card."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, ModelCard

from tether.compat.trl.config import PPOConfig
from tether.report.card import CARD, write_card
from tether.report.text import one_line
from tether.train.hub import model_files
from tether.train.hub import open_repository as open_named

COMMAND = "tether.compat.trl.PPOTrainer(...).train()"
"""The software that made the model, for its card."""


def open_repository(args: PPOConfig, *, token: str | None = None, private: bool | None = None) -> str:
    """Creates the repository to push to, unless it exists; returns its full name.

    Raises:
        ConfigError: the hub is switched off, cannot be reached, or refuses.
    """
    return open_named(
        args.hub_model_id or Path(args.output_dir).absolute().name,
        private=args.hub_private_repo if private is None else private,
        key="push_to_hub",
        token=token or args.hub_token,
    )


def upload(
    args: PPOConfig, repository: str, message: str, *, blocking: bool, token: str | None, revision: str | None
) -> CommitInfo | Future[CommitInfo]:
    """Pushes the policy that is saved in the output folder, its tokenizer and its card."""
    return HfApi(token=token or args.hub_token).upload_folder(
        repo_id=repository,
        folder_path=args.output_dir,
        allow_patterns=model_files(Path(args.output_dir)),
        commit_message=message,
        revision=revision or args.hub_revision,
        run_as_future=not blocking,
    )


def write_model_card(
    args: PPOConfig, *, model_name: str | None, dataset_name: str | None, tags: Sequence[str]
) -> Path:
    """Writes the card of the policy to the output folder, with what the caller adds to it; returns its path."""
    folder = Path(args.output_dir)
    write_card(folder, folder, command=COMMAND)
    path = folder / CARD
    card = ModelCard(path.read_text(encoding="utf-8"))
    card.data.tags = sorted({*card.data.tags, *tags})
    if dataset_name is not None:
        card.data.datasets = [dataset_name]
    if model_name is not None:
        rest = card.text.lstrip().partition("\n")[2]
        card.text = f"# {one_line(model_name, 96)}\n{rest}"
    path.write_text(str(card), encoding="utf-8")
    return path
