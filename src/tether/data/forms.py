"""Converts the forms that datasets come in to Tether's columns: ``prompt``, ``messages``, ``chosen``, ``rejected``.

    JSON text        a list of messages as text, in columns of files that have no lists → messages
    conversations    a list of {from, value}, as in ShareGPT → messages
    parts            content that is a list of texts, as the APIs have it → text
    calls            of functions, with arguments as JSON text, as the APIs have them → with an object
    transcripts      "\\n\\nHuman: … \\n\\nAssistant: …", as Anthropic's HH-RLHF has them → messages, or for a model
                     without chat template the text up to the last "\\n\\nAssistant:" and the answer
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from tether.data.sources import Row
from tether.errors import DataError
from tether.types import Message

ROLES = ("system", "user", "assistant", "tool")
"""Roles that every chat template may be given."""
_SPELLINGS = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "chatbot", "ai"), "assistant"),
}
"""Roles by other names that datasets have for them."""
_SHARED = {"observation": "tool", "function_response": "tool"}
"""Roles by further names in ShareGPT's format."""
_CHATS = ("prompt", "messages", "completion", "response", "chosen", "rejected")
"""Columns that may hold chat messages."""
_ANSWERS = ("completion", "response", "chosen", "rejected")
"""Columns that may hold an answer to the prompt."""
_OBJECTS = re.compile(r"\s*\[\s*\{")
_KEYS = tuple(re.compile(rf"['\"]({names})['\"]\s*:") for names in ("role|from", "content|value|tool_calls"))
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ANSWER = "\n\nAssistant:"


def plain_row(row: Row, where: str, *, is_chat: bool) -> Row:
    """A row with every conversation as messages, every transcript split into its two parts, and a prompt under that
    name if it has an answer, too.

    Args:
        where: what messages call the row.
        is_chat: whether conversations go through a chat template; otherwise transcripts stay text.

    Raises:
        DataError: a transcript or a conversation cannot be parsed.
    """
    row = dict(row)
    if is_given(row.get("conversations")) and not is_given(row.get("messages")):
        row["messages"] = row.pop("conversations")
    for name in _CHATS:
        if name in row:
            row[name] = messages(row[name], f"{where}, {name}")
    has_answer = any(is_given(row.get(name)) for name in _ANSWERS)
    if has_answer and not is_given(row.get("prompt")) and _is_open(row.get("messages")):
        row["prompt"] = row.pop("messages")
    answers = [name for name in ("chosen", "rejected") if is_transcript(row.get(name))]
    if is_chat:
        for name in answers:
            row[name] = transcript_messages(row[name], f"{where}, {name}")
        if is_transcript(row.get("prompt")):
            row["prompt"] = transcript_messages(row["prompt"], f"{where}, prompt")
    elif answers and not is_given(row.get("prompt")):
        parts = {name: transcript_parts(row[name], f"{where}, {name}") for name in answers}
        row |= {name: answer for name, (_, answer) in parts.items()}
        prompts = {prompt for prompt, _ in parts.values()}
        if len(prompts) > 1:
            raise DataError(f"{where}: chosen and rejected answer different prompts; wanted two answers to one prompt")
        row["prompt"] = prompts.pop()
    return row


def is_given(value: Any) -> bool:
    """Whether a column holds something in a row: neither null, nor blank text, nor an empty list."""
    if isinstance(value, str | list):
        return bool(value.strip() if isinstance(value, str) else value)
    return value is not None


def given_names(row: Row) -> list[str]:
    """Names of the columns that hold something in a row."""
    return [name for name, value in row.items() if is_given(value)]


def messages(value: Any, where: str) -> Any:
    """Chat messages with our keys, our names of roles and text as content; what is no list of messages, as it is.

    Raises:
        DataError: JSON text or a turn cannot be parsed; ``where`` names it.
    """
    turns = listed(value, where)
    if not isinstance(turns, list):
        return turns
    return [_shared(turn, where) if is_shared(turns) else _message(turn, where) for turn in turns]


def listed(value: Any, where: str) -> Any:
    """The list of messages that ``value`` holds as JSON text; every other value as it is, also text that goes on after
    such a list, and lists of other objects.

    Raises:
        DataError: text that looks like such a list is not JSON; ``where`` names it.
    """
    if not isinstance(value, str) or not _OBJECTS.match(value) or not all(key.search(value) for key in _KEYS):
        return value
    text = value.strip()
    try:
        turns, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}; wanted text, or a JSON list of chat messages") from error
    return turns if end == len(text) and any(map(_is_turn, turns)) else value


def _is_turn(item: Any) -> bool:
    """Whether an object has the keys of a message, or of a turn in ShareGPT's format."""
    if not isinstance(item, Mapping):
        return False
    is_shared = isinstance(item.get("from"), str) and isinstance(item.get("value"), str)
    return is_shared or ("role" in item and not item.keys().isdisjoint(("content", "tool_calls")))


def decoded(value: Any, where: str) -> Any:
    """``value``, or what it holds as JSON text; None for blank text.

    Raises:
        DataError: text is not JSON; ``where`` names it.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:  # thousands of brackets are the latter
        raise DataError(f"{where}: not JSON: {error}") from error


def as_text(content: Any) -> Any:
    """The text of content that is a list of text parts, one after the other; other content as it is."""
    if isinstance(content, list) and content and _other_part(content) is None:
        return "".join(part["text"] for part in content)
    return content


def content_told(content: Any) -> str:
    """What is wrong with content that is not text."""
    told = f"content is {reprlib.repr(content)}, wanted text"
    if not isinstance(content, list) or (other := _other_part(content)) is None:
        return told
    part = content[other]
    kind = f"of type {part['type']!r}" if isinstance(part, Mapping) and "type" in part else f"{reprlib.repr(part)}"
    return f'{told}, or parts of {{"type": "text", "text": …}} alone: part {other} is {kind}'


def _other_part(content: Sequence[Any]) -> int | None:
    """Index of the first part that is not text; None if all are."""
    return next(
        (
            i
            for i, part in enumerate(content)
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str)
        ),
        None,
    )


def role_told(role: Any, where: str) -> str:
    """What is wrong with a role that is not known, and the ways out.

    Args:
        where: what messages call the row.
    """
    told = f"the role {role!r} is neither one of {', '.join(ROLES)} nor named in the chat template: rename it"
    if where.startswith("data."):
        told += ", or map it to one by the tags of a dataset_info.json (data.dataset_dir)"
    return told


def is_shared(value: Any) -> bool:
    """Whether a conversation is in ShareGPT's format."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "from" in value[0]


def is_transcript(value: Any) -> bool:
    """Whether a text is a transcript of Human and Assistant turns."""
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def transcript_messages(text: str, where: str) -> list[Message]:
    """The turns of a transcript; one that ends with the assistant's name and no answer ends with the user's turn.

    Raises:
        DataError: a turn other than the last is empty; ``where`` names the row.
    """
    _, *parts = _TURN.split(text)
    roles, contents = parts[::2], [content.strip() for content in parts[1::2]]
    if text.endswith(_ANSWER):
        roles, contents = roles[:-1], contents[:-1]
    if (empty := next((i for i, content in enumerate(contents[:-1]) if not content), None)) is not None:
        raise DataError(f"{where}: turn {empty} of the transcript, the {roles[empty]}'s, is empty")
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[role], "content": content} for role, content in zip(roles, contents, strict=True)]


def transcript_parts(text: str, where: str) -> tuple[str, str]:
    """A transcript up to its last answer, and that answer.

    Raises:
        DataError: it does not end with an answer; ``where`` names the row.
    """
    before, sign, answer = text.rpartition(_ANSWER)
    if not sign or _TURN.search(answer):
        raise DataError(f"{where}: the transcript does not end with the assistant's turn")
    return before + sign, answer


def function_calls(content: Any, where: str) -> list[dict[str, Any]]:
    """Function calls that a turn holds as JSON text, a single call or a list, in the format of chat templates.

    Raises:
        DataError: it is not such text; ``where`` names the turn.
    """
    try:
        calls = json.loads(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: the function call is not JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise DataError(f"{where}: got the function call {call!r}, wanted name and arguments")
    return [{"type": "function", "function": _parsed({"name": c["name"], "arguments": c["arguments"]})} for c in calls]


def tool_calls(value: Any, where: str) -> Any:
    """The ``tool_calls`` of a message, or what they hold as JSON text, with arguments as chat templates expect them.

    Raises:
        DataError: text is not JSON; ``where`` names the message.
    """
    calls = decoded(value, f"{where}, tool_calls")
    return [_parsed(call) for call in calls] if isinstance(calls, list) else _parsed(calls)


def _parsed(call: Any) -> Any:
    """A call of a function with an object as its arguments, which the APIs have as JSON text; blank text is none.

    Text that is no JSON object stays as it is: models write such calls, too.
    """
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _parsed(call["function"])}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _is_open(conversation: Any) -> bool:
    """Whether a conversation waits for an answer."""
    last = conversation[-1] if isinstance(conversation, list) and conversation else None
    return isinstance(last, Mapping) and last.get("role") != "assistant"


def _shared(turn: Any, where: str) -> Message:
    """A turn of ShareGPT's format as a message."""
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        raise DataError(f"{where}: got the turn {turn!r}, wanted from and value")
    if turn["from"] == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": function_calls(turn["value"], where)}
    role = _SHARED.get(turn["from"], turn["from"]) if isinstance(turn["from"], str) else turn["from"]
    return _message({"role": role, "content": turn["value"]}, where)


def _message(message: Any, where: str) -> Any:
    """A message with our name of its role, text as content, and calls as templates expect them; unchecked."""
    if not isinstance(message, Mapping):
        return message
    known = {"role": _role, "content": as_text, "tool_calls": lambda calls: tool_calls(calls, where)}
    return {name: known[name](value) if name in known else value for name, value in message.items()}


def _role(role: Any) -> Any:
    """Our name of a role, if it is known by another one."""
    name = role.strip().lower() if isinstance(role, str) else ""
    return name if name in ROLES else _SPELLINGS.get(name, role)
