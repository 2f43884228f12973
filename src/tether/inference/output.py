"""The file that rows of answers or scores are written to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether import __version__
from tether.config.base import Section
from tether.config.keys import counted
from tether.config.secrets import without_keys
from tether.errors import ConfigError
from tether.metrics.writers import write_new, write_whole
from tether.models.saving import check_can_be_made
from tether.train.display import Display
from tether.train.interrupt import Stopped, StopRequest


def check_output(path: str | Path | None, option: str = "--output") -> Path | None:
    """Checks that a file for results can be created, and returns its path.

    Args:
        option: the option that names it, for messages.

    Raises:
        ConfigError: it cannot be created, or exists already: nothing is overwritten.
    """
    if path is None:
        return None
    output = Path(path)
    try:
        if output.is_dir():
            raise ConfigError(f"{option}: {output} is a folder; name a new file")
        if output.exists():
            raise ConfigError(f"{option}: {output} exists; name a new file")
        check_can_be_made(output.parent, option)
    except OSError as error:
        raise ConfigError(f"{option}: {output} cannot be accessed: {error.strerror}; name another file") from error
    return output


def check_outputs(output: str | Path | None, metrics: str | Path | None) -> tuple[Path | None, Path | None]:
    """Checks that files for rows and for metrics can be created, and returns their paths.

    Raises:
        ConfigError: as in ``check_output``, or both are the same file.
    """
    rows, numbers = check_output(output), check_output(metrics, "--metrics")
    if rows is not None and numbers is not None and rows.resolve() == numbers.resolve():
        raise ConfigError(f"--output and --metrics: both are {numbers}, which holds only one of them; name two files")
    return rows, numbers


def write_metrics(path: Path, command: str, config: Section, **record: Any) -> None:
    """Writes a file of metrics, all of it or nothing: JSON with Tether's version, the command and what it measured.

    Args:
        config: the settings, which are written without what may hold a key of a service.
        record: what was measured, and the results.
    """
    content = {"tether": __version__, "command": command, **record}
    content["config"] = without_keys(config.model_dump(mode="json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


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
                    display.message(f"in {output}: {counted(len(complete), 'complete row')}")
                raise
            if output is not None:
                write_new(output, rows())
            stop.check()
    except Stopped as stopped:
        raise KeyboardInterrupt(str(stopped)) from None
