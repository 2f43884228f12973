"""What a key of a configuration names: one dataset or several, in files, on the hub, or in a ``dataset_info.json``."""

from __future__ import annotations

from collections.abc import Sequence

from tether.config.chat import Sources, sources
from tether.data.dataset_info import check_entry, read_entry
from tether.data.sources import Row, Rows, check_source, read_rows
from tether.errors import DataError


def check_datasets(given: Sources, key: str, *, dataset_dir: str | None = None) -> None:
    """Checks that datasets can be read, in milliseconds and without reading a row.

    Args:
        given: what the user wrote.
        key: the configuration key it stands under, for messages.
        dataset_dir: folder of a ``dataset_info.json``, whose entries ``given`` then names.

    Raises:
        DataError: one of them is not there, or of no known form.
    """
    for source in sources(given):
        if dataset_dir is None:
            check_source(source, key)
        else:
            check_entry(dataset_dir, source, key)


def read_datasets(
    given: Sources, *, split: str, key: str, dataset_dir: str | None = None, max_samples: int | None = None
) -> Rows:
    """All rows of one or several datasets, in their order; at least one.

    Args:
        split: split to read where a source has several; the entries of a ``dataset_info.json`` name their own.
        max_samples: rows of each source that are used at most.

    Raises:
        DataError: a source is not there, cannot be read or has no rows.
    """
    tables = []
    for source in sources(given):
        if dataset_dir is None:
            table = read_rows(source, split=split, key=key)
        else:
            table = read_entry(dataset_dir, source, key)
        if not table.rows:
            raise DataError(f"{key}: {table.name} has no rows")
        tables.append(table)
    rows: list[Row] = []
    places: list[str] = []
    for table in tables:
        used = range(min(len(table.rows), max_samples or len(table.rows)))
        rows += [table.rows[i] for i in used]
        places += [table.where(i) for i in used]
    return Rows(", ".join(table.name for table in tables), rows, places=places)


def column_names(rows: Sequence[Row]) -> list[str]:
    """Names of all columns, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))
