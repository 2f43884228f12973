"""The datasets that a configuration key names: one or several, in files, on the hub, or in a ``dataset_info.json``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tether.config.chat import DataKeys, DataSource
from tether.data.dataset_info import check_entry, read_entry
from tether.data.forms import given_names, is_given
from tether.data.sources import Row, Rows, check_source, read_rows
from tether.errors import DataError

Name = TypeVar("Name", bound=str)


def check_datasets(source: DataSource) -> None:
    """Checks that datasets can be read, in milliseconds and without reading a row.

    Raises:
        DataError: one of them does not exist or has an unknown format, or has no revisions and one is wanted.
    """
    for dataset in source.datasets:
        if source.dataset_dir is None:
            check_source(dataset, source.key, revision=source.revision)
        else:
            check_entry(source.dataset_dir, dataset, source.key)


def check_named(data: DataKeys, *names: str) -> None:
    """``check_datasets`` for the datasets under these keys of ``data``, as far as they are set."""
    for name in names:
        if getattr(data, name) is not None:
            check_datasets(data.source(name))


def read_datasets(source: DataSource) -> Rows:
    """The rows of one or several datasets, in order; at least one.

    Raises:
        DataError: a dataset does not exist, cannot be read, has no rows or lacks a column. Rows of a
            ``dataset_info.json`` that cannot be converted are under ``bad`` instead.
    """
    key, tables = source.key, []
    for dataset in source.datasets:
        if source.dataset_dir is None:
            which = {"split": source.split, "subset": source.subset, "revision": source.revision}
            table = _renamed(read_rows(dataset, **which, key=key, max_rows=source.max_samples), source)
        else:
            table = read_entry(source.dataset_dir, dataset, key, max_rows=source.max_samples)
        if not table.rows and not table.bad:
            raise DataError(f"{key}: {table.name} has no rows")
        tables.append(table)
    rows: list[Row] = []
    places: list[str] = []
    for table in tables:
        rows += table.rows
        places += [table.where(i) for i in range(len(table.rows))]
    bad = {place: error for table in tables for place, error in table.bad.items()}
    return Rows(", ".join(table.name for table in tables), rows, places=places, bad=bad)


def _renamed(table: Rows, source: DataSource) -> Rows:
    """The rows with our names for columns that the source names differently. If these belong to a run's own sources,
    this one may lack them, and keeps columns that already have our names."""
    names, columns, key, is_strict = column_names(table.rows), source.columns, source.key, not source.has_columns_of_run
    for ours, theirs in columns.items():
        if table.rows and ours not in names and theirs not in names and is_strict:
            raise DataError(
                f"{key}: {table.name} has no column {theirs}, which should be its {ours}; its columns are: "
                f"{', '.join(names)}. Correct it in {source.columns_key}"
            )
    if not columns:
        return table
    has_input = "input" not in columns.values() and any(is_given(row.get("input")) for row in table.rows)
    if is_strict and columns.get("prompt") == "instruction" and has_input:
        describe = ", or describe the dataset in a dataset_info.json and name its folder as data.dataset_dir"
        raise DataError(
            f"{key}: {table.name} has a column input besides instruction, as alpaca's format, where both make up the "
            f"prompt, and it would be lost: join the two in one column{describe * key.startswith('data.')}; if it is "
            "something else, rename it"
        )
    return replace(table, rows=[_renamed_row(row, columns, keeps_ours=not is_strict) for row in table.rows])


def _renamed_row(row: Row, columns: Mapping[str, str], *, keeps_ours: bool) -> Row:
    found = {
        ours: row[theirs] for ours, theirs in columns.items() if theirs in row and not (keeps_ours and ours in row)
    }
    taken = {columns[ours] for ours in found}
    return found | {name: value for name, value in row.items() if name not in found and name not in taken}


def columns_used(
    rows: Sequence[Row], choose: Callable[[Collection[str]], Name | None], source: str, lacks: str, way_out: str
) -> list[Name]:
    """The column that ``choose`` finds in each row among the names of those that hold something; for a row without one,
    the one that it finds among the names of all columns.

    Args:
        source: the dataset in messages, after its key.
        lacks: what a dataset without such a column lacks, after its name.
        way_out: what to do then.

    Raises:
        DataError: there is no such column.
    """
    names = column_names(rows)
    usual = choose(names)
    if usual is None:
        raise DataError(f"{source} {lacks}; its columns are: {', '.join(names) or 'none'}. {way_out}")
    return [choose(given_names(row)) or usual for row in rows]


def column_names(rows: Sequence[Row]) -> list[str]:
    """Names of all columns, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
