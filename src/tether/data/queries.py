"""Prompts of rows as queries: text or chat messages as the policy's token ids."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from tether.data.bad_rows import every
from tether.data.forms import ROLES, content_told, decoded, is_given, role_told
from tether.data.rendering import rendered
from tether.data.sources import Row
from tether.data.typed import TypedTokens
from tether.errors import ConfigError, DataError
from tether.types import Message

PROMPTS_OPTION = "--prompts"
"""The option that names prompts on a command line, as messages call it."""
_QUESTION = "Xyzzy, said he?"
"""A placeholder prompt that no chat template writes by itself."""


@dataclass(frozen=True)
class QueryFormat:
    """How prompts become queries: a tokenizer, and the keys of ``ChatKeys``."""

    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    chat_template: str = "auto"
    """``none`` takes text as it is; otherwise it becomes a turn of the tokenizer's template, if it has one."""
    system_prompt: str | None = None
    """System message for prompts without one."""
    special_tokens: bool = False
    """Whether special tokens in the content of messages are control tokens; otherwise they are encoded as ordinary
    characters. Text that does not go through a template is taken as it is."""
    chat_template_now: str | None = None
    """Date and time for the chat template, as in ``rendered``."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""

    @property
    def is_chat(self) -> bool:
        """Whether text and transcripts become turns of the chat template."""
        return uses_template(self.tokenizer, self.chat_template)

    def conversation(self, source: str | Sequence[Message], system: str | None = None) -> list[Message] | None:
        """The chat messages that a prompt becomes, or None if it is text that is taken as it is.

        Args:
            system: system message in place of ``system_prompt``.
        """
        if isinstance(source, str):
            if not self.is_chat:
                return None
            source = [{"role": "user", "content": source}]
        system = self.system_prompt if system is None else system
        if system is not None and all(message["role"] != "system" for message in source):
            return [{"role": "system", "content": system}, *source]
        return list(source)

    @property
    def why_plain(self) -> str:
        """Why text does not go through a chat template, if it does not."""
        return "the tokenizer has none" if self.tokenizer.chat_template is None else "data.chat_template is none"


class Query(NamedTuple):
    """A prompt as the policy reads it."""

    text: str
    """The text, chat template applied; empty for a whole text."""
    ids: list[int]
    """Its token ids; for a whole text, the token that the tokenizer puts before text."""
    conversation: list[Message] | None
    """The chat messages that it was rendered from, with the system message; None for text that is taken as it is."""


def uses_template(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> bool:
    """Whether text and transcripts become turns of the chat template."""
    return chat_template != "none" and tokenizer.chat_template is not None


def checked_prompt(value: Any, where: str) -> str | list[Message]:
    """A row's prompt as text or chat messages.

    Raises:
        DataError: it is missing, of the wrong type, or already contains the end of its answer; ``where`` names the row.
    """
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{where} has no prompt: got {value!r}, wanted text or a list of chat messages")
    if isinstance(value, str):
        return encodable(value, where)
    if not isinstance(value, Sequence):
        raise DataError(f"{where}: the prompt is a {type(value).__name__}, wanted text or a list of chat messages")
    messages = [_message(message, f"{where}, message {j}") for j, message in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the prompt already ends its answer: its last message is the assistant's. "
            "Remove that message; the policy has to write it"
        )
    if not messages[-1]["content"].strip():
        raise DataError(f"{where} has no prompt: the content of its last message is empty")
    return messages


def _message(message: Any, where: str) -> Message:
    """One chat message, without the keys that columnar files fill with nulls."""
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: got {type(message).__name__}, wanted an object with role and content")
    if message.get("tool_calls"):
        message = {**message, "content": message.get("content") or ""}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where}: role is {message.get('role')!r}, wanted text")
    if not isinstance(message.get("content"), str):
        raise DataError(f"{where}: {content_told(message.get('content'))}")
    for name in ("role", "content"):
        encodable(message[name], where)
    return _without_nulls(message)


def encodable(text: str, where: str) -> str:
    """``text``, if it can be written as UTF-8, which tokenizers read.

    Raises:
        DataError: it holds half of a surrogate pair; ``where`` names it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: got {text[error.start]!r} at character {error.start}, half of a surrogate pair; wanted text"
        ) from error
    return text


def row_queries(
    prompts: Sequence[str | list[Message] | None],
    rows: Sequence[Row],
    form: QueryFormat,
    places: Sequence[str],
    source: str,
) -> list[Query]:
    """``encoded_prompts`` of a dataset, whose prompts must not be in a chat template already.

    Args:
        prompts, rows, places: as in ``encoded_prompts``.
        source: the dataset in messages, after its key.

    Raises:
        ConfigError, DataError: as in ``load_prompts``.
    """
    _check_untemplated(prompts, form, source)
    return encoded_prompts(prompts, rows, form, places)


def encoded_prompts(
    prompts: Sequence[str | list[Message] | None],
    rows: Sequence[Row],
    form: QueryFormat,
    places: Sequence[str],
) -> list[Query]:
    """Prompts as queries, with the system message and the arguments of the chat template that their rows have.

    Args:
        prompts: prompts from ``checked_prompt``; None if answers are whole texts.
        rows: the row of each prompt.
        places: what messages call it.

    Raises:
        ConfigError, DataError: as in ``load_prompts``.
    """
    arguments = _template_arguments(rows, form, places)
    systems = every(partial(_system, form), places, rows, prompts)
    given = [i for i, prompt in enumerate(prompts) if prompt is not None]
    if form.system_prompt is not None and len(given) < len(prompts):
        raise ConfigError(
            "data.system_prompt goes before a prompt, but some rows are whole texts: leave it out"
        )
    queries = [Query("", text_start(form.tokenizer), None) for _ in prompts]
    if given:
        conversations = [form.conversation(prompts[i], systems[i]) for i in given]
        shown = [messages or prompts[i] for i, messages in zip(given, conversations, strict=True)]
        encoded = encoded_queries(shown, form, [places[i] for i in given], [arguments[i] for i in given])
        for i, *query in zip(given, *encoded, conversations, strict=True):
            queries[i] = Query(*query)
    return queries


def encoded_queries(
    sources: Sequence[str | list[Message]],
    form: QueryFormat,
    places: Sequence[str],
    arguments: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[int]]]:
    """Prompts as queries: their text and their token ids.

    Args:
        sources: what ``QueryFormat.conversation`` makes of prompts from ``checked_prompt``, or the text of those that
            are taken as they are.
        places: what messages call the row of each prompt.
        arguments: further arguments of the chat template for each prompt.

    Raises:
        ConfigError, DataError: as in ``load_prompts``.
    """
    tokenizer, plain = form.tokenizer, [isinstance(source, str) for source in sources]
    if form.system_prompt is not None and any(plain):
        name = "data.system_prompt" if _has_keys(places[0]) else "the system prompt (--system, or the run's)"
        raise ConfigError(
            f"{name} needs a chat template for prompts that are text, and {form.why_plain}: "
            "leave it out, or put it into the prompts"
        )
    typed = TypedTokens(tokenizer)
    rows = list(zip(sources, arguments, strict=True))
    taken = [is_plain or form.special_tokens for is_plain in plain]
    hidden = [None if as_is else _hidden(typed, *row) for as_is, row in zip(taken, rows, strict=True)]
    shown = [marked or row for marked, row in zip(hidden, rows, strict=True)]
    texts = every(partial(_rendered, tokenizer, now=form.chat_template_now), places, *zip(*shown, strict=True))
    if False in plain:
        first = plain.index(False)
        _check_shown(tokenizer, arguments[first], places[first], form.chat_template_now)
    bos = text_start(tokenizer)
    queries = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for i, marked in enumerate(hidden):
        if marked is not None:
            texts[i], queries[i] = typed.encoded(texts[i])
    every(partial(_check_query, tokenizer), places, queries)
    for i, (ids, is_plain) in enumerate(zip(queries, plain, strict=True)):
        if is_plain and bos and ids[:1] != bos:
            texts[i], queries[i] = tokenizer.bos_token + texts[i], bos + ids
    return texts, queries


def _hidden(
    typed: TypedTokens, messages: list[Message], arguments: Mapping[str, Any]
) -> tuple[list[Message], Mapping[str, Any]] | None:
    """Messages, and arguments of the chat template, with marks in place of special tokens typed into messages or tools;
    None if there are none."""
    marked, tools = typed.hidden(messages), arguments.get("tools")
    if typed.are_in(tools):
        return marked or messages, {**arguments, "tools": typed.marked(tools)}
    return None if marked is None else (marked, arguments)


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: str | list[Message],
    arguments: Mapping[str, Any],
    where: str,
    now: str | None,
) -> str:
    """The chat template's text up to the beginning of the assistant's turn; text that is no turn, as it is."""
    if isinstance(messages, str):
        return messages
    if tokenizer.chat_template is None:
        way_out = "Use prompts that are text, or a model that has one"
        if _has_keys(where):
            way_out = "Set data.chat_template to one by name (chatml, llama3, …) or file, or use prompts that are text"
        raise DataError(
            f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template. {way_out}"
        )
    for i, role in enumerate(message["role"] for message in messages):
        if role not in ROLES and not (role and re.search(rf"\b{re.escape(role)}\b", str(tokenizer.chat_template))):
            raise DataError(f"{where}: message {i}: {role_told(role, where)}")
    calling = next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)
    if calling is not None and "tool_calls" not in str(tokenizer.chat_template):
        raise DataError(
            f"{where}: message {calling} calls functions (tool_calls), which the chat template does not render: they "
            f"would be lost; {_other_template(where)}write the calls into the content, or remove the row"
        )
    try:
        text = rendered(tokenizer, messages, now, add_generation_prompt=True, **arguments)
    except Exception as error:  # templates raise whatever their authors chose
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"{where}: the chat template refuses messages of the roles {roles}: {error}") from error
    return encodable(text, where)  # roles, tools and template arguments are text as well


def _check_shown(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], where: str, now: str | None
) -> None:
    """Raises ``DataError`` if the chat template leaves out what users say, as one for lists of texts and images does:
    all prompts would be one."""
    turns = [{"role": "user", "content": _QUESTION}]
    try:
        text = rendered(tokenizer, turns, now, add_generation_prompt=True, **arguments)
    except Exception:  # templates raise whatever their authors chose; rows that they refuse are reported individually
        return
    if _QUESTION.lower() not in text.lower():
        raise DataError(
            f"{where}: the chat template writes {reprlib.repr(text)} for a user's turn, without the user's text"
            + ". Set data.chat_template to one by name (chatml, llama3, …) or file" * _has_keys(where)
        )


def _check_query(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], where: str) -> None:
    if len(ids) == 0:
        raise DataError(f"{where} has no prompt: the tokenizer returns no tokens for its text")
    if ids[-1] == tokenizer.eos_token_id:
        raise DataError(
            f"{where}: the prompt already ends its answer: its last token is the end token {tokenizer.eos_token}. "
            "Remove it from the row, or from the end of the chat template"
        )


def text_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer puts before text; empty if there is none."""
    bos = [tokenizer.bos_token_id]
    return bos if tokenizer("")["input_ids"][:1] == bos else []


def _system(form: QueryFormat, row: Row, prompt: str | list[Message] | None, where: str) -> str | None:
    """The system message in a row's column ``system``; None if it has none.

    Raises:
        DataError: it is not text, or its prompt takes none.
    """
    system, where = row.get("system"), f"{where}, system"
    if not is_given(system):
        return None
    ways_out = "leave the column out, or rename it if it is something else"
    if not isinstance(system, str):
        raise DataError(f"{where}: got {reprlib.repr(system)}, wanted the text of the row's system message: {ways_out}")
    if prompt is None:
        raise DataError(f"{where}: a system message goes before a prompt, but the row is a whole text: {ways_out}")
    if form.conversation(prompt) is None:
        template = "set data.chat_template to auto, or to a template by name or file, " * _has_keys(where)
        raise DataError(
            f"{where}: a system message needs a chat template for a prompt that is text, and {form.why_plain}: "
            f"{template}put it into the prompt, {ways_out}"
        )
    return encodable(system, where)


def _template_arguments(rows: Sequence[Row], form: QueryFormat, places: Sequence[str]) -> list[dict[str, Any]]:
    """Arguments of the chat template for each row: those of the run, the row's own ``chat_template_kwargs`` and
    ``tools``.

    Raises:
        DataError: they are of the wrong type, or the chat template does not use tools; names the row.
    """

    def arguments(row: Row, where: str) -> dict[str, Any]:
        own = decoded(row.get("chat_template_kwargs"), f"{where}, chat_template_kwargs") or {}
        if not isinstance(own, Mapping):
            raise DataError(f"{where}, chat_template_kwargs: got {own!r}, wanted an object")
        if tools := _tools(row.get("tools"), form.tokenizer, f"{where}, tools"):
            own = {**own, "tools": tools}
        return {**form.chat_template_kwargs, **{name: value for name, value in own.items() if value is not None}}

    return every(arguments, places, rows)


def _tools(value: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[Any]:
    """The tools of a row, which may be JSON text, all of them or each; empty if it has none."""
    value = decoded(value, where)
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"{where}: got {type(value).__name__}, wanted a list of tools")
    if value and not re.search(r"\btools\b", str(tokenizer.chat_template)):
        raise DataError(
            f"{where}: the chat template does not use tools; {_other_template(where)}leave the column out, or rename it"
        )
    return _without_nulls([decoded(tool, f"{where}, tool {i}") for i, tool in enumerate(value)])


def _check_untemplated(sources: Sequence[str | list[Message] | None], form: QueryFormat, name: str) -> None:
    """Checks that the prompts of a dataset are not in a chat template already, as they would be put into it twice.

    Args:
        sources: prompts from ``checked_prompt``; None where there is none.
        name: the dataset in messages, after its key.

    Raises:
        DataError: all prompts that are text end as the template ends a prompt. Some of many may do so by themselves.
    """
    texts = [source for source in sources if isinstance(source, str)]
    end = _prompt_end(form) if texts and form.is_chat else ""
    if end and all(text.rstrip().endswith(end) for text in texts):
        way_out = "give them without it"
        if name.startswith("data."):
            way_out = "set data.chat_template: none, which takes text as it is, or " + way_out
        raise DataError(
            f"{name}: its prompts are in a chat template already, as they end with {end!r}, and would be put into one "
            f"again: {way_out}"
        )


def _prompt_end(form: QueryFormat) -> str:
    """What the chat template writes behind the text of a user's turn, up to where the answer begins; empty if it writes
    nothing there but blanks, or takes no such turn."""
    turns = [{"role": "user", "content": _QUESTION}]
    try:
        text = rendered(form.tokenizer, turns, form.chat_template_now, add_generation_prompt=True)
    except Exception:  # templates raise whatever their authors chose; rows that they refuse are reported individually
        return ""
    return text.rpartition(_QUESTION)[2].rstrip() if _QUESTION in text else ""


def _has_keys(where: str) -> bool:
    """Whether a row is read for a configuration, and not for the prompts of a command line."""
    return not where.startswith(PROMPTS_OPTION)


def _other_template(where: str) -> str:
    """The way out by another template, where one can be chosen."""
    return "choose one that does (data.chat_template: auto is the model's own, if it has one), " * _has_keys(where)


def _without_nulls(value: Any) -> Any:
    """``value`` without the keys that columnar files fill with nulls because another row has them."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
