"""Reads any prompt source as queries in token ids, with the rows' other columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tether.config.chat import DataSource
from tether.config.keys import counted
from tether.data.answers import before_answer
from tether.data.bad_rows import UNUSABLE, Limit, every, short_enough, usable
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


def load_prompts(source: DataSource, form: QueryFormat, limit: Limit) -> PromptData:
    """Prompts of ``source`` as token ids.

    Chat messages go through the tokenizer's chat template, which alone decides on BOS; so do text, as one user turn,
    and transcripts, turn by turn, if there is a template. Other text gets the BOS that the tokenizer puts before text,
    once, and none of the tokens that it puts after text.

    Args:
        source: datasets with a column ``prompt``, else ``messages``, that holds text or chat messages, else ``chosen``,
            whose last turn is dropped. In each row, the first of them that is not empty counts.
        limit: maximum number of tokens in a query, chat template included; longer ones are dropped and counted.

    Raises:
        ConfigError: a system prompt without a chat template to put it in.
        DataError: the source cannot be read or is empty; a row has no prompt, one of the wrong type, or one that
            already contains the end of its answer; no prompt is within the limit. Names the first such rows.
    """
    table, key = read_datasets(source), source.key
    name = f"{key}: {table.name}"

    def read(rows: list[Row], places: list[str], numbers: Sequence[int]) -> PromptData:
        way_out = "Rename one" + (f", or name it by {source.columns_key}: {{prompt: …}}" if source.columns_key else "")
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
        kept = short_enough(prompts, lambda each: len(each.token_ids), limit, what="prompt", table=table, key=key)
        num_too_long, num_bad = len(prompts) - len(kept), table.num_rows - len(rows)
        note = f"{table.name}: {len(kept):,} of {counted(table.num_rows, 'prompt')}"
        note += f", {num_too_long} dropped as longer than {limit.tokens} tokens" if num_too_long else ""
        note += f", {num_bad} left out as {UNUSABLE}" if num_bad else ""
        return PromptData(kept, table.num_rows, num_too_long, others, note, num_bad)

    return usable(table, source, form.is_chat, read)


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
