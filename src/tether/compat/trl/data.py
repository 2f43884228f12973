"""Datasets in memory, tokenized or not, as prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.config.keys import counted, shown
from tether.data.bad_rows import every
from tether.data.forms import is_given, plain_row
from tether.data.prompts import PromptData
from tether.data.queries import QueryFormat, checked_prompt, row_queries
from tether.errors import ConfigError, DataError
from tether.types import Prompt

Collator = Callable[[list[Mapping[str, Any]]], Mapping[str, Any]]

IDS, MASK = "input_ids", "attention_mask"
TEXTS = ("prompt", "messages")
OF_TOKENIZERS = frozenset({IDS, MASK, "token_type_ids", "special_tokens_mask", "lengths", "length"})
"""Columns made by tokenization, which reward functions do not receive."""


def prompts_of(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, collator: Collator | None, name: str, now: str | None = None
) -> PromptData:
    """The rows of a dataset as prompts.

    Rows with ``input_ids`` are taken as they are, without padding. Padding is what ``attention_mask`` masks or, without
    a mask, pad tokens at either end; if the pad token is the end token, more than one of it at the beginning. Other
    rows have a ``prompt`` or ``messages``, text or chat messages, that become queries like those of a prompt file. If
    there are ``input_ids`` as well, reward sources are shown ``prompt`` or ``messages``.

    Args:
        dataset: anything with a length and rows that are mappings.
        collator: makes a batch of one row, whose ``input_ids`` are then taken.
        name: the argument that holds the dataset, for messages.
        now: date and time for the chat template, as in ``rendered``.

    Raises:
        ConfigError: it is not such a dataset.
        DataError: a row has no query, or one that already contains the end of its answer.
    """
    rows = _rows(dataset, name)
    places = [f"{name}, row {i}" for i in range(len(rows))]
    columns = list(rows[0])
    text = next((column for column in TEXTS if column in columns), None)
    queries = _given_ids(rows, tokenizer, collator, places)
    if queries is None and text is None:
        raise DataError(
            f"{name}: wanted a column input_ids with token ids, or prompt or messages with text; its columns are "
            f"{', '.join(columns)}"
        )
    sources, used, form = None, set(), QueryFormat(tokenizer, chat_template_now=now)
    if text is not None:
        plain = every(partial(plain_row, is_chat=form.is_chat), places, rows)
        of_rows = [next((name for name in TEXTS if is_given(row.get(name))), text) for row in plain]
        values = [row.get(name) for row, name in zip(plain, of_rows, strict=True)]
        sources, used = every(checked_prompt, places, values), {*of_rows, "prompt"}
    if queries is None:
        texts, queries, chats = zip(*row_queries(sources, rows, form, places, name), strict=True)
    else:
        _check_known(queries, tokenizer, places)
        texts = [tokenizer.decode(ids) for ids in queries]
        sources = sources or [tokenizer.decode(ids, skip_special_tokens=True) for ids in queries]
        chats = [None if isinstance(source, str) else source for source in sources]
    others = [column for column in columns if column not in OF_TOKENIZERS and column not in used]
    prompts = [
        Prompt(i, sources[i], texts[i], tuple(queries[i]), {column: row.get(column) for column in others}, chats[i])
        for i, row in enumerate(rows)
    ]
    return PromptData(prompts, len(rows), 0, others, f"{name}: {counted(len(rows), 'prompt')}")


def _rows(dataset: Any, name: str) -> list[Mapping[str, Any]]:
    wanted = "wanted one datasets.Dataset, or a list of rows"
    if isinstance(dataset, Mapping) and not {IDS, *TEXTS}.isdisjoint(dataset):
        raise ConfigError(f"{name}: got a single row ({', '.join(map(str, dataset))}), {wanted}: [row]")
    if isinstance(dataset, Mapping):
        raise ConfigError(f"{name}: got several datasets ({', '.join(map(str, dataset))}), {wanted}: choose one")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or isinstance(dataset, str):
        raise ConfigError(f"{name}: got {type(dataset).__name__}, {wanted}")
    try:
        rows = [dataset[i] for i in range(len(dataset))]
    except (KeyError, TypeError) as error:  # indexed by something else, as a table of pandas is by its columns
        raise ConfigError(f"{name}: got {type(dataset).__name__}, which has no row 0, {wanted}") from error
    if not rows:
        raise DataError(f"{name} has no rows")
    if not isinstance(rows[0], Mapping):
        raise ConfigError(f"{name}: its rows are of type {type(rows[0]).__name__}, wanted mappings with input_ids")
    return rows


def _given_ids(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    collator: Collator | None,
    places: Sequence[str],
) -> list[list[int]] | None:
    """The token ids that the rows have, or that a collator makes of them; None if there are none."""
    if collator is not None:
        return [_collated(row, collator, tokenizer, place) for row, place in zip(rows, places, strict=True)]
    if IDS in rows[0]:
        return [_query(row, tokenizer, place) for row, place in zip(rows, places, strict=True)]
    return None


def _collated(
    row: Mapping[str, Any], collator: Collator, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int]:
    try:
        batch = collator([row])
    except Exception as error:  # the user's own code
        raise ConfigError(f"data_collator raised {type(error).__name__} for {where}: {error}") from error
    if not isinstance(batch, Mapping) or IDS not in batch:
        raise ConfigError(f"data_collator: got {type(batch).__name__} without input_ids for {where}, wanted input_ids")
    if len(batch[IDS]) != 1:
        raise ConfigError(f"data_collator: got {counted(len(batch[IDS]), 'row')} of input_ids for {where}, wanted one")
    return _query({key: batch[key][0] for key in (IDS, MASK) if key in batch}, tokenizer, where)


def _query(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """The token ids of a row without padding."""
    ids = _numbers(row.get(IDS), where)
    if row.get(MASK) is not None:
        mask = _listed(row[MASK], where, MASK, "0 for padding and 1 for tokens")
        if wrong := [value for value in mask if value not in (0, 1)]:
            raise DataError(f"{where}: attention_mask holds {shown(wrong[0])}, wanted 0 for padding and 1 for tokens")
        if len(mask) != len(ids):
            raise DataError(
                f"{where}: attention_mask has {len(mask)} entries, input_ids {len(ids)}; wanted the same number"
            )
        ids = [token for token, is_real in zip(ids, mask, strict=True) if is_real]
    elif tokenizer.pad_token_id != tokenizer.eos_token_id:
        real = [i for i, token in enumerate(ids) if token != tokenizer.pad_token_id]
        ids = ids[real[0] : real[-1] + 1] if real else []
    else:
        run = next((i for i, token in enumerate(ids) if token != tokenizer.pad_token_id), len(ids))
        if run > 1:  # a prompt may begin with one
            ids = ids[run - (tokenizer.bos_token_id == tokenizer.pad_token_id) :]
    if not ids:
        raise DataError(f"{where} has no prompt: input_ids holds nothing but padding")
    if ids[-1] == tokenizer.eos_token_id:
        raise DataError(
            f"{where}: the prompt already ends its answer: its last token is the end token {tokenizer.eos_token}. "
            "Tokenize without it"
        )
    return ids


def _numbers(values: Any, where: str) -> list[int]:
    """The token ids of a row."""
    wanted = "a list of token ids"
    ids = _listed(values, where, IDS, wanted)
    if wrong := [value for value in ids if not isinstance(value, int) or isinstance(value, bool)]:
        raise DataError(f"{where}: input_ids holds {shown(wrong[0])}, wanted {wanted}")
    return ids


def _listed(values: Any, where: str, column: str, wanted: str) -> list[Any]:
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise DataError(f"{where}: {column} is {type(values).__name__}, wanted {wanted}")
    return list(listed)


def _check_known(queries: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, places: Sequence[str]) -> None:
    """Raises ``DataError`` for a token id that the tokenizer does not have."""
    highest = max(tokenizer.get_vocab().values())
    for ids, place in zip(queries, places, strict=True):
        if (unknown := next((token for token in ids if not 0 <= token <= highest), None)) is not None:
            raise DataError(f"{place}: input_ids holds {unknown}, but the tokenizer's tokens are 0 to {highest}")
