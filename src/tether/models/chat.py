"""Chat templates of tokenizers: named ones for models without a template, and the token that ends a turn."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.errors import ConfigError

FOLDER = Path(__file__).with_name("chat_templates")
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
"""Templates that ``data.chat_template`` knows by name."""
LLAMAFACTORY = tuple(sorted(f"llamafactory/{path.stem}" for path in FOLDER.glob("llamafactory/*.jinja")))
"""LLaMA-Factory's versions of templates, where its text differs: it encodes a conversation piece by piece."""
TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
}
"""Strings in a template that must be single tokens, as otherwise the model could not end its answers."""
_QUESTION, _ANSWER = "question", "answer"


def check_template(chat_template: str) -> None:
    """Raises ``ConfigError`` unless ``data.chat_template`` is auto, none, a known name, or an existing file."""
    if chat_template not in ("auto", "none"):
        _template_text(chat_template)


def templated(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, text: str | None = None
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with the template of ``data.chat_template``; the tokenizer itself for auto and none.

    If the template ends an answer with a special token, that becomes the tokenizer's end token.

    Args:
        text: the template's text, if it is known already.

    Raises:
        ConfigError: the template does not exist, or needs tokens that the tokenizer lacks.
    """
    if chat_template in ("auto", "none"):
        return tokenizer
    text, vocabulary = text or _template_text(chat_template), tokenizer.get_vocab()
    if missing := [token for token in TOKENS.get(chat_template, ()) if token not in vocabulary]:
        raise ConfigError(
            f"data.chat_template: {chat_template} needs {' and '.join(missing)} as tokens, which the tokenizer lacks. "
            "Take a template without tokens of its own (alpaca, vicuna, zephyr), or add them to the model"
        )
    own = copy.deepcopy(tokenizer)
    own.chat_template = f"{_leads(tokenizer)}{text}" if chat_template in LLAMAFACTORY else text
    _check_rendered(own, chat_template)
    end = turn_end(own)
    if end is not None:
        own.eos_token = own.convert_ids_to_tokens(end)
    return own


def _leads(tokenizer: PreTrainedTokenizerBase) -> str:
    """Sets the leads of the pieces in LLaMA-Factory's templates, so that a text has the same tokens as its pieces.

    A lead is a space for tokenizers that prepend one to every text, as SentencePiece's do, and empty for others. After
    a special token, some of these tokenizers add the space by themselves.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def lead(before: str) -> str:
        wanted = ids(before) + ids("b")
        return next((blank for blank in ("", " ") if ids(f"{before}{blank}b") == wanted), "")

    after_text, after_token = lead("."), lead(tokenizer.eos_token or "")
    return f"{{%- set lead, lead_after_token = {after_text!r}, {after_token!r} -%}}"


def _check_rendered(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ``ConfigError`` if a template cannot be rendered, or leaves out the user's message."""
    turns = [{"role": "user", "content": _QUESTION}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise whatever their authors chose
        raise ConfigError(f"data.chat_template: {name} refuses a lone user turn: {error}") from error
    if _QUESTION not in text.lower():
        raise ConfigError(f"data.chat_template: {name} writes {text!r} for a user turn, without the user's text")


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts right after an answer; None without template or such a token."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # templates raise whatever their authors chose; rows that they refuse are reported individually
        return None
    after = text.rpartition(_ANSWER)[2].lstrip()
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found = ids[0] if ids and ids[0] in special else None
    return None if found is None or found == tokenizer.unk_token_id else found


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if the tokenizer's chat template does not use an argument."""
    if kwargs and tokenizer.chat_template is None:
        raise ConfigError("data.chat_template_kwargs: the tokenizer has no chat template to take them; leave them out")
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template does not use it; correct its name, or leave "
                "it out"
            )


def _template_text(chat_template: str) -> str:
    if chat_template in (*NAMES, *LLAMAFACTORY):
        return (FOLDER / f"{chat_template}.jinja").read_text(encoding="utf-8").rstrip("\n")
    path = Path(chat_template).expanduser()
    if path.suffix not in (".jinja", ".jinja2"):
        raise ConfigError(
            f"data.chat_template: got {chat_template}, wanted auto, none, a file that ends in .jinja, or one of "
            f"{', '.join(NAMES)}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: {chat_template} cannot be read: {error}") from error
