"""Language models in llama.cpp's GGUF files, de-quantized by transformers into ordinary models."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tether.errors import ModelError

SUFFIX = ".gguf"

_ON_THE_HUB = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")


@dataclass(frozen=True)
class GgufSource:
    """Location of a GGUF model, as arguments of ``from_pretrained``."""

    folder: str
    """Folder or hub id, which also holds the tokenizer's files if there are any."""
    file: str
    """Name of the file there."""


def gguf_source(path: str) -> GgufSource | None:
    """The GGUF model in ``path``: a ``.gguf`` file, a folder with one and no other model, or ``ORG/NAME/FILE.gguf`` on
    the hub. None if it is something else.

    Raises:
        ModelError: the folder holds several.
    """
    place = Path(path)
    if place.is_file():
        return GgufSource(str(place.parent), place.name) if place.suffix == SUFFIX else None
    if place.is_dir():
        files = sorted(file.name for file in place.glob(f"*{SUFFIX}"))
        if not files or any((place / name).is_file() for name in ("config.json", "adapter_config.json")):
            return None
        if len(files) > 1:
            raise ModelError(f"{path} holds {len(files)} GGUF files; name one of them: {', '.join(files)}")
        return GgufSource(path, files[0])
    named = _ON_THE_HUB.fullmatch(path)
    return GgufSource(named[1], named[2]) if named else None


def place_of(path: str) -> tuple[str, dict[str, str]]:
    """Arguments of ``from_pretrained`` for ``path``: the folder or hub id, and the name of a GGUF file in it."""
    source = gguf_source(path)
    return (path, {}) if source is None else (source.folder, {"gguf_file": source.file})


def check_gguf(source: GgufSource, key: str) -> None:
    """Raises ``ModelError`` if a GGUF model cannot be read.

    Args:
        key: the configuration key of its path, for the message.
    """
    if find_spec("gguf") is None:
        missing = 'which is missing: pip install "tether[gguf]"'
        raise ModelError(f"{key}: {source.file} needs the package gguf, {missing}")
    file = Path(source.folder) / source.file
    if file.is_file():
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{key}: {file} is not a GGUF file despite its name; a GGUF file begins with GGUF")


def own_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer without tokens beyond the model's vocabulary: transformers adds one that many files do not have."""
    if all(token < vocab_size for token in tokenizer.added_tokens_decoder):
        return tokenizer
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] < vocab_size]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)),
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration without its quantization settings, which would prevent the model from being saved."""
    settings = config.to_dict()
    settings.pop("quantization_config", None)
    return type(config).from_dict(settings)


def plain_model(model: PreTrainedModel, attn_implementation: str | None) -> PreTrainedModel:
    """A model that can be saved, with the weights of a de-quantized one, in their type; in eval mode.

    Args:
        attn_implementation: the attention kernel that it was loaded with; None: the default.
    """
    kernel = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    plain = AutoModelForCausalLM.from_config(plain_config(model.config), dtype=model.dtype, **kernel)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval()
