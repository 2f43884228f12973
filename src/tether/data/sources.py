"""Reads the rows of a dataset from a file, a folder or the hub."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.constants import HF_HUB_OFFLINE

from tether.config.chat import part_key
from tether.config.launched import rank
from tether.config.places import why_not_there
from tether.data.splits import Part, is_whole, rows_read, split_parts
from tether.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

_OF_MODELS = ("config.json", "adapter_config.json")
"""What a folder with a model or an adapter holds beside its weights."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FORMS = (
    "a .jsonl, .json, .csv or .parquet file (the first three with .gz, too), a folder saved by datasets or "
    "one that holds such files, or a hub id"
)
_UNREADABLE = (OSError, ValueError, RuntimeError, ImportError)
"""Errors that ``datasets`` raises besides its own: for broken data, for a script, for a missing package."""


@dataclass(frozen=True)
class Rows:
    """A dataset as Python values."""

    name: str
    """The source's name in messages."""
    rows: list[Row]
    """Column name to value."""
    lines: list[int] | None = None
    """Line of the file on which each row starts, from 1, if the file has lines."""
    places: list[str] | None = None
    """Each row's name in messages, if that is not its index in ``rows``."""
    bad: Mapping[str, DataError] = field(default_factory=dict)
    """What is wrong with rows that could not be converted, by their names in messages; ``rows`` lacks them."""

    @property
    def num_rows(self) -> int:
        """Number of rows, those under ``bad`` included."""
        return len(self.rows) + len(self.bad)

    def where(self, i: int) -> str:
        """The name of row ``i`` in messages; rows count from 0, lines from 1."""
        if self.places is not None:
            return self.places[i]
        return f"{self.name}, row {i}" + (f" (line {self.lines[i]})" if self.lines is not None else "")

    def taken(self, chosen: Sequence[int]) -> Rows:
        """The rows with these indices, in this order, each under the name that it has here."""
        return Rows(self.name, [self.rows[i] for i in chosen], places=[self.where(i) for i in chosen])


def check_source(source: str, key: str, *, revision: str | None = None) -> None:
    """Checks that ``source`` can be a prompt dataset, in milliseconds and without reading it.

    Args:
        source: the value that the user wrote.
        key: its configuration key, for messages.
        revision: the revision of it to read.

    Raises:
        DataError: the file or folder does not exist, is empty or has an unknown format, or a revision of it is wanted.
            A hub id is let through.
    """
    if (why := why_not_there(source)) is not None:
        raise DataError(f"{key}: {why}")
    path = Path(source).expanduser()
    if revision is not None and path.exists():
        raise DataError(
            f"{part_key(key, 'revision')}: got {revision}, but {source} is a local "
            f"{'folder' if path.is_dir() else 'file'}, which has no revisions: leave it out"
        )
    if path.is_dir():
        if not any(entry.is_file() for entry in path.rglob("*")):
            raise DataError(f"{key}: folder {source} holds no files; wanted {_FORMS}")
        if any(path.glob("*.safetensors")) and any((path / name).is_file() for name in _OF_MODELS):
            raise DataError(f"{key}: folder {source} holds a model; wanted {_FORMS}")
    elif path.exists():
        if _form(path) not in _READERS:
            raise DataError(f"{key}: {source} has an unknown format; wanted {_FORMS}")
        if not path.is_file():
            raise DataError(f"{key}: {source} is a pipe or a device, which cannot be read again; wanted {_FORMS}")
        if path.stat().st_size == 0:
            raise DataError(f"{key}: {source} is empty")
    elif _form(path) in _READERS or _HUB_ID.fullmatch(source) is None:
        raise DataError(f"{key}: no such file or folder: {source}")


def read_rows(
    source: str,
    *,
    split: str,
    key: str,
    subset: str | None = None,
    revision: str | None = None,
    max_rows: int | None = None,
) -> Rows:
    """All rows of a dataset, or the first ones.

    Args:
        source: file, folder or hub id.
        split: split to read if the source has several; a single split is read whatever its name. May be parts of
            splits, or several, as in ``split_parts``.
        key: the configuration key of ``source``, for messages.
        subset: subset to read if a folder or hub dataset has several.
        revision: branch, tag or commit of a hub dataset.
        max_rows: maximum number of rows to read.

    Raises:
        DataError: it does not exist, cannot be read, or has no such split or subset; names the file, and the line if
            there is one.
    """
    check_source(source, key, revision=revision)
    path = Path(source).expanduser()
    is_single = path.is_file() or (path.is_dir() and _is_saved_dataset(path))
    if subset is not None and is_single:
        what = "file" if path.is_file() else "folder saved by datasets"
        raise DataError(
            f"{part_key(key, 'subset')}: got {subset}, but {source} is a {what}, which has no subsets: leave it out"
        )
    if path.is_file():
        return _file_rows(path, source, split, key, max_rows)
    if is_single:
        return _saved_rows(path, source, split, key, max_rows)
    location = str(path) if path.is_dir() else None
    options = {"subset": subset, "subset_key": part_key(key, "subset"), "revision": revision, "max_rows": max_rows}
    return _loaded_rows(source, location, split, key, **options)


def _form(path: Path) -> str:
    """The extension that decides how a file is read, without .gz if the format may be compressed."""
    inner = Path(path.stem).suffix.lower()
    return inner if path.suffix.lower() == ".gz" and inner in _ZIPPED else path.suffix.lower()


def _file_rows(path: Path, source: str, split: str, key: str, max_rows: int | None) -> Rows:
    parts = split_parts(split, ["train"], source, key)
    try:
        numbered = list(islice(_READERS[_form(path)](path), rows_read(parts, max_rows)))
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {source} is not UTF-8 text") from error
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{key}: {source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except _RowError as error:
        raise DataError(f"{key}: {source}{error}") from error
    lines = [line for line, _ in numbered]
    table = Rows(source, [row for _, row in numbered], None if None in lines else lines)
    if is_whole(parts):
        return table
    return table.taken([i for part in parts for i in part.rows(len(numbered))][:max_rows])


class _RowError(Exception):
    """A row cannot be read; the message continues the file's name."""


def _opened(path: Path, newline: str | None = None) -> TextIOWrapper:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _jsonl(path: Path) -> Iterator[tuple[int | None, Row]]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _checked(_decoded(line.rstrip("\r\n"), f", line {number}"), f", line {number}")


class RepeatedKey(ValueError):
    """An object of JSON has one key several times, so that only the last of its values would be read."""


def object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object that JSON's reader found these keys and values in.

    Raises:
        RepeatedKey: a key is there several times.
    """
    read = dict(pairs)
    if len(read) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in read if names.count(name) > 1)
        raise RepeatedKey(f"has {twice!r} several times in one object; wanted each name once")
    return read


def _decoded(text: str, where: str) -> Any:
    """The value of JSON text. ``where`` is empty if the text is a whole file."""
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except RepeatedKey as error:
        raise _RowError(f"{where}: {error}") from error
    except json.JSONDecodeError as error:
        line = where or f", line {error.lineno}"
        raise _RowError(f"{line}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise _RowError(f"{where}: JSON that cannot be read: {error}") from error


def _json(path: Path) -> Iterator[tuple[int | None, Row]]:
    with _opened(path) as file:
        while (start := file.read(1)).isspace():
            pass
    if start != "[":  # .json is also common for files with one object per line
        yield from _objects(path)
        return
    with _opened(path) as file:
        text = file.read()
    for i, row in enumerate(_decoded(text, "")):
        yield None, _checked(row, f", row {i}")


def _objects(path: Path) -> Iterator[tuple[int | None, Row]]:
    try:
        yield from _jsonl(path)
    except _RowError:
        try:
            with _opened(path) as file:
                whole = json.load(file, object_pairs_hook=object_of)
        except (ValueError, RecursionError):
            whole = None
        if not isinstance(whole, dict):
            raise
        keys = ", ".join(list(whole)[:5])
        raise _RowError(f": got one object with the keys {keys}; wanted a list of rows, or one row per line") from None


_MARKS = {";": "semicolons", "\t": "tabs"}
"""What spreadsheets may write between columns in place of commas."""


def _csv(path: Path) -> Iterator[tuple[int | None, Row]]:
    csv.field_size_limit(2**31 - 1)  # a conversation may exceed csv's own limit of 131,072 characters
    with _opened(path, newline="") as file:
        reader, start = csv.reader(file, strict=True), 1
        try:
            header = next(reader, [])
            _check_names(header, ", line 1")
            if len(header) == 1 and (other := next((name for mark, name in _MARKS.items() if mark in header[0]), None)):
                got = f"got the one column {header[0]!r}"
                raise _RowError(f", line 1: {got}; wanted commas between columns, not {other}")
            start = reader.line_num + 1
            for cells in reader:
                if cells:
                    if len(cells) != len(header):
                        raise _RowError(f", line {start}: got {len(cells)} cells, the header has {len(header)}")
                    yield start, dict(zip(header, cells, strict=True))
                start = reader.line_num + 1
        except csv.Error as error:
            raise _RowError(f", line {start}: not CSV: {error}") from error


def _check_names(names: Sequence[str], where: str) -> None:
    """Raises ``_RowError`` if two columns have one name, as only the last of them would be read. There may be several
    without a name, which spreadsheets write, and which nobody can ask for."""
    if twice := [name for name in dict.fromkeys(names) if name.strip() and names.count(name) > 1]:
        raise _RowError(f"{where}: has several columns {', '.join(map(repr, twice))}; wanted one of each name")


def _parquet(path: Path) -> Iterator[tuple[int | None, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names, "")
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    yield None, row
    except pyarrow.ArrowException as error:
        raise _RowError(f": not a parquet file: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[int | None, Row]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
_ZIPPED = {".jsonl", ".json", ".csv"}
"""Formats that may also be compressed, with .gz appended."""


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise _RowError(f"{where}: got {type(row).__name__}, wanted an object with one entry per column")
    return row


def _is_saved_dataset(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk``."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _saved_rows(path: Path, source: str, split: str, key: str, max_rows: int | None) -> Rows:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
        if isinstance(loaded, datasets.Dataset):
            loaded = datasets.DatasetDict({str(loaded.split or "train"): loaded})
        parts = split_parts(split, list(loaded), source, key)
        chosen = [loaded[part.name].select(part.rows(len(loaded[part.name]))) for part in parts]
        rows = _dataset_rows(datasets.concatenate_datasets(chosen), max_rows)
    except (*_UNREADABLE, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{key}: {source} was saved by datasets but cannot be read: {_innermost(error)}") from error
    return Rows(source if is_whole(parts) else f"{source} (split {_written(parts)})", rows)


def read_hub(
    source: str,
    *,
    split: str,
    subset: str | None,
    folder: str | None,
    revision: str | None,
    key: str,
    max_rows: int | None = None,
) -> Rows:
    """All rows of a dataset on the hub, or the first ones.

    Args:
        source: its hub id.
        subset: subset to read.
        folder: the folder in it that holds the data.
        revision: branch, tag or commit.
        key: the configuration key of ``source``, for messages.
        max_rows: maximum number of rows to read.

    Raises:
        DataError: it cannot be loaded, or has no such split or subset.
    """
    options = {"subset": subset, "subset_key": "its subset", "revision": revision, "max_rows": max_rows}
    return _loaded_rows(source, None, split, key, **options, data_dir=folder)


def _loaded_rows(
    source: str,
    folder: str | None,
    split: str,
    key: str,
    *,
    subset: str | None,
    subset_key: str | None,
    revision: str | None,
    max_rows: int | None,
    data_dir: str | None = None,
) -> Rows:
    import datasets

    if folder is None and not HF_HUB_OFFLINE and rank() == 0:
        logger.info("reading the dataset %s from the hub (HF_HUB_OFFLINE=1 reads its cache alone)", source)
    location = folder or source
    within = _given(data_dir=data_dir, revision=revision)
    try:
        splits = datasets.get_dataset_split_names(location, **within, **_given(config_name=subset))
        chosen = _written(split_parts(split, splits, source, key))
        loaded = datasets.load_dataset(location, split=chosen, **within, **_given(name=subset))
        of_revision = "" if revision is None else f", revision {revision}"
        return Rows(f"{source} (split {chosen}{of_revision})", _dataset_rows(loaded, max_rows))
    except (*_UNREADABLE, datasets.exceptions.DatasetsError) as error:
        told = _subset_told(location, source, subset, within, subset_key) if isinstance(error, ValueError) else None
        if told is not None:
            raise DataError(f"{key}: {told}") from error
        if folder is not None:
            raise DataError(f"{key}: cannot read folder {source}: {_innermost(error)}") from error
        raise DataError(
            f"{key}: {source} is not a local file or folder, and the hub dataset cannot be loaded: "
            f"{_innermost(error)}\n"
            "Check the spelling and the network (HF_HUB_OFFLINE allows only cached datasets), or give a local file"
        ) from error


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def _written(parts: Sequence[Part]) -> str:
    return "+".join(map(str, parts))


def _subset_told(
    location: str, source: str, subset: str | None, within: Mapping[str, str], subset_key: str | None
) -> str | None:
    """What is wrong with the requested subset; None if the dataset cannot be loaded for another reason.

    Args:
        within: folder and revision of the dataset.
    """
    import datasets

    try:
        names = datasets.get_dataset_config_names(location, **within)
    except (*_UNREADABLE, datasets.exceptions.DatasetsError):
        return None
    if subset in names or (subset is None and len(names) < 2):
        return None
    got = f"{source} has the subsets {', '.join(names)}" + ("" if subset is None else f", but none called {subset}")
    return f"{got}: choose one with {subset_key}" if subset_key else f"{got}: save one of them, and name its file"


def _dataset_rows(dataset: Dataset, max_rows: int | None) -> list[Row]:
    """The first rows with all columns, whatever the dataset's format is; images and other media as stored, since
    decoded objects cannot be told apart by their text."""
    dataset = dataset.with_format(None)
    for name, feature in dataset.features.items():
        if (stored := _stored(feature)) != feature:
            dataset = dataset.cast_column(name, stored)
    return list(dataset if max_rows is None else dataset.select(range(min(max_rows, len(dataset)))))


def _stored(feature: Any) -> Any:
    """The feature with decoding of all media in it turned off."""
    import datasets

    if isinstance(feature, dict):
        return {name: _stored(part) for name, part in feature.items()}
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_stored(feature.feature))
    is_media = getattr(feature, "decode", False) and not isinstance(feature, getattr(datasets, "Json", ()))
    return dataclasses.replace(feature, decode=False) if is_media else feature


def _innermost(error: BaseException) -> str:
    """The message of the error that started a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
