"""Splits of a dataset, and parts of them, in the notation of ``datasets``.

    train    train[:1000]    train[10%:90%]    train[-100:]    train[:80%]+test
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tether.config.chat import part_key
from tether.errors import DataError

_PART = re.compile(r"(?P<name>\w+(\.\w+)*)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


@dataclass(frozen=True)
class Part:
    """Rows of one split."""

    name: str
    """Name of the split."""
    start: str | None = None
    """The first row, or the share of rows before it; negative values count from the end."""
    stop: str | None = None
    """The row after the last, likewise."""

    def __str__(self) -> str:
        return f"{self.name}[{self.start or ''}:{self.stop or ''}]" if self.bounds else self.name

    @property
    def bounds(self) -> list[str]:
        """``start`` and ``stop``, as far as given; empty for a whole split."""
        return [bound for bound in (self.start, self.stop) if bound is not None]

    def rows(self, count: int) -> range:
        """Its rows if the split has ``count`` rows; shares are rounded to the nearest row."""
        start, stop = (
            default if bound is None else _row(bound, count) for bound, default in ((self.start, 0), (self.stop, count))
        )
        return range(start, max(start, stop))


def _row(bound: str, count: int) -> int:
    row = round(int(bound[:-1]) * count / 100) if bound.endswith("%") else int(bound)
    return min(max(count + row, 0) if row < 0 else row, count)


def split_parts(split: str, splits: Collection[str], source: str, key: str) -> list[Part]:
    """The parts that ``split`` consists of, under the source's names.

    Args:
        split: the value that the user wrote. If the source has a single split, that one is meant, whatever its name.
        splits: names of the source's splits.
        source, key: the source and its configuration key, for messages.

    Raises:
        DataError: it cannot be parsed, or there is no such split.
    """
    if split in splits:
        return [Part(split)]
    parts = [_part(text.strip(), split, key) for text in split.split("+")]
    names = list(dict.fromkeys(part.name for part in parts))
    if len(splits) == 1:
        (only,) = splits
        if not any(part.bounds for part in parts):
            return [Part(only)]
        if len(names) == 1:
            return [replace(part, name=only) for part in parts]
    if missing := [name for name in names if name not in splits]:
        told = f"{key}: {source} has no split {missing[0]}; it has {', '.join(splits)}"
        chosen_by = part_key(key, "split")
        raise DataError(f"{told}: choose with {chosen_by}" if chosen_by else told)
    return parts


def is_whole(parts: Sequence[Part]) -> bool:
    """Whether the parts are one split, all of it."""
    return len(parts) == 1 and not parts[0].bounds


def whole_splits(split: str) -> str:
    """The splits that ``split`` takes parts of."""
    return "+".join(dict.fromkeys(re.sub(r"\[.*?\]", "", part).strip() for part in split.split("+")))


def _part(text: str, split: str, key: str) -> Part:
    match = _PART.fullmatch(text)
    if match is None:
        raise DataError(
            f"{key}: the split {split} cannot be read at {text!r}; wanted NAME, NAME[FROM:TO] in rows, NAME[10%:90%] "
            "in percent, or several with + between them"
        )
    part = Part(match["name"], match["start"], match["stop"])
    shares = [bound for bound in part.bounds if bound.endswith("%")]
    if shares and len(shares) < len(part.bounds):
        raise DataError(f"{key}: the split {split} counts {text} in both rows and percent; wanted one of them")
    if over := [share for share in shares if abs(int(share[:-1])) > 100]:
        raise DataError(f"{key}: the split {split} asks for {over[0]} of the rows, wanted at most 100%")
    return part


def rows_read(parts: Sequence[Part], max_rows: int | None) -> int | None:
    """Number of rows to read from the start of a source with one split to get the first ``max_rows`` of ``parts``; None
    for all."""
    if len(parts) != 1 or not all(bound.isdigit() for bound in parts[0].bounds):
        return None
    (part,) = parts
    ends = [] if part.stop is None else [int(part.stop)]
    if max_rows is not None:
        ends.append(int(part.start or 0) + max_rows)
    return min(ends, default=None)
