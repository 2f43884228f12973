"""A log file for each process of a run of several processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.report.text import visible
from tether.train.display import Display


class ProcessLog:
    """Writes what is displayed in a process to the process's own file, and passes it on to its display.

    Args:
        file: appended to; flushed after every line.
        display: what the user sees of this process.
    """

    def __init__(self, file: Path, display: Display) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream, self._display = file.open("a", encoding="utf-8"), display
        self._phase = ""

    def phase(self, name: str, done: int, total: int) -> None:
        """Logs the start of a phase."""
        if name != self._phase:
            self._phase = name
            self._write(name)
        self._display.phase(name, done, total)

    def update(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Logs an update."""
        self._write(f"update {step} of {total}")
        self._display.update(step, total, metrics)

    def message(self, text: str) -> None:
        """Logs a message."""
        self._write(text)
        self._display.message(text)

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows answers without logging them; they are in samples.jsonl."""
        self._display.samples(rows)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table."""
        for row in (columns, *rows):
            self._write(f"{title}: {' | '.join(map(str, row))}")
        self._display.table(title, columns, rows)

    def failed(self, error: Exception) -> None:
        """Logs the error that ends the process; the command shows it to the user."""
        for text in (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())):
            self._write(text)

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()
        self._display.close()

    def _write(self, text: str) -> None:
        if not self._stream.closed:
            self._stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(text)}\n")
            self._stream.flush()
