"""The file that rows of answers or scores are written to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.metrics.writers import JsonlWriter
from tether.models.saving import check_can_be_made
from tether.train.display import Display


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
        with _signals_raised():
            yield
    except BaseException:
        if output is not None and (complete := rows()):
            JsonlWriter(output).write_all(complete)
            display.message(f"{len(complete)} complete rows are in {output}")
        raise
    if output is not None:
        JsonlWriter(output).write_all(rows())


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raises ``KeyboardInterrupt`` for SIGTERM and SIGHUP, unless the caller handles or ignores them (``nohup``)."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if is_main and hasattr(signal, name)]
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
