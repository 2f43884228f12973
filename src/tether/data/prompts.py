"""Reads any prompt source as queries in token ids, with the rows' other columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.config.chat import Sources
from tether.config.keys import counted
from tether.data.answers import before_answer
from tether.data.bad_rows import UNUSABLE, every, short_enough, usable
from tether.data.held_out import split_off
from tether.data.joined import column_names, columns_used, read_datasets
from tether.data.queries import QueryFormat, checked_prompt, row_queries
from tether.data.sources import Row
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
    form = QueryFormat(
        tokenizer, chat_template, system_prompt, special_tokens, chat_template_now, chat_template_kwargs or {}
    )
    name = f"{key}: {table.name}"

    def read(rows: list[Row], places: list[str], numbers: Sequence[int]) -> PromptData:
        way_out = "Rename one" + ", or name it by data.columns: {prompt: …}" * key.startswith("data.")
        used = columns_used(rows, _column, name, "has no column prompt or messages", way_out)
        others = [column for column in column_names(rows) if column not in used and column != "prompt"]
        sources = every(_checked_source, places, rows, used)
        queries = row_queries(sources, rows, form, places, name)
        prompts = [
            Prompt(
                number,
                source,
                query.text,
                tuple(query.ids),
                {column: row.get(column) for column in others},
                query.conversation,
            )
            for number, row, source, query in zip(numbers, rows, sources, queries, strict=True)
        ]
        words = {"what": "prompt", "table": table, "key": key, "limit_key": length_key}
        kept = short_enough(prompts, lambda prompt: len(prompt.token_ids), max_prompt_length, **words)
        num_too_long, num_bad = len(prompts) - len(kept), table.num_rows - len(rows)
        note = f"{table.name}: {len(kept):,} of {counted(table.num_rows, 'prompt')}"
        note += f", {num_too_long} dropped as longer than {max_prompt_length} tokens" if num_too_long else ""
        note += f", {num_bad} left out as {UNUSABLE}" if num_bad else ""
        return PromptData(kept, table.num_rows, num_too_long, others, note, num_bad)

    return usable(table, key, form.is_chat, read, drops=drop_bad_rows)


def split_prompts(data: PromptData, fraction: float, seed: int) -> tuple[PromptData, PromptData]:
    """Training prompts and held-out prompts; equal prompts are on the same side."""
    parts = split_off(data.prompts, fraction, seed, lambda prompt: prompt.text)
    kept, held_out = (
        replace(data, prompts=part, note=f"{data.note}; {len(part)} {what}")
        for part, what in zip(parts, ("trained on", "held out"), strict=True)
    )
    return kept, held_out


def _column(names: Collection[str]) -> str | None:
    """The column that holds the prompt, among the names of columns."""
    return next((name for name in ("prompt", "messages", "chosen") if name in names), None)


def _checked_source(row: Row, column: str, where: str) -> str | list[Message]:
    """A row's prompt; for a preferred conversation, all but its answer."""
    value = row.get(column)
    return checked_prompt(before_answer(value, f"{where}, chosen")[0] if column == "chosen" else value, where)
