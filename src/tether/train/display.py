"""The interface through which the trainer shows progress. How it looks is up to the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tether.errors import ConfigError

PhaseReport = Callable[[str, int, int], None]
"""``Display.phase`` by itself: called with the name of a phase, how much of it is done, and its total."""


@runtime_checkable
class Display(Protocol):
    """Shows a run's progress. Texts may come from models and datasets; implementations make them safe to show."""

    def phase(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` items of the current phase are done, as in "rollout 24/64"."""
        ...

    def update(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Update ``step`` of ``total`` is done; ``metrics`` are those of metrics.jsonl."""
        ...

    def message(self, text: str) -> None:
        """One or more lines to keep."""
        ...

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A few answers to show, as in samples.jsonl: at least ``prompt``, ``response`` and ``score``."""
        ...

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table to keep; cells are texts or numbers."""
        ...

    def close(self) -> None:
        """Ends the progress display; messages may still follow. May be called twice."""
        ...


class NullDisplay:
    """Shows nothing."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Shows nothing."""

    def update(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Shows nothing."""

    def message(self, text: str) -> None:
        """Shows nothing."""

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows nothing."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Shows nothing."""


def tell_sources(roles: Iterable[tuple[str, str, str]], display: Display) -> None:
    """Shows which model plays which role, in lines: cells of a table would break a path.

    Args:
        roles: name, source, and what is shared with other roles.
    """
    display.message("roles")
    for name, source, sharing in roles:
        display.message(f"  {name}: {source} ({sharing})")


def check_display(display: Any) -> None:
    """Raises ``ConfigError`` if a caller's own ``display`` cannot show anything."""
    if display is not None and (isinstance(display, type) or not isinstance(display, Display)):
        raise ConfigError(
            f"display: got {display!r}, wanted None, or an object with the methods of tether.train.display.Display"
        )
