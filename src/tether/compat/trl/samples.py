"""The table that ``generate_completions`` prints, and sends to a tracker."""

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


def send_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Sends answers to the run of Weights & Biases that this process has, if any, under the name that TRL gives them.

    A tracker that fails warns, and training goes on.

    Args:
        rows: as ``print_table`` takes them.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return
    try:
        data = [list(row.values()) for row in rows]
        wandb.log({"completions": wandb.Table(columns=list(rows[0]), data=data)})
    except Exception as error:  # whatever it raises, the run is worth more
        logger.warning("generate_completions: wandb failed: %s: %s", type(error).__name__, error)
