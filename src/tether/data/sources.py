"""Rows of a dataset, whatever it is stored as: a file, a folder or a hub id."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import DataError

Row = Mapping[str, Any]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_NO_OPTIONS: Mapping[str, str | None] = {}
_CHATS = frozenset({"prompt", "messages", "conversations", "completion", "chosen", "rejected"})
"""Columns that may hold chat messages."""
_CHAT = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")
_FORMS = "a .jsonl, .json, .csv or .parquet file, a folder saved by datasets or holding such files, or a hub id"


@dataclass(frozen=True)
class Rows:
    """A dataset as Python values."""

    name: str
    """What the source is called in messages."""
    rows: list[Row]
    """Column name to value."""
    lines: list[int] | None = None
    """Line of the file on which each row starts, from 1, where the file has lines."""
    places: list[str] | None = None
    """What each row is called in messages, where that is not its number in ``rows``."""

    def where(self, i: int) -> str:
        """Row ``i`` in words, as it is called in messages; rows count from 0, lines from 1."""
        if self.places is not None:
            return self.places[i]
        return f"{self.name}, row {i}" + (f" (line {self.lines[i]})" if self.lines is not None else "")


def check_source(source: str, key: str) -> None:
    """Checks that ``source`` can be a prompt dataset, in milliseconds and without reading it.

    Args:
        source: what the user wrote.
        key: the configuration key it stands under, for messages.

    Raises:
        DataError: the file or folder does not exist, is empty or is of no known form. A hub id is let through.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not any(entry.is_file() for entry in path.rglob("*")):
            raise DataError(f"{key}: folder {source} holds no files; wanted {_FORMS}")
    elif path.exists():
        if path.suffix.lower() not in _READERS:
            raise DataError(f"{key}: {source} is of an unknown form; wanted {_FORMS}")
        if path.stat().st_size == 0:
            raise DataError(f"{key}: {source} is empty")
    elif path.suffix.lower() in _READERS or _HUB_ID.fullmatch(source) is None:
        raise DataError(f"{key}: no such file or folder: {source}")


def read_rows(source: str, *, split: str, key: str) -> Rows:
    """All rows of a prompt dataset.

    Args:
        source: file, folder or hub id.
        split: split to read where the source has several; a single split is read whatever it is called.
        key: the configuration key of ``source``, for messages.

    Raises:
        DataError: nothing is there, it cannot be read, or it has no such split; names the file, and the line if there
            is one.
    """
    check_source(source, key)
    path = Path(source).expanduser()
    if path.is_file():
        return _file_rows(path, source, key)
    if path.is_dir() and _is_saved_dataset(path):
        return _saved_rows(path, source, split, key)
    return _loaded_rows(path if path.is_dir() else None, source, split, key)


def _file_rows(path: Path, source: str, key: str) -> Rows:
    try:
        numbered = list(_READERS[path.suffix.lower()](path))
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {source} is not UTF-8 text") from error
    except OSError as error:
        raise DataError(f"{key}: {source} cannot be read: {error.strerror}") from error
    except _RowError as error:
        raise DataError(f"{key}: {source}{error}") from error
    lines = [line for line, _ in numbered]
    return Rows(source, [row for _, row in numbered], None if None in lines else lines)


class _RowError(Exception):
    """A row cannot be read; the message goes on from the name of the file."""


def _jsonl(path: Path) -> Iterator[tuple[int | None, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _checked(_decoded(line, f", line {number}"), f", line {number}")


def _decoded(text: str, where: str) -> Any:
    """What JSON text holds. ``where`` is left out where the text is a whole file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = where or f", line {error.lineno}"
        raise _RowError(f"{line}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise _RowError(f"{where}: not JSON that can be read: {error}") from error


def _json(path: Path) -> Iterator[tuple[int | None, Row]]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):  # the name .json is also common for one object a line
        yield from _objects(path, text)
        return
    for i, row in enumerate(_decoded(text, "")):
        yield None, _checked(row, f", row {i}")


def _objects(path: Path, text: str) -> list[tuple[int | None, Row]]:
    try:
        return list(_jsonl(path))
    except _RowError:
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if not isinstance(whole, dict):
            raise
        keys = ", ".join(list(whole)[:5])
        raise _RowError(f": got one object with the keys {keys}; wanted a list of rows, or one row a line") from None


def _csv(path: Path) -> Iterator[tuple[int | None, Row]]:
    csv.field_size_limit(2**31 - 1)  # of csv's own 131,072 characters a conversation may have more
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, start = csv.reader(file, strict=True), 1
        try:
            header = next(reader, [])
            start = reader.line_num + 1
            for cells in reader:
                if cells:
                    if len(cells) != len(header):
                        raise _RowError(f", line {start}: got {len(cells)} cells, the header has {len(header)}")
                    yield start, {
                        name: _messages(cell, name, start) if name in _CHATS else cell
                        for name, cell in zip(header, cells, strict=True)
                    }
                start = reader.line_num + 1
        except csv.Error as error:
            raise _RowError(f", line {start}: not CSV: {error}") from error


def _messages(cell: str, name: str, line: int) -> Any:
    """Chat messages that a cell of the column ``name`` holds as JSON, as CSV has no lists; other text as it is."""
    if not _CHAT.match(cell):
        return cell
    try:
        return json.loads(cell)
    except json.JSONDecodeError as error:
        raise _RowError(
            f", line {line}: {name} is not JSON: {error.msg} at column {error.colno} of the cell; wanted text, or "
            "a JSON list of chat messages"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _RowError(f", line {line}: {name} is not JSON that can be read: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[int | None, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise _RowError(f": not a parquet file: {error}") from error
    for row in table.to_pylist():
        yield None, row


_READERS: dict[str, Callable[[Path], Iterator[tuple[int | None, Row]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise _RowError(f"{where}: got {type(row).__name__}, wanted an object, one entry a column")
    return row


def _is_saved_dataset(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk``."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _saved_rows(path: Path, source: str, split: str, key: str) -> Rows:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {source} was saved by datasets but cannot be read: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_chosen_split(loaded, source, split, key)]
    return Rows(source, list(loaded))


def read_hub(source: str, *, split: str, subset: str | None, folder: str | None, key: str) -> Rows:
    """All rows of a dataset on the hub.

    Args:
        source: its id.
        subset: which of its configurations.
        folder: the folder in it that holds the data.
        key: the configuration key of ``source``, for messages.

    Raises:
        DataError: it cannot be loaded, or has no such split.
    """
    return _loaded_rows(None, source, split, key, {"name": subset, "data_dir": folder})


def _loaded_rows(
    folder: Path | None, source: str, split: str, key: str, options: Mapping[str, str | None] = _NO_OPTIONS
) -> Rows:
    import datasets

    location = source if folder is None else str(folder)
    given = {name: value for name, value in options.items() if value is not None}
    try:
        named = {"config_name" if name == "name" else name: value for name, value in given.items()}
        splits = datasets.get_dataset_split_names(location, **named)
        chosen = _chosen_split(splits, source, split, key)
        return Rows(f"{source} (split {chosen})", list(datasets.load_dataset(location, split=chosen, **given)))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if folder is not None:
            raise DataError(f"{key}: cannot read folder {source}: {_innermost(error)}") from error
        raise DataError(
            f"{key}: {source} is no file or folder here, and the hub dataset cannot be loaded: {_innermost(error)}\n"
            "Check the spelling and the network (HF_HUB_OFFLINE allows only what is cached), or give a local file"
        ) from error


def _chosen_split(splits: Iterable[str], source: str, split: str, key: str) -> str:
    splits = list(splits)
    if split in splits:
        return split
    if len(splits) == 1:
        return splits[0]
    raise DataError(f"{key}: {source} has no split {split}; it has {', '.join(splits)}")


def _innermost(error: BaseException) -> str:
    """The message of the error that started a chain of them."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
