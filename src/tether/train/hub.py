"""Pushes saved models to the Hugging Face hub. A run uses the token of the environment or of `hf auth login`."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from httpx2 import HTTPError, TransportError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors import safe_open

from tether.errors import ConfigError, HubError
from tether.models.paths import ADAPTER_CONFIG, model_errors, some_of
from tether.models.saving import MANIFEST, files_written
from tether.report.card import CARD, without_answers
from tether.report.read import FINISHED
from tether.report.text import one_line

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
"""Patterns of the files pushed from a folder without a manifest, not from folders within it."""
REFUSED = (HTTPError, LocalTokenNotFoundError, OSError, ValueError)
"""Errors of a hub that cannot be reached, or refuses."""
TEMPLATES = "additional_chat_templates"
"""Folder in which transformers saves the chat templates of a tokenizer that has several."""


def open_repository(name: str, *, private: bool | None, key: str, token: str | None = None) -> str:
    """Creates the model repository to push to, unless it exists; returns its full name.

    Args:
        name: name with or without its owner; by default, the owner of the token.
        private: whether a new repository is private; None: the owner's default.
        key: the key that requested it, for messages.
        token: used instead of the default token.

    Raises:
        ConfigError: the hub is switched off, cannot be reached, or rejects the request.
    """
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{key}: HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or push later")
    try:
        return HfApi(token=token).create_repo(name, private=private, exist_ok=True).repo_id
    except REFUSED as error:
        login = "Log in with `hf auth login` or set HF_TOKEN to a token with write access, and check the name"
        network = f"{constants.ENDPOINT} cannot be reached: check the network, proxies and HF_ENDPOINT, or push later"
        way_out = network if isinstance(error, TransportError) else login
        raise ConfigError(
            f"{key}: repository {name} could not be opened on the hub: {_reason(error)}. {way_out}"
        ) from error


def push(folder: Path, repository: str, *, with_answers: bool = True) -> str:
    """Uploads the model in a folder, its tokenizer and its card; returns the URL of the commit.

    The state for resuming, metrics.jsonl and samples.jsonl are not uploaded. The card of a PPO run shows the start of
    up to three held-out prompts and their answers, and some rows of its metrics.

    Args:
        with_answers: whether the card keeps those prompts and answers.

    Raises:
        ConfigError: the folder contains no model.
        HubError: the upload failed; the folder is unchanged.
    """
    files = model_files(folder)
    message, api, card = f"{folder.name}, by Tether", HfApi(), folder / CARD
    try:
        if not with_answers and card.is_file():
            text = without_answers(card.read_text(encoding="utf-8"))
            api.upload_file(
                repo_id=repository, path_or_fileobj=text.encode(), path_in_repo=CARD, commit_message=f"{message}: card"
            )
            files = [name for name in files if name != CARD]
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=files, commit_message=message
        )
    except REFUSED as error:
        raise HubError(
            f"{folder} could not be pushed to {repository}: {_reason(error)}. The model is complete in its folder; "
            f"`tether push {folder} --to {repository}{'' if with_answers else ' --no_samples'}` tries again"
        ) from error
    return commit.commit_url


def model_files(folder: Path) -> list[str]:
    """The files that belong to the model in a folder: those listed in its manifest, or those of ``MODEL_FILES``.

    Raises:
        ConfigError: it is not a folder, contains no model, or no longer has all files of its model.
        ModelError: a file of weights is damaged.
    """
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(f"{folder} holds no model; wanted a run's output folder, a checkpoint, or a merged model")
    names = [name for name in files_written(folder) if name not in (MANIFEST, FINISHED)]
    files = [name for name in names if str(Path(name).parent) in (".", TEMPLATES)]
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ConfigError(f"{folder} no longer holds {some_of(missing)}, which {MANIFEST} lists; wanted a whole model")
    if not files:
        found = [*chain.from_iterable(map(folder.glob, MODEL_FILES)), *folder.glob(f"{TEMPLATES}/*.jinja")]
        files = [path.relative_to(folder).as_posix() for path in sorted(found) if path.is_file()]
        if not any(name.endswith(".safetensors") for name in files):
            raise ConfigError(
                f"{folder} holds no weights as safetensors, and only those are pushed: load the model with "
                "transformers, and save it again"
            )
    for name in files:
        if name.endswith(".safetensors"):
            with model_errors(str(folder / name)), safe_open(folder / name, framework="pt"):
                pass
    return files


def unreachable_base(folder: Path) -> str | None:
    """The base of an adapter if it is a local path, which others cannot load; otherwise None."""
    settings = folder / ADAPTER_CONFIG
    if not settings.is_file():
        return None
    with model_errors(str(settings)):
        base = json.loads(settings.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return base if base and Path(base).exists() else None


def _reason(error: Exception) -> str:
    return one_line(str(error), 300) or type(error).__name__
