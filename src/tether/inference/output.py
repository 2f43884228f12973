"""The file that rows of answers or scores are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.metrics.writers import JsonlWriter
from tether.models.saving import check_can_be_made
from tether.train.display import Display
from tether.train.interrupt import Stopped, StopRequest


def check_output(path: str | Path | None) -> Path | None:
    """Checks that a file for rows can be created, and returns its path.

    Raises:
        ConfigError: it cannot be created, or exists already: nothing is overwritten.
    """
    if path is None:
        return None
    output = Path(path)
    try:
        if output.is_dir():
            raise ConfigError(f"--output: {output} is a folder; name a new file")
        if output.exists():
            raise ConfigError(f"--output: {output} exists; name a new file")
        check_can_be_made(output.parent, "--output")
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be accessed: {error.strerror}; name another file") from error
    return output


@contextmanager
def kept(output: Path | None, rows: Callable[[], Sequence[Mapping[str, Any]]], display: Display) -> Iterator[None]:
    """Writes rows to ``output``, if it is not None, on exit, also after an exception and after signals that ask the
    process to end, which raise ``KeyboardInterrupt`` here.

    Args:
        rows: returns the complete rows, in order; if there are none after an exception, no file is written.
    """
    try:
        with _interruptible():
            yield
    except BaseException:
        if output is not None and (complete := rows()):
            JsonlWriter(output).write_all(complete)
            display.message(f"{len(complete)} complete rows are in {output}")
        raise
    if output is not None:
        JsonlWriter(output).write_all(rows())


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raises ``KeyboardInterrupt`` for every signal that would stop a run."""
    try:
        with StopRequest() as stop, stop.at_once():
            yield
    except Stopped as stopped:
        raise KeyboardInterrupt(str(stopped)) from None
