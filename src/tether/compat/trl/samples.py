"""The table that ``generate_completions`` prints and sends to a tracker."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tether.report.text import number, visible

logger = logging.getLogger(__name__)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints answers, with characters that could act on a terminal made visible.

    Args:
        rows: rows of texts or numbers, all with the same keys.
    """
    table = Table(show_lines=True)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(visible(value) if isinstance(value, str) else number(value)) for value in row.values()))
    Console().print(table)


def send_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Sends answers to this process's Weights & Biases run, if any, under TRL's name for them.

    A failing tracker warns, and training continues.

    Args:
        rows: as for ``print_table``.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return
    try:
        data = [list(row.values()) for row in rows]
        wandb.log({"completions": wandb.Table(columns=list(rows[0]), data=data)})
    except Exception as error:  # whatever it raises, the run is worth more than the table
        logger.warning("generate_completions: wandb failed: %s: %s", type(error).__name__, error)
