"""Rows of a dataset that cannot be used: all of them are named at once, or left out and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from tether.config.chat import DataSource
from tether.config.keys import counted
from tether.data.forms import plain_row
from tether.data.sources import Row, Rows
from tether.errors import DataError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

SHOWN = 5
"""Number of bad rows that a message names."""
DROP_THEM = "data.drop_bad_rows: true"
"""The setting that leaves bad rows out."""
UNUSABLE = "unusable"
"""What the notes of a run call rows that are left out."""


class BadRows(DataError):
    """Rows that cannot be used, with the reasons.

    Args:
        errors: what is wrong with each row, by the row's name in messages.
    """

    def __init__(self, errors: Mapping[str, DataError]) -> None:
        told = [str(error) for error in list(errors.values())[:SHOWN]]
        if len(errors) > SHOWN:
            told.append(f"and {counted(len(errors) - SHOWN, 'more row')}")
        super().__init__("\n".join(told))
        self.errors = dict(errors)


def every(read: Callable[..., Result], places: Sequence[str], *columns: Sequence[object]) -> list[Result]:
    """What ``read`` returns for every row; it gets the row's values, one of each column, and its name in messages.

    Args:
        places: what messages call each row.

    Raises:
        BadRows: ``read`` raises ``DataError`` for some rows; names them all.
    """
    results, errors = [], {}
    for place, *values in zip(places, *columns, strict=True):
        try:
            results.append(read(*values, place))
        except DataError as error:
            errors.setdefault(place, error)
    if errors:
        raise BadRows(errors)
    return results


def usable(
    table: Rows, source: DataSource, is_chat: bool, read: Callable[[list[Row], list[str], Sequence[int]], Result]
) -> Result:
    """What ``read`` makes of the rows that it can use; a warning names those that are left out.

    Args:
        table: the rows of ``source``.
        is_chat: as in ``plain_row``.
        read: gets rows as ``plain_row`` makes them, what messages call them, and their indices in ``table``; raises
            ``BadRows`` for those that it cannot use, and is then called again without them.

    Raises:
        DataError: some rows cannot be used and ``source`` does not drop them, or none can; names the first ones, and
            their number.
    """
    key, drops = source.key, source.drop_bad_rows
    places = [f"{key}: {table.where(i)}" for i in range(len(table.rows))]
    errors = dict(table.bad)
    left: Sequence[int] = range(len(places))
    while left:
        try:
            own = [places[i] for i in left]
            rows = every(partial(plain_row, is_chat=is_chat), own, [table.rows[i] for i in left])
            result = read(rows, own, left)
        except BadRows as error:
            errors |= error.errors
            left = [i for i in left if places[i] not in errors]
        except DataError:
            if drops or not errors:
                raise
            break
        else:
            if errors and not drops:
                break
            if errors:
                logger.warning("%s", _told(table, key, places, errors, table.num_rows - len(left), "left out"))
            return result
    raise DataError(_refused(table, key, places, errors, table.num_rows - len(left)))


class Limit(NamedTuple):
    """A maximum number of tokens."""

    tokens: int
    key: str
    """The configuration key or the option that sets it, for messages."""


def short_enough(
    items: Sequence[Item], length: Callable[[Item], int], limit: Limit, *, what: str, table: Rows, key: str
) -> list[Item]:
    """The items of at most ``limit`` tokens; at least one.

    Args:
        length: number of tokens of an item.
        what: what an item is, for messages.
        table, key: the dataset that they are from and its configuration key, for messages.

    Raises:
        DataError: there are none.
    """
    kept = [item for item in items if length(item) <= limit.tokens]
    if not kept:
        shortest = counted(min(map(length, items)), "token")
        raise DataError(
            f"{key}: every {what} of {table.name} ({counted(len(items), what)}) is longer than {limit.key} "
            f"{limit.tokens}; the shortest has {shortest}"
        )
    return kept


def _told(
    table: Rows, key: str, places: Sequence[str], errors: Mapping[str, DataError], count: int, what: str
) -> str:
    """The number of bad rows, and what is wrong with the first ones of the dataset."""
    ordered = [errors[place] for place in dict.fromkeys([*table.bad, *places]) if place in errors]
    first = "".join("\n  " + str(error).removeprefix(f"{key}: ") for error in ordered[:SHOWN])
    sign = ":" if count <= SHOWN else "; the first:"
    return f"{key}: {count:,} of {counted(table.num_rows, 'row')} of {table.name} {what}{sign}{first}"


def _refused(
    table: Rows, key: str, places: Sequence[str], errors: Mapping[str, DataError], count: int
) -> str:
    """What is said of a dataset with bad rows."""
    few = count == 1
    told = str(*errors.values()) if few else _told(table, key, places, errors, count, "cannot be used")
    if count == table.num_rows:
        return told
    way_out = f"Correct or remove {'the row' if few else 'them'}"
    if key.startswith("data."):
        way_out += f", or set {DROP_THEM} to leave {'it' if few else 'them'} out"
    return f"{told}\n{way_out}"
