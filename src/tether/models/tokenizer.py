"""Loads tokenizers, and determines which tokens end an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from tether.errors import ConfigError, ModelError
from tether.models.chat import turn_end
from tether.models.gguf import own_tokens, place_of
from tether.models.loading import load_config
from tether.models.paths import (
    is_adapter,
    model_errors,
    own_weights,
)

MISTRAL = "MistralCommonBackend"
"""transformers' wrapper class for mistral-common's tokenizers."""
_NO_WORDS = (
    "no tokenizer with a vocabulary is there; wanted that of the model, beside its weights as its save_pretrained "
    "writes it"
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model, or of the base for an adapter without one.

    It is not changed: padding never reaches a model here, so a tokenizer needs no pad token.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    code, is_local = {"trust_remote_code": trust_remote_code}, Path(path).exists()
    brings_none = is_local and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES)
    if brings_none and is_adapter(path):
        base, at = own_weights(path)
        return load_tokenizer(base, revision=at, **code)
    place, file = place_of(path)
    options = {"revision": revision, **code, **file}
    with model_errors(path):
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
        except (OSError, ValueError) as error:
            if brings_none and not file:
                raise ModelError(f"{path}: {_NO_WORDS}") from error
            if isinstance(error, ValueError) or is_local or not is_adapter(path, revision):
                raise
            base, at = own_weights(path, revision)
            return load_tokenizer(base, revision=at, **code)
    if type(tokenizer).__name__ == MISTRAL:
        tokenizer = _without_mistral_common(path, options)
    check_words(tokenizer, path)
    if not file:
        return tokenizer
    return own_tokens(tokenizer, load_config(path, revision=revision).get_text_config().vocab_size)


def check_words(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ``ModelError`` if the tokenizer has no vocabulary. Where there is no file of one, transformers makes a
    tokenizer of special tokens alone for many models, at most with the mark that begins a word: it reads every text as
    unknown tokens, or as none."""
    words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens) - tokenizer.get_added_vocab().keys()
    if len(words) < 2:
        raise ModelError(f"{name}: {_NO_WORDS}")


def _without_mistral_common(path: str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in ``path`` from the files that transformers reads without mistral-common.

    If that package is installed (vLLM depends on it), transformers uses its tokenizer for every model that has a
    tekken.json. That tokenizer has no chat template and does not report its special tokens.

    Raises:
        ModelError: there are no such files, or this release of transformers offers no choice.
    """
    try:
        with model_errors(path):
            tokenizer = AutoTokenizer.from_pretrained(path, mistral_format=False, **options)
    except ModelError as error:
        raise ModelError(
            f"{path}: its tokenizer is in tekken.json, for mistral-common, and cannot be read without it ({error}); "
            "wanted tokenizer.json and tokenizer_config.json beside it, with a chat template: add those of a copy of "
            "the model in the transformers format"
        ) from error
    if type(tokenizer).__name__ == MISTRAL:
        raise ModelError(
            f"{path}: transformers reads its tokenizer with mistral-common, which has no chat template. Take the model "
            "from a folder without tekken.json, uninstall mistral-common, or update transformers"
        )
    return tokenizer


def load_generation_config(path: str, *, revision: str | None = None) -> GenerationConfig | None:
    """Loads the generation config of the model in ``path``, or of the adapter's base; None if there is none.

    Raises:
        ModelError: there is one in a folder, and it cannot be read.
    """
    for place, at in dict.fromkeys([(path, revision), own_weights(path, revision)]):
        folder = place_of(place)[0]
        try:
            with model_errors(place):
                read = GenerationConfig.from_pretrained(folder, revision=at)
        except ModelError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            if (file := Path(folder) / GENERATION_CONFIG_NAME).is_file():
                told = f"{file}: cannot be read, but may name the tokens that end answers"
                raise ModelError(f"{told}: {error.__cause__}") from error
            continue
        ends = read.eos_token_id
        if ends is not None and not all(isinstance(end, int) for end in (ends if isinstance(ends, list) else [ends])):
            raise ModelError(
                f"{place}: {GENERATION_CONFIG_NAME} has eos_token_id {ends!r}; wanted an id, or a list of ids"
            )
        return read
    return None


def configured_ends(generation: GenerationConfig | None) -> set[int]:
    """The end tokens that a generation config names."""
    ends = getattr(generation, "eos_token_id", None)
    return {ends} if isinstance(ends, int) else set(ends or ())


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None, stop_token: str | None
) -> frozenset[int]:
    """Tokens that end an answer in a run.

    Args:
        generation_config: as in ``end_token_ids``.
        stop_token: ``sampling.stop_token``: ``eos``, one token, or None if only the length ends an answer.

    Raises:
        ConfigError: ``stop_token`` is not one token, or the model has no end token.
    """
    if stop_token is None:
        return frozenset()
    if stop_token != "eos":
        return frozenset({_token_id(tokenizer, stop_token)})
    try:
        return end_token_ids(tokenizer, generation_config)
    except ConfigError as error:
        raise ConfigError(
            f"sampling.stop_token eos: {error}, or sampling.stop_token to the token that ends an answer, or to null"
        ) from error


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> frozenset[int]:
    """The end tokens of a model; at least one.

    Args:
        generation_config: the policy's; its end tokens are used besides the tokenizer's and the chat template's.

    Raises:
        ConfigError: the model has no end token.
    """
    ends = configured_ends(generation_config)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    if (closing := turn_end(tokenizer)) is not None:
        ends.add(closing)
    if not ends:
        raise ConfigError(
            "neither the model's generation config nor its tokenizer has an end token; set eos_token in the tokenizer"
        )
    return frozenset(ends)


def end_at(model: PreTrainedModel | PeftModel, stops: Collection[int]) -> None:
    """Makes the model's generation config end answers at all of these tokens, also after saving and loading.

    transformers refuses to save a changed config with sampling settings but without ``do_sample``, so this sets it.
    """
    generation = model.generation_config
    ends = configured_ends(generation)
    if not ends >= set(stops):
        generation.eos_token_id = sorted(ends | set(stops))
        try:
            generation.validate(strict=True)
        except ValueError:
            generation.do_sample = True


def _token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    vocabulary = tokenizer.get_vocab()
    if text in vocabulary:
        return vocabulary[text]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ConfigError(
            f"sampling.stop_token {text!r}: got {tokenizer.convert_ids_to_tokens(ids)} from the tokenizer, wanted one "
            "token of its vocabulary"
        )
    return ids[0]
