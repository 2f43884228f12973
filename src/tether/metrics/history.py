"""Metrics of many updates in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping


class History:
    """Lines of numbers in order of arrival: eight bytes per number, and each name stored once."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._lines: list[tuple[tuple[str, ...], array[float]]] = []

    def append(self, line: Mapping[str, float]) -> None:
        """Adds a line."""
        names = tuple(line)
        self._lines.append((self._names.setdefault(names, names), array("d", line.values())))

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[dict[str, float]]:
        for names, values in self._lines:
            yield dict(zip(names, values, strict=True))
