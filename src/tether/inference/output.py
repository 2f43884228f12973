"""The file that rows of answers or scores are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.metrics.writers import write_new
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
    """Writes rows to ``output``, if it is not None, on exit, also after an exception and after signals that would stop
    a run. Signals wait for the end of the writing, except for a second Ctrl-C.

    Args:
        rows: returns the complete rows, in order; if there are none after an exception, no file is written.

    Raises:
        KeyboardInterrupt: there was a signal.
    """
    try:
        with StopRequest() as stop:
            try:
                with stop.at_once():
                    yield
            except BaseException:
                if output is not None and (complete := rows()):
                    write_new(output, complete)
                    display.message(f"{len(complete)} complete rows are in {output}")
                raise
            if output is not None:
                write_new(output, rows())
            stop.check()
    except Stopped as stopped:
        raise KeyboardInterrupt(str(stopped)) from None
