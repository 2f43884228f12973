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


def check_output(path: str | Path | None) -> Path | None:
    """The file that rows are to be written to, as a path.

    Raises:
        ConfigError: it cannot be made, or is there already: nothing is written over.
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
        raise ConfigError(f"--output: {output} cannot be looked for: {error.strerror}; name another file") from error
    return output


@contextmanager
def kept(output: Path | None, rows: Callable[[], Sequence[Mapping[str, Any]]], display: Display) -> Iterator[None]:
    """Writes rows to ``output``, if it is not None, on the way out, be that the end or an exception.

    Args:
        rows: those that are complete by then, in order; where there are none after an exception, no file is made.
    """
    try:
        yield
    except BaseException:
        if output is not None and (complete := rows()):
            JsonlWriter(output).write_all(complete)
            display.message(f"{len(complete)} complete rows are in {output}")
        raise
    if output is not None:
        JsonlWriter(output).write_all(rows())
