"""Reads any prompt source as queries in token ids, with the rows' other columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.config.chat import Sources
from tether.config.keys import counted
from tether.data.answers import before_answer
from tether.data.bad_rows import UNUSABLE, every, usable
from tether.data.forms import given_names
from tether.data.held_out import split_off
from tether.data.joined import column_names, read_datasets
from tether.data.queries import QueryFormat, check_untemplated, checked_prompt, encoded_queries, template_arguments
from tether.data.sources import Row, Rows
from tether.errors import DataError
from tether.types import Message, Prompt


@dataclass(frozen=True)
class PromptData:
    """A prompt dataset, ready for generation."""

    prompts: list[Prompt]
    """Prompts within the limit, in the order of the dataset; at least one."""
    num_rows: int
    """Number of rows in the dataset."""
    num_too_long: int
    """Number of rows dropped because their query exceeds the limit."""
    columns: list[str]
    """Names of the other columns; every prompt has all of them, with None for missing values."""
    note: str
    """One line for the start of a run: where the prompts come from, how many are used and how many were dropped."""
    num_bad: int = 0
    """Number of rows left out because they cannot be used."""

    @property
    def longest_query(self) -> int:
        """Tokens of the longest query."""
        return max(len(prompt.token_ids) for prompt in self.prompts)


def load_prompts(
    source: Sources,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    max_prompt_length: int,
    chat_template: str,
    system_prompt: str | None,
    key: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template_now: str | None = None,
    dataset_dir: str | None = None,
    max_samples: int | None = None,
    subset: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
    special_tokens: bool = False,
    drop_bad_rows: bool = False,
    length_key: str = "data.max_prompt_length",
) -> PromptData:
    """Prompts of ``source`` as token ids.

    Chat messages go through the tokenizer's chat template, which alone decides on BOS; so do text, as one user turn,
    and transcripts, turn by turn, if there is a template. Other text gets the BOS that the tokenizer puts before text,
    once, and none of the tokens that it puts after text. Queries over ``max_prompt_length`` are dropped and counted.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, a folder, or a hub id, or several of these; with a column
            ``prompt``, else ``messages``, that holds text or chat messages, else ``chosen``, whose last turn is
            dropped. In each row, the first of them that is not empty counts.
        tokenizer: the policy's, with the chat template of the run.
        split, subset: split and subset to read if the source has several.
        revision: branch, tag or commit of a hub dataset.
        max_prompt_length: maximum number of tokens in a query, chat template included; longer ones are dropped.
        chat_template: ``none`` takes text as it is.
        system_prompt: system message for prompts without one.
        key: the configuration key of ``source``, for messages.
        chat_template_kwargs: further arguments of the chat template.
        chat_template_now: date and time for the chat template, as in ``rendered``.
        dataset_dir: folder of a ``dataset_info.json``, whose entries ``source`` names.
        max_samples: maximum number of rows to read from each source.
        columns: the source's column names by ours, where they differ.
        special_tokens: as in ``QueryFormat``.
        drop_bad_rows: whether rows that cannot be used are left out and counted instead of being an error.
        length_key: the configuration key of ``max_prompt_length``, for messages.

    Raises:
        ConfigError: ``system_prompt`` without a chat template to put it in.
        DataError: the source cannot be read or is empty; a row has no prompt, one of the wrong type, or one that
            already contains the end of its answer; no prompt is within the limit. Names the first such rows.
    """
    table = read_datasets(
        source, split=split, key=key, dataset_dir=dataset_dir, max_samples=max_samples, subset=subset,
        revision=revision, columns=columns,
    )  # fmt: skip
    form = QueryFormat(tokenizer, chat_template, system_prompt, special_tokens, chat_template_now)

    def read(rows: list[Row], places: list[str], numbers: Sequence[int]) -> PromptData:
        used, others = _columns(rows, table, key)
        sources = every(_checked_source, places, rows, used)
        check_untemplated(sources, form, f"{key}: {table.name}")
        arguments = template_arguments(rows, tokenizer, chat_template_kwargs, places)
        texts, queries = encoded_queries(sources, form, places, arguments)
        prompts = [
            Prompt(
                number,
                prompt,
                text,
                tuple(ids),
                {name: row.get(name) for name in others},
                form.conversation(prompt),
            )
            for number, row, prompt, text, ids in zip(numbers, rows, sources, texts, queries, strict=True)
            if len(ids) <= max_prompt_length
        ]
        if not prompts:
            raise DataError(
                f"{key}: every prompt of {table.name} ({counted(len(queries), 'prompt')}) is longer than {length_key} "
                f"{max_prompt_length}; the shortest has {counted(min(map(len, queries)), 'token')}"
            )
        return PromptData(prompts, len(queries), len(queries) - len(prompts), others, table.name)

    data, num_bad = usable(table, key, form.is_chat, read, drops=drop_bad_rows)
    num_rows = data.num_rows + num_bad
    note = f"{table.name}: {len(data.prompts):,} of {counted(num_rows, 'prompt')}"
    if data.num_too_long:
        note += f", {data.num_too_long} dropped as longer than {max_prompt_length} tokens"
    if num_bad:
        note += f", {num_bad} left out as {UNUSABLE}"
    return replace(data, num_rows=num_rows, note=note, num_bad=num_bad)


def split_prompts(data: PromptData, fraction: float, seed: int) -> tuple[PromptData, PromptData]:
    """Training prompts and held-out prompts; equal prompts are on the same side."""
    parts = split_off(data.prompts, fraction, seed, lambda prompt: prompt.text)
    kept, held_out = (
        replace(data, prompts=part, note=f"{data.note}; {len(part)} {what}")
        for part, what in zip(parts, ("trained on", "held out"), strict=True)
    )
    return kept, held_out


def _columns(rows: Sequence[Row], table: Rows, key: str) -> tuple[list[str], list[str]]:
    """The prompt's column in each row, and the names of all other columns, in order of first appearance."""
    names = column_names(rows)
    usual = _column(names)
    if usual is None:
        got, way_out = ", ".join(names) or "none", "Rename one"
        if key.startswith("data."):
            way_out += ", or name it by data.columns: {prompt: …}"
        raise DataError(f"{key}: {table.name} has no column prompt or messages; its columns are: {got}. {way_out}")
    used = [_column(given_names(row)) or usual for row in rows]
    return used, [name for name in names if name not in used and name != "prompt"]


def _column(names: Collection[str]) -> str | None:
    """The column that holds the prompt, among the names of columns."""
    return next((name for name in ("prompt", "messages", "chosen") if name in names), None)


def _checked_source(row: Row, column: str, where: str) -> str | list[Message]:
    """A row's prompt; for a preferred conversation, all but its answer."""
    value = row.get(column)
    return checked_prompt(before_answer(value, f"{where}, chosen")[0] if column == "chosen" else value, where)
