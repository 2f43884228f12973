"""Preference pairs as token ids: each answer as the policy would have written it after its prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tether.config.chat import DataSource
from tether.config.keys import counted
from tether.data.answers import answer_ids, check_answers, closing_token, prompt_and_answer
from tether.data.bad_rows import BadRows, Limit, every, usable
from tether.data.held_out import split_off
from tether.data.joined import column_names, read_datasets
from tether.data.queries import QueryFormat, checked_prompt, encodable, row_queries
from tether.data.sources import Row, Rows
from tether.errors import DataError
from tether.types import Message

PROMPT_NAMES = ("question", "instruction", "query", "input", "problem", "messages")
"""Names of the prompt column in other datasets."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt."""

    row: int
    """Index of the row in its dataset."""
    query: str
    """The prompt as text, chat template applied; empty if the row has only whole texts."""
    chosen_ids: tuple[int, ...]
    """Token ids of prompt and better answer, including the end token."""
    rejected_ids: tuple[int, ...]
    """Token ids of prompt and worse answer, including the end token."""
    query_length: int
    """Number of tokens in the prompt, with which both begin."""


@dataclass(frozen=True)
class PairData:
    """A preference dataset."""

    pairs: list[Pair]
    """Pairs within the limit, in the order of the dataset; at least one."""
    num_rows: int
    """Number of rows in the dataset."""
    num_too_long: int
    """Number of rows dropped because an answer with its prompt exceeds the limit."""
    num_equal: int
    """Number of rows dropped because both answers are the same."""
    num_bad: int = 0
    """Number of rows left out because they cannot be used."""


def load_pairs(source: DataSource, form: QueryFormat, limit: Limit, *, end_ids: Collection[int]) -> PairData:
    """Preference pairs of ``source`` as token ids.

    Prompts become the same queries as in ``load_prompts``. An answer is encoded separately and closed by the end token,
    as the policy samples it, so that a judge sees in training what it will see in PPO.

    Args:
        source: datasets with columns ``chosen`` and ``rejected``: answers to ``prompt``, or whole texts, conversations
            or transcripts if there is none.
        limit: maximum number of tokens in a prompt with its answer; longer ones are dropped and counted.
        end_ids: ids of the tokens that end an answer of the policy.

    Raises:
        ConfigError: a system prompt without a chat template, or a tokenizer without an end token.
        DataError: the source cannot be read or is empty; a row lacks an answer or has one of the wrong type; no pair is
            left. Names the first such rows.
    """
    closing_id = closing_token(form.tokenizer, end_ids)
    table, key = read_datasets(source), source.key
    _check_columns(table, key)
    name = f"{key}: {table.name}"

    def read(rows: list[Row], places: list[str], numbers: Sequence[int]) -> PairData:
        texts = every(pair_texts, places, rows)
        prompts = [text.prompt for text in texts]
        check_prompts(prompts, column_names(rows), places, name)
        check_answers(prompts, [(text.chosen, text.rejected) for text in texts], name)
        queries = row_queries(prompts, rows, form, places, name)
        chosen, rejected = (
            answer_ids([getattr(text, side) for text in texts], prompts, form, closing_id)
            for side in ("chosen", "rejected")
        )
        pairs = [
            Pair(number, query.text, (*query.ids, *better), (*query.ids, *worse), query_length=len(query.ids))
            for number, query, better, worse in zip(numbers, queries, chosen, rejected, strict=True)
        ]
        differing = [pair for pair in pairs if pair.chosen_ids != pair.rejected_ids]
        kept = [pair for pair in differing if max(len(pair.chosen_ids), len(pair.rejected_ids)) <= limit.tokens]
        if not kept:
            raise DataError(
                f"{key}: no row of {table.name} ({counted(len(rows), 'row')}) can be used: in "
                f"{len(pairs) - len(differing)} both answers are the same, {len(differing)} are longer than "
                f"{limit.key} {limit.tokens}"
            )
        num_too_long, num_equal = len(differing) - len(kept), len(pairs) - len(differing)
        return PairData(kept, table.num_rows, num_too_long, num_equal, num_bad=table.num_rows - len(rows))

    return usable(table, source, form.is_chat, read)


def split_pairs(pairs: Sequence[Pair], fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Training pairs and held-out pairs, both in their original order; all pairs of a prompt are on the same side."""
    return split_off(pairs, fraction, seed, lambda pair: pair.query or pair.row)


class PairTexts(NamedTuple):
    """One row before encoding; without a prompt, the answers are whole texts."""

    prompt: str | list[Message] | None
    chosen: str
    rejected: str


def _check_columns(table: Rows, key: str) -> None:
    names = column_names(table.rows)
    missing = [name for name in ("chosen", "rejected") if name not in names]
    if missing:
        got = ", ".join(names) or "none"
        raise DataError(f"{key}: {table.name} has no column {' and '.join(missing)}; its columns are: {got}")


def check_prompts(
    prompts: Sequence[object | None], names: Sequence[str], places: Sequence[str], source: str
) -> None:
    """Raises ``DataError`` if answers would wrongly be taken for whole texts: other rows have a prompt, or a column's
    name says that it holds one. Names every row without a prompt in the first case.

    Args:
        prompts: prompt of each row; None if its answers are whole texts.
        names: names of all columns.
        places: what messages call the row of each prompt.
        source: the dataset, for messages.
    """
    missing = [place for prompt, place in zip(prompts, places, strict=True) if prompt is None]
    if missing and len(missing) < len(places):
        raise BadRows({place: DataError(f"{place} has no prompt, although other rows have one") for place in missing})
    named = [name for name in names if name.lower() in PROMPT_NAMES]
    if missing and named:
        raise DataError(
            f"{source}: without a column prompt, chosen and rejected are whole texts, but there is a column "
            f"{named[0]}. Rename it to prompt; leave it out if chosen and rejected hold it already"
        )


def pair_texts(row: Row, where: str) -> PairTexts:
    """The prompt and the two answers of a row.

    Raises:
        DataError: an answer is missing or of the wrong type, or the two answer different prompts; ``where`` names the
            row.
    """
    (prompt, chosen), (other, rejected) = (
        prompt_and_answer(row, name, f"{where}, {name}") for name in ("chosen", "rejected")
    )
    if prompt != other:
        raise DataError(f"{where}: chosen and rejected answer different prompts; wanted two answers to one prompt")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        encodable(answer, f"{where}, {name}")
    return PairTexts(None if prompt is None else checked_prompt(prompt, where), chosen, rejected)


def pair_accuracy(margins: Sequence[float]) -> float:
    """Share of margins (chosen minus rejected) above 0; margins of 0 count half."""
    return sum((margin > 0) + 0.5 * (margin == 0) for margin in margins) / len(margins)
