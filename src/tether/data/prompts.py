"""Any prompt source → queries as token ids, with the row's other columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tether.data.sources import Rows, check_source, read_rows
from tether.errors import ConfigError, DataError
from tether.types import Message, Prompt

__all__ = ["PromptData", "check_source", "checked_prompt", "conversation", "encoded_queries", "load_prompts"]


@dataclass(frozen=True)
class PromptData:
    """A prompt dataset, ready to be answered."""

    prompts: list[Prompt]
    """Prompts within the limit, in the order of the dataset; at least one."""
    num_rows: int
    """Rows that the dataset has."""
    num_too_long: int
    """Rows that were dropped because their query is over the limit."""
    columns: list[str]
    """Names of the other columns; every prompt has all of them, None where its row had none."""
    note: str
    """One line for the start of a run: where the prompts come from, how many are used and how many dropped."""


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    max_prompt_length: int,
    chat_template: Literal["auto", "none"],
    system_prompt: str | None,
    key: str,
) -> PromptData:
    """Prompts of ``source`` as token ids.

    Chat messages go through the tokenizer's chat template, which alone decides on BOS; so does text under ``auto``
    where there is a template, as one user turn. Other text gets the BOS that the tokenizer puts before text, once, and
    none of the tokens that it puts after it. Queries over ``max_prompt_length`` are dropped and counted.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, a folder, or a hub id; with a column ``prompt``, else
            ``messages``, that holds text or chat messages.
        tokenizer: the policy's.
        split: split to read where the source has several.
        max_prompt_length: tokens of the longest query that is kept, chat template included.
        chat_template: ``none`` takes text as it is.
        system_prompt: system message for prompts that bring none.
        key: the configuration key of ``source``, for messages.

    Raises:
        ConfigError: ``system_prompt`` without a chat template to put it in.
        DataError: the source cannot be read or is empty; a row has no prompt, one of another type, or one that already
            ends its answer; no prompt is within the limit. Names the row.
    """
    table = read_rows(source, split=split, key=key)
    if not table.rows:
        raise DataError(f"{key}: {table.name} has no rows")
    column, columns = _columns(table, key)
    places = [f"{key}: {table.where(i)}" for i in range(len(table.rows))]
    sources = [checked_prompt(row.get(column), place) for row, place in zip(table.rows, places, strict=True)]
    texts, queries = encoded_queries(sources, tokenizer, chat_template, system_prompt, places)

    prompts = [
        Prompt(
            i,
            prompt,
            text,
            tuple(ids),
            {name: row.get(name) for name in columns},
            conversation(prompt, tokenizer, chat_template, system_prompt),
        )
        for i, (row, prompt, text, ids) in enumerate(zip(table.rows, sources, texts, queries, strict=True))
        if len(ids) <= max_prompt_length
    ]
    if not prompts:
        raise DataError(
            f"{key}: all {len(queries)} prompts of {table.name} are longer than data.max_prompt_length "
            f"{max_prompt_length}; the shortest has {min(map(len, queries))} tokens"
        )
    num_too_long = len(queries) - len(prompts)
    note = f"{table.name}: {len(prompts)} of {len(queries)} prompts"
    if num_too_long:
        note += f", {num_too_long} dropped as longer than {max_prompt_length} tokens"
    return PromptData(prompts, len(queries), num_too_long, columns, note)


def _columns(table: Rows, key: str) -> tuple[str, list[str]]:
    """The prompt's column and the names of all others, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in table.rows for name in row))
    column = next((name for name in ("prompt", "messages") if name in names), None)
    if column is None:
        got = ", ".join(names) or "none"
        raise DataError(f"{key}: {table.name} has no column prompt or messages; its columns are: {got}. Rename one")
    return column, [name for name in names if name != column]


def checked_prompt(value: Any, where: str) -> str | list[Message]:
    """A row's prompt as text or chat messages.

    Raises:
        DataError: it is missing, of another type, or already ends its answer; ``where`` names the row.
    """
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{where} has no prompt: got {value!r}, wanted text or a list of chat messages")
    if isinstance(value, str):
        return _encodable(value, where)
    if not isinstance(value, Sequence):
        raise DataError(f"{where}: the prompt is a {type(value).__name__}, wanted text or a list of chat messages")
    messages = [_message(message, f"{where}, message {j}") for j, message in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the prompt already ends its answer: its last message is the assistant's. "
            "Remove that message, the policy is to write it"
        )
    if not messages[-1]["content"].strip():
        raise DataError(f"{where} has no prompt: the content of its last message is empty")
    return messages


def _message(message: Any, where: str) -> Message:
    """One chat message, without the keys that columnar files fill with nulls."""
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: got {type(message).__name__}, wanted an object with role and content")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise DataError(f"{where}: {name} is {message.get(name)!r}, wanted text")
    _encodable(message["content"], where)
    return {name: value for name, value in message.items() if value is not None}


def _encodable(text: str, where: str) -> str:
    """``text``, if it can be written as UTF-8, which tokenizers read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the prompt holds {text[error.start]!r} at character {error.start}, half of a surrogate pair, "
            "which is no text. Mend the row"
        ) from error
    return text


def encoded_queries(
    sources: Sequence[str | list[Message]],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: Literal["auto", "none"],
    system_prompt: str | None,
    places: Sequence[str],
) -> tuple[list[str], list[list[int]]]:
    """Prompts as queries: their text, and their token ids.

    Args:
        sources: prompts as ``checked_prompt`` returns them.
        places: the row of each prompt, for messages.

    Raises:
        ConfigError, DataError: as ``load_prompts``.
    """
    conversations = [conversation(source, tokenizer, chat_template, system_prompt) for source in sources]
    plain = [messages is None for messages in conversations]
    if system_prompt is not None and any(plain):
        why = "the tokenizer has none" if tokenizer.chat_template is None else "data.chat_template is none"
        raise ConfigError(
            f"data.system_prompt needs a chat template for prompts that are text, and {why}: "
            "leave it out, or put it into the prompts"
        )
    texts = [
        source if messages is None else _rendered(messages, tokenizer, place)
        for source, messages, place in zip(sources, conversations, places, strict=True)
    ]
    bos = _bos_ids(tokenizer)
    queries = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for i, (ids, is_plain, place) in enumerate(zip(queries, plain, places, strict=True)):
        _check_query(ids, tokenizer, place)
        if is_plain and bos and ids[:1] != bos:
            texts[i], queries[i] = tokenizer.bos_token + texts[i], bos + ids
    return texts, queries


def conversation(
    source: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: Literal["auto", "none"],
    system_prompt: str | None,
) -> list[Message] | None:
    """The chat messages that a prompt becomes, or None if it is text that is taken as it is.

    Args:
        tokenizer: the policy's.
        system_prompt: system message for prompts that bring none.
    """
    if isinstance(source, str):
        if chat_template == "none" or tokenizer.chat_template is None:
            return None
        source = [{"role": "user", "content": source}]
    if system_prompt is not None and all(message["role"] != "system" for message in source):
        return [{"role": "system", "content": system_prompt}, *source]
    return list(source)


def _rendered(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    """The chat template's text up to where the assistant's turn begins."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template. "
            "Use prompts that are text, or give the model's tokenizer a chat template"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise whatever their authors chose
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"{where}: the chat template refuses messages of the roles {roles}: {error}") from error


def _bos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS that the tokenizer puts before text, if it does."""
    bos = [tokenizer.bos_token_id]
    return bos if tokenizer("")["input_ids"][:1] == bos else []


def _check_query(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    if len(ids) == 0:
        raise DataError(f"{where} has no prompt: its text holds nothing that the tokenizer knows")
    if ids[-1] == tokenizer.eos_token_id:
        raise DataError(
            f"{where}: the prompt already ends its answer: its last token is the end token {tokenizer.eos_token}. "
            "Remove it from the row, or from the end of the chat template"
        )
