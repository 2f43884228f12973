"""Converts the forms that datasets come in to Tether's columns: ``prompt``, ``messages``, ``chosen``, ``rejected``.

    conversations    a list of {from, value}, as in ShareGPT → messages
    transcripts      "\\n\\nHuman: … \\n\\nAssistant: …", as Anthropic's HH-RLHF has them → messages, or for a model
                     without chat template the text up to the last "\\n\\nAssistant:" and the answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tether.data.sources import Row
from tether.errors import DataError
from tether.types import Message

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles by their names in ShareGPT; other names are the same."""
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ANSWER = "\n\nAssistant:"


def plain_rows(rows: Sequence[Row], places: Sequence[str], *, is_chat: bool) -> list[Row]:
    """Rows with every conversation as messages and every transcript split into its two parts.

    Args:
        places: what messages call each row.
        is_chat: whether conversations go through a chat template; otherwise transcripts stay text.

    Raises:
        DataError: a transcript or a conversation cannot be parsed.
    """
    return [_plain_row(row, place, is_chat) for row, place in zip(rows, places, strict=True)]


def _plain_row(row: Row, where: str, is_chat: bool) -> Row:
    row = dict(row)
    if "conversations" in row and row.get("messages") is None:
        row["messages"] = row.pop("conversations")
    for name in ("prompt", "messages", "completion", "chosen", "rejected"):
        if is_shared(row.get(name)):
            row[name] = [_message(turn, f"{where}, {name}") for turn in row[name]]
    answers = [name for name in ("chosen", "rejected") if is_transcript(row.get(name))]
    if is_chat:
        for name in answers:
            row[name] = transcript_messages(row[name], f"{where}, {name}")
        if is_transcript(row.get("prompt")):
            row["prompt"] = transcript_messages(row["prompt"], f"{where}, prompt")
    elif row.get("prompt") is None and answers:
        parts = {name: transcript_parts(row[name], f"{where}, {name}") for name in answers}
        row |= {name: answer for name, (_, answer) in parts.items()}
        prompts = {prompt for prompt, _ in parts.values()}
        if len(prompts) > 1:
            raise DataError(f"{where}: chosen and rejected answer different prompts; wanted two answers to one prompt")
        row["prompt"] = prompts.pop()
    return row


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


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        raise DataError(f"{where}: got the turn {turn!r}, wanted from and value")
    return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
