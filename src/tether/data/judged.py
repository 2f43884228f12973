"""Answers for reward sources to judge: a file of preference pairs, or of prompts with one answer each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.data.answers import encodable
from tether.data.forms import plain_rows
from tether.data.pairs import check_prompts, pair_texts, prompt_and_answer
from tether.data.prompts import checked_prompt
from tether.data.sources import Rows, read_rows
from tether.errors import DataError
from tether.types import Message

ANSWER_COLUMNS = ("response", "completion", "messages")
"""Columns that may hold an answer, in order of precedence."""


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One row: a prompt and its answer, or its chosen and its rejected answer."""

    prompt: str | list[Message] | None
    """The prompt as in the dataset; None if the answers are whole texts."""
    answers: tuple[str, ...]
    """One answer, or the chosen and the rejected one."""
    columns: Mapping[str, Any]
    """The row's other columns."""
    place: str
    """The row's name in messages."""


@dataclass(frozen=True)
class JudgedData:
    """A file of answers to judge."""

    name: str
    """Its name in messages."""
    is_pairs: bool
    """Whether each row has a chosen and a rejected answer."""
    rows: list[JudgedRow]
    """All rows, in the order of the file; at least one."""
    columns: list[str]
    """Names of the other columns; every row has all of them, with None for missing values."""


def load_judged(source: str, *, split: str, key: str, is_chat: bool, subset: str | None = None) -> JudgedData:
    """The answers in ``source``.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, a folder, or a hub id. With columns ``chosen`` and ``rejected``
            it holds pairs: answers to ``prompt``, or whole texts, conversations or transcripts if there is no
            ``prompt``. Otherwise it holds answers: ``response`` or ``completion`` to ``prompt``, or ``messages`` that
            end with the assistant's.
        split, subset: split and subset to read if the source has several.
        key: name of ``source`` in messages.
        is_chat: whether prompts go through a chat template; transcripts then become messages.

    Raises:
        DataError: the source cannot be read, has no rows or no such columns; a row lacks its prompt or answer, or has
            one of the wrong type. Names the row.
    """
    table = read_rows(source, split=split, key=key, subset=subset, subset_key="--subset")
    if not table.rows:
        raise DataError(f"{key}: {table.name} has no rows")
    places = [f"{key}: {table.where(i)}" for i in range(len(table.rows))]
    plain = plain_rows(table.rows, places, is_chat=is_chat)
    names = list(dict.fromkeys(name for row in plain for name in row))
    is_pairs = {"chosen", "rejected"} <= set(names)
    column = "" if is_pairs else _answer_column(table, names, key)
    used = {"prompt", "chosen", "rejected"} if is_pairs else {"prompt", column}
    columns = [name for name in names if name not in used]
    rows = []
    for row, place in zip(plain, places, strict=True):
        if is_pairs:
            prompt, *answers = pair_texts(row, place)
        else:
            given, answer = prompt_and_answer(row, column, f"{place}, {column}")
            prompt, answers = checked_prompt(given, place), [answer]
        checked = tuple(checked_answer(answer, place) for answer in answers)
        rows.append(JudgedRow(prompt, checked, {name: row.get(name) for name in columns}, place))
    check_prompts([row.prompt for row in rows], names, [row.place for row in rows], f"{key}: {table.name}")
    return JudgedData(table.name, is_pairs, rows, columns)


def checked_answer(value: Any, where: str) -> str:
    """An answer, which may be empty.

    Raises:
        DataError: it is not text, or cannot be encoded; ``where`` names it.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: an answer is a {type(value).__name__}, wanted text")
    return encodable(value, where)


def _answer_column(table: Rows, names: list[str], key: str) -> str:
    """The column that holds the answers."""
    for name in ANSWER_COLUMNS:
        if name in names:
            return name
    raise DataError(
        f"{key}: {table.name} has neither chosen and rejected nor {' nor '.join(ANSWER_COLUMNS)}; its columns are: "
        f"{', '.join(names)}. Rename them"
    )
