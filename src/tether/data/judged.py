"""Answers for reward sources to judge: a file of preference pairs, or of prompts with one answer each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.config.chat import DataSource
from tether.data.answers import check_answers, prompt_and_answer
from tether.data.bad_rows import every, usable
from tether.data.forms import is_given
from tether.data.joined import column_names, read_datasets
from tether.data.pairs import check_prompts, pair_texts
from tether.data.queries import checked_prompt, encodable
from tether.data.sources import Row, Rows
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


def load_judged(source: DataSource, *, is_chat: bool) -> JudgedData:
    """The answers in ``source``.

    Args:
        source: with columns ``chosen`` and ``rejected`` it holds pairs: answers to ``prompt``, or whole texts,
            conversations or transcripts if there is no ``prompt``. Otherwise it holds answers: ``response`` or
            ``completion`` to ``prompt``, or ``messages`` that end with the assistant's; in each row, the first of them
            that is there counts.
        is_chat: whether prompts go through a chat template; transcripts then become messages.

    Raises:
        DataError: the source cannot be read, has no rows or no such columns; a row lacks its prompt or answer, or has
            one of the wrong type. Names the first such rows.
    """
    table, key = read_datasets(source), source.key

    def read(plain: list[Row], places: list[str], _: Sequence[int]) -> JudgedData:
        names = column_names(plain)
        is_pairs = {"chosen", "rejected"} <= set(names)
        usual = "" if is_pairs else _answer_column(table, names, source)
        answers = [] if is_pairs else [_own_answer_column(row) or usual for row in plain]
        used = {"prompt", "chosen", "rejected"} if is_pairs else {"prompt", *answers}
        columns = [name for name in names if name not in used]
        texts = every(pair_texts, places, plain) if is_pairs else every(_answered, places, plain, answers)
        rows = [
            JudgedRow(prompt, tuple(own), {name: row.get(name) for name in columns}, place)
            for (prompt, *own), row, place in zip(texts, plain, places, strict=True)
        ]
        prompts, name = [row.prompt for row in rows], f"{key}: {table.name}"
        check_prompts(prompts, names, places, name)
        if is_pairs:  # answers of a policy are judged as they are
            check_answers(prompts, [row.answers for row in rows], name)
        return JudgedData(table.name, is_pairs, rows, columns)

    return usable(table, source, is_chat, read)


def checked_answer(value: Any, where: str) -> str:
    """An answer, which may be empty.

    Raises:
        DataError: it is not text, or cannot be encoded; ``where`` names it.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: an answer is a {type(value).__name__}, wanted text")
    return encodable(value, where)


def _answered(row: Row, column: str, where: str) -> tuple[str | list[Message], str]:
    """The prompt of a row, and its answer."""
    prompt, answer = prompt_and_answer(row, column, f"{where}, {column}")
    return checked_prompt(prompt, where), checked_answer(answer, where)


def _own_answer_column(row: Row) -> str | None:
    """The column that holds a row's answer, which beside a prompt may be empty text; None if it has none."""
    may_be_empty = is_given(row.get("prompt"))
    values = {name: row.get(name) for name in ANSWER_COLUMNS}
    return next((name for name, value in values.items() if is_given(value) or (may_be_empty and value == "")), None)


def _answer_column(table: Rows, names: list[str], source: DataSource) -> str:
    """The column that holds the answers."""
    for name in ANSWER_COLUMNS:
        if name in names:
            return name
    named = f", or name them by {source.columns_key}: {{prompt: …, completion: …}}" if source.columns_key else ""
    raise DataError(
        f"{source.key}: {table.name} has neither chosen and rejected nor {' nor '.join(ANSWER_COLUMNS)}; its columns "
        f"are: {', '.join(names)}. Rename them{named}"
    )
