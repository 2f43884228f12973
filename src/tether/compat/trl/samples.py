"""The table that ``generate_completions`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tether.report.text import number, visible


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints answers, what could act on a terminal made visible.

    Args:
        rows: all with the same keys, texts or numbers.
    """
    table = Table(show_lines=True)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(visible(value) if isinstance(value, str) else number(value)) for value in row.values()))
    Console().print(table)
