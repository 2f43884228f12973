"""What a path to a model holds, and error messages about it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import StrictDataclassError
from peft import PeftConfig
from safetensors import SafetensorError, safe_open
from transformers.utils import find_adapter_config_file

from tether.config.launched import rank
from tether.config.places import why_not_there
from tether.errors import ModelError
from tether.models.checkpoints import is_checkpoint_name, list_checkpoints
from tether.models.gguf import check_gguf, gguf_source

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
BASE = "base"
"""Folder in ``output_dir`` for the base of an adapter that was trained on a GGUF model."""
TOLD = (
    ImportError, OSError, ValueError, RuntimeError, AssertionError, SafetensorError, StrictDataclassError, re.error,
)  # fmt: skip
"""Errors of libraries that say what is wrong with a model's files."""
UNTOLD = (KeyError, AttributeError, TypeError, ArithmeticError)
"""Errors of libraries that do not."""
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
BLOCKS, BLOCK = 256, 4096
"""Number of blocks of a weight file that tell it from others, and their size in bytes."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_model_path(path: str, key: str, *, revision: str | None = None, takes_gguf: bool = False) -> None:
    """Raises ``ModelError`` if ``path`` cannot be a model or an adapter; loads nothing and does not use the network.

    Args:
        key: the configuration key of ``path``, for the message.
        revision: branch, tag or commit on the hub.
        takes_gguf: whether a GGUF file is accepted, which holds a language model and never a head.
    """
    if (why := why_not_there(path)) is not None:
        raise ModelError(f"{key}: {why}")
    if takes_gguf and (source := gguf_source(path)) is not None:
        check_gguf(source, key)
        return
    folder = Path(path)
    if not folder.exists():
        if is_checkpoint_name(folder.name) and folder.parent.is_dir():
            others = [other.name for other in list_checkpoints(folder.parent)]
            held = f"its checkpoints are {', '.join(others)}" if others else "it holds no checkpoints"
            raise ModelError(f"{key}: there is no {folder.name} in the folder {folder.parent}; {held}")
        if not _HUB_ID.fullmatch(path):
            raise ModelError(f"{key}: {path} does not exist; wanted a model folder or a hub id such as org/model")
        names = ("config.json", ADAPTER_CONFIG)
        cached = (try_to_load_from_cache(path, name, revision=revision) for name in names)
        if HF_HUB_OFFLINE and not any(isinstance(file, str) for file in cached):
            at = "" if revision is None else f" at revision {revision}"
            raise ModelError(
                f"{key}: there is no folder {path}, and HF_HUB_OFFLINE is set but the hub cache holds no model of that "
                f"name{at}; correct the path, or download the model first"
            )
        return
    if not folder.is_dir():
        raise ModelError(f"{key}: {path} is a file; wanted the folder of a model")
    if (folder / ADAPTER_CONFIG).is_file():
        _check_weights(folder, ADAPTER_WEIGHTS, key)
        base, at = own_weights(path)
        check_model_path(base, f"{key} (base model of the adapter {path})", revision=at)
    elif (folder / "config.json").is_file():
        _check_weights(folder, MODEL_WEIGHTS, key)
    else:
        raise ModelError(f"{key}: {path} holds neither config.json nor {ADAPTER_CONFIG}; wanted the folder of a model")


def _check_weights(folder: Path, patterns: Iterable[str], key: str) -> None:
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    if not files:
        raise ModelError(f"{key}: {folder} holds no weights; wanted {' or '.join(patterns)}")
    if closed := next((file for file in files if not os.access(file, os.R_OK)), None):
        raise ModelError(f"{key}: {closed} cannot be read: it is a link to nothing, or you may not read it")
    for file in files:
        if file.suffix == ".safetensors":
            _check_header(file, key)


def _check_header(file: Path, key: str) -> None:
    """Raises ``ModelError`` if the file ends before its last tensor, or is no safetensors file."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{key}: {file} is damaged ({error}), as files are whose copy was cut off: copy or download it again"
        ) from error


def is_adapter(path: str, revision: str | None = None) -> bool:
    """Whether ``path`` holds a PEFT adapter rather than a full model."""
    if gguf_source(path) is not None:
        return False
    if Path(path).is_dir():
        return (Path(path) / ADAPTER_CONFIG).is_file()
    with model_errors(path):
        return find_adapter_config_file(path, revision=revision) is not None


def own_weights(path: str, revision: str | None = None) -> tuple[str, str | None]:
    """Path and revision of the full model: ``path`` itself, or the base if ``path`` holds an adapter. A base that a run
    wrote into its own folder is found there, also after the folder has moved.

    Raises:
        ModelError: it is an adapter that names no base.
    """
    if not is_adapter(path, revision):
        return path, revision
    with model_errors(path):
        config = PeftConfig.from_pretrained(path, revision=revision)
    base = config.base_model_name_or_path
    if not base or not isinstance(base, str):
        told = "empty" if not base else repr(base)
        raise ModelError(f"{path}: base_model_name_or_path in {ADAPTER_CONFIG} is {told}; wanted the adapter's base")
    return base_in_place(base, path), config.revision


def base_in_place(base: str, adapter: str) -> str:
    """The path of an adapter's base. A run on a GGUF model writes the base into its folder, beside the adapter or the
    checkpoint; if that folder has moved, the base is no longer where the adapter says.

    Args:
        base: what the adapter says.
        adapter: the adapter's folder.
    """
    if Path(base).is_absolute() and Path(base).name == BASE and not Path(base).exists():
        folder = Path(adapter).resolve()
        beside = (place / BASE for place in (folder, folder.parent))
        return next((str(place) for place in beside if (place / "config.json").is_file()), base)
    return base


def absolute_source(path: str) -> str:
    """The absolute form of a local path; a hub id is returned unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def is_same_model(path: str, other: str) -> bool:
    """Whether two paths hold the same weights: one location, or two folders whose weight files are equal in samples.

    Copies are compared by names, sizes and samples of their bytes, which distinguishes a model from its fine-tuned
    versions without reading all of it.
    """
    if absolute_source(path) == absolute_source(other):
        return True
    files, others = ({f.name: f for f in weight_files(Path(p))} for p in (path, other))
    return bool(files) and files.keys() == others.keys() and all(_same_bytes(f, others[n]) for n, f in files.items())


def _same_bytes(file: Path, other: Path) -> bool:
    if file.stat().st_size != other.stat().st_size:
        return False
    return all(a == b for a, b in zip(_samples(file), _samples(other), strict=True))


def _samples(file: Path) -> Iterator[bytes]:
    """Yields evenly spaced blocks of a file; all of a small file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for offset in range(0, size, max(size // BLOCKS, BLOCK)):
            stream.seek(offset)
            yield stream.read(BLOCK)


def model_digest(path: str) -> str | None:
    """A hash of what ``is_same_model`` compares and of the configuration, including an adapter's base; None for a model
    that is not local. It does not depend on where they lie."""
    folder, digest = Path(path), hashlib.sha256()
    if not folder.exists():
        return None
    found = [folder] if folder.is_file() else weight_files(folder)
    if folder.is_dir() and is_adapter(path):
        found = [folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()]
        base, revision = own_weights(path)
        digest.update((model_digest(base) or f"{base}\0{revision}").encode())
        digest.update(_without_base(folder / ADAPTER_CONFIG))
    if (folder / "config.json").is_file():
        found.append(folder / "config.json")
    for file in found:
        name = "" if folder.is_file() else file.name
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _without_base(settings: Path) -> bytes:
    """An adapter's settings without the path of its base, which may move."""
    read = json.loads(settings.read_text(encoding="utf-8"))
    return json.dumps({**read, "base_model_name_or_path": None}, sort_keys=True).encode()


def downloaded(path: str, revision: str | None, patterns: Iterable[str]) -> Path:
    """The local folder of a model; for a model on the hub, downloads the files that match the patterns."""
    if Path(path).is_dir():
        return Path(path)
    with model_errors(path):
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(patterns)))


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a full model; pickles only if there are no safetensors."""
    for pattern in MODEL_WEIGHTS:
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file, by name; reads only its header."""
    with safe_open(file, framework="pt") as header:
        names = list(header.keys())
        return {name: tuple(header.get_slice(name).get_shape()) for name in names}


def some_of(names: Sequence[str]) -> str:
    """The first three names, for a message."""
    more = f", … ({len(names)} in all)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@contextmanager
def model_errors(path: str) -> Iterator[None]:
    """A context in which files of a model are read, from the hub too, of which the log then tells. Errors that
    libraries raise about them become a ``ModelError`` that names ``path``."""
    if not HF_HUB_OFFLINE and _HUB_ID.fullmatch(path) and not Path(path).exists():
        _tell_of_hub(path)
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: its pickled weights contain more than tensors and could run code when they are read; wanted "
            "safetensors"
        ) from error
    except (*TOLD, *UNTOLD) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        told = " ".join(line.strip() for line in reason[:4])
        if isinstance(error, UNTOLD):  # by a library that took a value of the files as it is
            told = f"its files cannot be read ({type(error).__name__}: {told}); wanted those of a model as saved"
        raise ModelError(f"{path}: {told}") from error


@cache
def _tell_of_hub(name: str) -> None:
    """Logs once what is waited for: without a network, huggingface_hub tries for more than a minute."""
    if rank() == 0:
        logger.info("reading the model %s from the hub (HF_HUB_OFFLINE=1 reads its cache alone)", name)
