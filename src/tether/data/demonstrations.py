"""Demonstrations for SFT, or for the SFT loss in PPO: texts, and which of their tokens are trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tether.config.chat import Sources
from tether.config.keys import counted
from tether.data.answers import (
    answer_ids,
    before_answer,
    check_answers,
    closing_token,
    last_turn,
    prompt_and_answer,
)
from tether.data.bad_rows import every, usable
from tether.data.collate import collate, plan_micro_batches
from tether.data.forms import given_names, is_given
from tether.data.joined import column_names, read_datasets
from tether.data.queries import (
    QueryFormat,
    check_untemplated,
    checked_prompt,
    encodable,
    encoded_queries,
    template_arguments,
    text_start,
)
from tether.data.sources import Row, Rows
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
    source: Sources,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    max_length: int,
    chat_template: str,
    system_prompt: str | None,
    end_ids: Collection[int],
    key: str,
    length_key: str = "data.max_ptx_length",
    every_turn: bool = False,
    ends_text: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template_now: str | None = None,
    dataset_dir: str | None = None,
    max_samples: int | None = None,
    subset: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
    special_tokens: bool = False,
    drops_unanswered: bool = False,
    drop_bad_rows: bool = False,
) -> DemonstrationData:
    """Demonstrations of ``source`` as token ids.

    Prompts become the same queries as in ``load_prompts``; an answer is encoded separately and closed by the end token,
    as the policy samples it. Plain text is taken as it is, without chat template or system prompt: all of it is trained
    on, after the BOS that the tokenizer puts before text, or else after its own first token.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, a folder, or a hub id, or several of these, with columns
            ``prompt`` and ``completion`` (text, or messages that continue the prompt), else ``messages``, else
            ``text``, else ``chosen``: the better answer of a pair. In each row, the first that is not empty counts.
        max_length: maximum number of tokens in a demonstration; longer ones are dropped.
        system_prompt: system message for prompts without one.
        end_ids: ids of the tokens that end an answer of the policy.
        key: the configuration key of ``source``, for messages.
        length_key: the configuration key of ``max_length``, for messages.
        every_turn: whether every turn of the assistant in ``messages`` is a demonstration, and not only the last.
        ends_text: whether plain text is closed by the end token, too.
        chat_template_kwargs, chat_template_now, dataset_dir, max_samples, subset, revision, columns, special_tokens,
            drop_bad_rows: as in ``load_prompts``.
        drops_unanswered: whether rows with only a prompt are dropped and counted instead of being an error.

    Raises:
        ConfigError: ``system_prompt`` without a chat template, or answers for a tokenizer without an end token.
        DataError: the source cannot be read or is empty; a row lacks its prompt, answer or text, or has one of the
            wrong type; no demonstration is within the limit. Names the first such rows.
    """
    table = read_datasets(
        source, split=split, key=key, dataset_dir=dataset_dir, max_samples=max_samples, subset=subset,
        revision=revision, columns=columns,
    )  # fmt: skip
    form = QueryFormat(tokenizer, chat_template, system_prompt, special_tokens, chat_template_now)

    def read(rows: list[Row], places: list[str], numbers: Sequence[int]) -> DemonstrationData:
        unanswered = {i for i, row in enumerate(rows) if drops_unanswered and _has_prompt_alone(row)}
        if len(unanswered) == len(rows):
            raise DataError(
                f"{key}: no row of {table.name} ({counted(len(rows), 'row')}) has an answer; wanted some to train on"
            )
        used = _columns(rows, table, key)
        plain = [i for i, column in enumerate(used) if column == "text"]
        encoded: list[tuple[int, list[int], list[int]]] = []
        if plain:
            closing = [closing_token(tokenizer, end_ids)] if ends_text else []
            texts = _encoded_texts([rows[i] for i in plain], tokenizer, [places[i] for i in plain])
            encoded = [(i, query, response + closing) for i, (query, response) in zip(plain, texts, strict=True)]
        if len(plain) < len(rows):
            closing_id = closing_token(tokenizer, end_ids)
            answered = [i for i, column in enumerate(used) if column != "text" and i not in unanswered]
            columns_of = ([each[i] for i in answered] for each in (places, rows, used))
            parts = every(partial(_split, every_turn=every_turn), *columns_of)
            split_rows = [(i, *part) for i, each in zip(answered, parts, strict=True) for part in each]
            indices, prompts = [i for i, _, _ in split_rows], [prompt for _, prompt, _ in split_rows]
            check_answers(prompts, [(answer,) for _, _, answer in split_rows], f"{key}: {table.name}")
            check_untemplated(prompts, form, f"{key}: {table.name}")
            arguments = template_arguments(rows, tokenizer, chat_template_kwargs, places)
            _, queries = encoded_queries(
                prompts, form, [places[i] for i in indices], [arguments[i] for i in indices]
            )
            answers = answer_ids([answer for _, _, answer in split_rows], prompts, form, closing_id)
            encoded = sorted([*encoded, *zip(indices, queries, answers, strict=True)], key=lambda each: each[0])
        kept = [
            Demonstration(numbers[i], tuple(query), tuple(response))
            for i, query, response in encoded
            if len(query) + len(response) <= max_length
        ]
        if not kept:
            shortest = min(len(query) + len(response) for _, query, response in encoded)
            raise DataError(
                f"{key}: every demonstration of {table.name} ({counted(len(encoded), 'demonstration')}) is longer than "
                f"{length_key} {max_length}; the shortest has {shortest} tokens"
            )
        return DemonstrationData(kept, len(rows), len(encoded) - len(kept), len(unanswered))

    data, num_bad = usable(table, key, form.is_chat, read, drops=drop_bad_rows)
    return replace(data, num_rows=data.num_rows + num_bad, num_bad=num_bad)


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


def _columns(rows: Sequence[Row], table: Rows, key: str) -> list[Column]:
    """The column of each row that holds the text to train on; for a row that has none, the one that another row has."""
    found = [_column(given_names(row)) for row in rows]
    names = column_names(rows)
    usual = _column(names)
    if usual is not None:
        return [column or usual for column in found]
    got = ", ".join(names) or "none"
    raise DataError(
        f"{key}: {table.name} has neither the columns prompt and completion, nor messages, nor text; its columns are: "
        f"{got}. Rename them, or name them by {'data.ptx_columns' if key == 'data.ptx' else 'data.columns'}"
    )


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


def _encoded_texts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, places: Sequence[str]
) -> list[tuple[list[int], list[int]]]:
    """Plain texts, split after the first token of each."""
    texts = every(lambda row, where: _checked(row.get("text"), f"{where}, text"), places, rows)
    start = text_start(tokenizer)

    def parts(ids: list[int], where: str) -> tuple[list[int], list[int]]:
        if ids[:1] != start:
            ids = start + ids
        if len(ids) < 2:
            raise DataError(f"{where}, text: wanted at least 2 tokens, as the first is not trained on; got {len(ids)}")
        return ids[:1], ids[1:]

    return every(parts, places, tokenizer(texts, add_special_tokens=False)["input_ids"])


def _checked(text: Any, where: str) -> str:
    """``text``, if it is non-empty text that can be encoded."""
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: got {text!r}, wanted text")
    return encodable(text, where)
