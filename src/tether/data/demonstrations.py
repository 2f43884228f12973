"""Demonstrations for SFT, or for the SFT loss in PPO: texts, and which of their tokens are trained on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from tether.config.chat import DataSource
from tether.config.keys import counted
from tether.data.answers import (
    answer_ids,
    before_answer,
    check_answers,
    closing_token,
    last_turn,
    prompt_and_answer,
)
from tether.data.bad_rows import Limit, every, short_enough, usable
from tether.data.collate import collate, plan_micro_batches
from tether.data.forms import given_names, is_given
from tether.data.joined import columns_used, read_datasets
from tether.data.queries import QueryFormat, checked_prompt, encodable, row_queries, text_start
from tether.data.sources import Row
from tether.data.stream import PromptStream
from tether.errors import DataError
from tether.types import Message, MicroBatch, noise_key

Column = Literal["completion", "messages", "text", "chosen"]
"""Columns that may hold the text to train on."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One text to be imitated."""

    row: int
    """Index of the row in its dataset."""
    query_ids: tuple[int, ...]
    """Tokens before the part that is trained on; at least one."""
    response_ids: tuple[int, ...]
    """Tokens that are trained on, including an answer's end token; at least one."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the whole text."""
        return len(self.query_ids) + len(self.response_ids)


@dataclass(frozen=True)
class DemonstrationData:
    """A dataset of demonstrations."""

    demonstrations: list[Demonstration]
    """Demonstrations within the limit, in the order of the dataset; at least one."""
    num_rows: int
    """Number of rows in the dataset."""
    num_too_long: int
    """Number of demonstrations dropped for exceeding the limit."""
    num_unanswered: int = 0
    """Number of rows dropped because their prompt has no answer."""
    num_bad: int = 0
    """Number of rows left out because they cannot be used."""


def load_demonstrations(
    source: DataSource,
    form: QueryFormat,
    limit: Limit,
    *,
    end_ids: Collection[int],
    every_turn: bool = False,
    ends_text: bool = False,
) -> DemonstrationData:
    """Demonstrations of ``source`` as token ids.

    Prompts become the same queries as in ``load_prompts``; an answer is encoded separately and closed by the end token,
    as the policy samples it. Plain text is taken as it is, without chat template or system prompt: all of it is trained
    on, after the BOS that the tokenizer puts before text, or else after its own first token.

    Args:
        source: datasets with columns ``prompt`` and ``completion`` (text, or messages that continue the prompt), else
            ``messages``, else ``text``, else ``chosen``: the better answer of a pair. In each row, the first that is
            not empty counts. Rows of a ``dataset_info.json`` with only a prompt are dropped and counted.
        limit: maximum number of tokens in a demonstration; longer ones are dropped and counted.
        end_ids: ids of the tokens that end an answer of the policy.
        every_turn: whether every turn of the assistant in ``messages`` is a demonstration, and not only the last.
        ends_text: whether plain text is closed by the end token, too.

    Raises:
        ConfigError: a system prompt without a chat template, or answers for a tokenizer without an end token.
        DataError: the source cannot be read or is empty; a row lacks its prompt, answer or text, or has one of the
            wrong type; no demonstration is within the limit. Names the first such rows.
    """
    table, key, tokenizer = read_datasets(source), source.key, form.tokenizer
    name = f"{key}: {table.name}"

    def read(rows: list[Row], places: list[str], numbers: Sequence[int]) -> DemonstrationData:
        drops_unanswered = source.dataset_dir is not None
        unanswered = {i for i, row in enumerate(rows) if drops_unanswered and _has_prompt_alone(row)}
        if len(unanswered) == len(rows):
            raise DataError(
                f"{key}: no row of {table.name} ({counted(len(rows), 'row')}) has an answer; wanted some to train on"
            )
        lacks = "has neither the columns prompt and completion, nor messages, nor text"
        way_out = f"Rename them, or name them by {'data.ptx_columns' if key == 'data.ptx' else 'data.columns'}"
        used = columns_used(rows, _column, name, lacks, way_out)
        read_from = [
            _ReadFrom(i, *each) for i, each in enumerate(zip(rows, places, used, strict=True)) if i not in unanswered
        ]
        plain = [each for each in read_from if each.column == "text"]
        answered = [each for each in read_from if each.column != "text"]
        encoded: list[_Encoded] = []
        if plain:
            closing = [closing_token(tokenizer, end_ids)] if ends_text else []
            encoded += _encoded_texts(plain, tokenizer, closing)
        if answered:
            closing_id = closing_token(tokenizer, end_ids)
            encoded += _encoded_answers(answered, form, closing_id, every_turn=every_turn, source=name)
        demonstrations = [
            Demonstration(numbers[i], tuple(query), tuple(response))
            for i, query, response in sorted(encoded, key=lambda each: each.at)
        ]
        words = {"what": "demonstration", "table": table, "key": key}
        kept = short_enough(demonstrations, lambda each: each.num_tokens, limit, **words)
        num_too_long, num_bad = len(demonstrations) - len(kept), table.num_rows - len(rows)
        return DemonstrationData(kept, table.num_rows, num_too_long, len(unanswered), num_bad)

    return usable(table, source, form.is_chat, read)


def demonstration_batches(
    demonstrations: Sequence[Demonstration],
    step: int,
    *,
    batch_size: int,
    seed: int,
    max_rows: int,
    max_tokens: int | None = None,
) -> list[MicroBatch]:
    """The demonstrations of one optimizer step as padded micro-batches; depends only on the arguments.

    Each demonstration is drawn once per epoch, in a new order each time; batches are full and may straddle epochs, as
    in ``PromptStream``. The tokens to train on are the response of the micro-batches.

    Args:
        step: index of the optimizer step in the run.
        batch_size: number of demonstrations per step.
        seed: the run's seed.
        max_rows: maximum number of demonstrations in a micro-batch.
        max_tokens: maximum number of tokens in a micro-batch, padding included; a longer demonstration forms one by
            itself.
    """
    stream = PromptStream(len(demonstrations), batch_size, noise_key(seed, "ptx", 0, 0))
    drawn = [demonstrations[i] for i, _ in stream.batch(step)]
    queries, responses = [each.query_ids for each in drawn], [each.response_ids for each in drawn]
    plan = plan_micro_batches([len(q) + len(r) for q, r in zip(queries, responses, strict=True)], max_rows, max_tokens)
    return [collate([queries[i] for i in rows], [responses[i] for i in rows], rows) for rows in plan]


def _column(names: Collection[str]) -> Column | None:
    """The column that holds the text to train on, among the names of columns."""
    if "prompt" in names and "completion" in names:
        return "completion"
    return next((name for name in ("messages", "text", "chosen") if name in names), None)


def _has_prompt_alone(row: Row) -> bool:
    """Whether a row has a prompt but no answer to it."""
    return _column(given_names(row)) is None and is_given(row.get("prompt"))


def _split(row: Row, column: str, where: str, *, every_turn: bool) -> list[tuple[str | list[Message], str]]:
    """The prompts of a row, and the answers to them."""
    value, place = row.get(column), f"{where}, {column}"
    if column == "messages":
        before, answer = last_turn(value, place)
        if not before:
            raise DataError(f"{place}: got the assistant's message alone, wanted the conversation that it ends")
        prompt = checked_prompt(before, where)
        earlier = _earlier_turns(prompt, place) if every_turn else []
        return [*earlier, (prompt, _checked(answer, place))]
    if column == "chosen" and not is_given(row.get("prompt")):
        before, answer = before_answer(value, place)
        return [(checked_prompt(before, where), _checked(answer, place))]
    checked_prompt(row.get("prompt"), where)
    prompt, answer = prompt_and_answer(row, column, place)
    return [(checked_prompt(prompt, where), _checked(answer, place))]


def _earlier_turns(messages: Sequence[Message], place: str) -> list[tuple[list[Message], str]]:
    """The assistant's turns with what comes before each; function calls remain part of the prompt."""
    return [
        (list(messages[:i]), _checked(message["content"], f"{place}, message {i}"))
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and i > 0 and not message.get("tool_calls")
    ]


class _ReadFrom(NamedTuple):
    """A row, and what of it is read."""

    at: int
    """Position among the rows."""
    row: Row
    place: str
    """What messages call it."""
    column: Column
    """The column that holds the text to train on."""


class _Encoded(NamedTuple):
    """A demonstration as token ids."""

    at: int
    """Position of its row among the rows."""
    query: list[int]
    response: list[int]


def _encoded_answers(
    read_from: Sequence[_ReadFrom], form: QueryFormat, closing_id: int, *, every_turn: bool, source: str
) -> list[_Encoded]:
    """The answers of rows, after their prompts.

    Args:
        closing_id: id of the end token; see ``closing_token``.
        every_turn: as in ``load_demonstrations``.
        source: the dataset in messages, after its key.
    """
    places, rows, columns = ([getattr(each, name) for each in read_from] for name in ("place", "row", "column"))
    parts = every(partial(_split, every_turn=every_turn), places, rows, columns)
    turns = [(each, *part) for each, own in zip(read_from, parts, strict=True) for part in own]
    origins, prompts, answers = zip(*turns, strict=True)
    check_answers(prompts, [(answer,) for answer in answers], source)
    queries = row_queries(prompts, [each.row for each in origins], form, [each.place for each in origins], source)
    responses = answer_ids(answers, prompts, form, closing_id)
    return [
        _Encoded(each.at, query.ids, response)
        for each, query, response in zip(origins, queries, responses, strict=True)
    ]


def _encoded_texts(
    read_from: Sequence[_ReadFrom], tokenizer: PreTrainedTokenizerBase, closing: Sequence[int]
) -> list[_Encoded]:
    """The plain texts of rows, split after the first token of each.

    Args:
        closing: tokens behind each text.
    """
    places, rows = [each.place for each in read_from], [each.row for each in read_from]
    texts = every(lambda row, where: _checked(row.get("text"), f"{where}, text"), places, rows)
    start = text_start(tokenizer)

    def parts(ids: list[int], where: str) -> tuple[list[int], list[int]]:
        if ids[:1] != start:
            ids = start + ids
        if len(ids) < 2:
            raise DataError(f"{where}, text: wanted at least 2 tokens, as the first is not trained on; got {len(ids)}")
        return ids[:1], [*ids[1:], *closing]

    split = every(parts, places, tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [_Encoded(each.at, *part) for each, part in zip(read_from, split, strict=True)]


def _checked(text: Any, where: str) -> str:
    """``text``, if it is non-empty text that can be encoded."""
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: got {text!r}, wanted text")
    return encodable(text, where)
