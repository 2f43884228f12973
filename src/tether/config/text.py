"""Configuration text to plain data and back: a strict part of YAML, with the line of each value.

Numbers are read as they are meant (``1e-5`` is a number; in YAML 1.1 it is text). Only ``true`` and ``false`` are
booleans. Tags, anchors, aliases and duplicate keys are refused, so a file means what it seems to mean and stays small.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a file down to a value."""

_MAX_DEPTH = 32
_MAX_DIGITS = 100
_INTEGER = re.compile(r"[-+]?\d+(_\d+)*", re.ASCII)
_NUMBER = re.compile(r"[-+]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_WORDS = {
    **dict.fromkeys(("null", "Null", "NULL", "~", "")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


class TextError(Exception):
    """The text is not of the part of YAML that is read here.

    Args:
        line: line of the mistake, from 1.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """What a configuration text holds."""

    data: Any
    """Mappings, lists, text, numbers, booleans and None."""
    lines: Mapping[Path, int]
    """Line of every value that has a key or a list position, from 1."""


def parse(text: str) -> Document:
    """The one document of a configuration text.

    Raises:
        TextError: the text is not YAML, or uses something that is refused here.
    """
    lines: dict[Path, int] = {}
    try:
        events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        next(events)
        if isinstance(next(events), yaml.StreamEndEvent):
            return Document(None, lines)
        data = _node(next(events), events, (), lines)
        next(events)
        end = next(events)
    except yaml.reader.ReaderError as error:
        raise TextError(text.count("\n", 0, error.position) + 1, "a character that text cannot contain") from error
    except yaml.MarkedYAMLError as error:
        raise TextError(_line(error.problem_mark or error.context_mark), _explained(error)) from error
    if not isinstance(end, yaml.StreamEndEvent):
        raise TextError(_line(end.start_mark), "a second document starts here (---); wanted one document per file")
    return Document(data, lines)


def dump(data: Any) -> str:
    """Text that ``parse`` reads as the same data, in block style, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def checked(text: str, line: int = 1) -> str:
    """The text itself.

    Raises:
        TextError: it holds a NUL or half a surrogate pair, which neither a path nor JSON can.
    """
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise TextError(line, "a character that text cannot contain")
    return text


def scalar(text: str) -> Any:
    """What an unquoted word stands for: None, a boolean, a number, or the text itself.

    A whole number in exponent notation is an integer, so that ``total_episodes: 1e5`` is one.
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    number = float(text)
    exact = "e" in text.lower() and number.is_integer() and abs(number) < 2**53
    return int(number) if exact else number


def _node(event: yaml.Event, events: Iterator[yaml.Event], path: Path, lines: dict[Path, int]) -> Any:
    """The value that starts with ``event``; adds the lines of what lies in it to ``lines``."""
    line = _line(event.start_mark)
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise TextError(line, "anchors and aliases (& and *) are not supported: write the value out, or quote the text")
    if event.tag is not None:
        raise TextError(line, f"tags are not supported: got {event.tag}")
    if len(path) > _MAX_DEPTH:
        raise TextError(line, f"values are nested more than {_MAX_DEPTH} deep")
    if isinstance(event, yaml.ScalarEvent):
        return scalar(event.value) if event.style is None else checked(event.value, line)
    if isinstance(event, yaml.SequenceStartEvent):
        return _items(events, path, lines)
    return _mapping(events, path, lines)


def _items(events: Iterator[yaml.Event], path: Path, lines: dict[Path, int]) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        here = (*path, len(items))
        lines[here] = _line(event.start_mark)
        items.append(_node(event, events, here, lines))
    return items


def _mapping(events: Iterator[yaml.Event], path: Path, lines: dict[Path, int]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        line = _line(event.start_mark)
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
            raise TextError(line, "a key must be plain text")
        key = event.value
        here = (*path, key)
        if key in mapping:
            raise TextError(line, f"{dotted(here)} is set twice, first on line {lines[here]}")
        lines[here] = line
        value = next(events)
        if event.style is None and ":" in key and _is_left_out(value, event):
            name, _, rest = key.partition(":")
            raise TextError(line, f"{key} is one word, as no blank follows its colon: write `{name}: {rest}`")
        mapping[key] = _node(value, events, here, lines)
    return mapping


def _is_left_out(value: yaml.Event, key: yaml.ScalarEvent) -> bool:
    """Whether braces hold a key alone, without a colon after it."""
    return isinstance(value, yaml.ScalarEvent) and value.start_mark.index == value.end_mark.index == key.end_mark.index


def dotted(path: Path) -> str:
    """A path as messages and the command line write it: ``rewards.0.weight``."""
    return ".".join(map(str, path))


def _line(mark: yaml.Mark | None) -> int:
    return mark.line + 1 if mark else 1


def _explained(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "not YAML"
    if "mapping values are not allowed" in problem:
        return "a second ': ' on this line: put text that holds one in quotes, and check the indentation"
    if "expected '<document start>'" in problem:
        return "a second value starts here; wanted one mapping of keys, as in a YAML file, not rows of data"
    return problem


class _Dumper(yaml.SafeDumper):
    """Quotes every text that ``scalar`` would read as something else, or that YAML's line folding would change."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if scalar(text) is text and text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
