"""What a configuration section says about its keys: names, types in words, defaults, help."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tether.config import text
from tether.config.base import Section


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One key as the help and the docs show it."""

    key: str
    """The key from the top, joined by dots; ``N`` stands for a position in a list."""
    type: str
    """What it takes, in words."""
    default: str
    """Its default as YAML, or ``required``."""
    help: str
    """The string under the field, on one line."""
    group: str
    """Heading of the keys that it belongs to."""


def describe(section: type[Section]) -> list[KeyDoc]:
    """Every key of a configuration, in the order of its fields; a union of sections gives each member's keys.

    If a member of a union holds members of the same union, their keys are not repeated.
    """
    documented = _documented(section, (), one_line(section.__doc__), ())
    return [doc for doc in documented if doc.key not in section.REFUSED]


def _documented(
    section: type[Section], path: text.Path, group: str, siblings: Sequence[type[Section]]
) -> Iterator[KeyDoc]:
    nested: list[tuple[type[Section], text.Path, str, list[type[Section]]]] = []
    for name, field in section.model_fields.items():
        here = (*path, name)
        inner, below = _nested(field, here)
        nested += [
            (member, below, _heading(member, below, len(inner) > 1), inner)
            for member in inner
            if member not in siblings
        ]
        if not inner or not _always_there(field, inner):
            yield KeyDoc(
                text.dotted(here),
                _bare(wanted(field.annotation, field.metadata)),
                _default(field),
                one_line(field.description),
                group,
            )
    for member, below, heading, union in nested:
        yield from _documented(member, below, heading, union)


def _nested(field: FieldInfo, path: text.Path) -> tuple[list[type[Section]], text.Path]:
    item = item_type(field.annotation)
    return (sections(item), (*path, "N")) if item is not None else (sections(field.annotation), path)


def _always_there(field: FieldInfo, inner: list[type[Section]]) -> bool:
    """A section that is neither optional nor a list has no row of its own: its keys say it all."""
    return len(inner) == 1 and field.annotation is inner[0]


def _heading(section: type[Section], path: text.Path, is_one_of_many: bool) -> str:
    which = f", type {tag(section)}" if is_one_of_many else ""
    return f"{text.dotted(path)}{which}: {one_line(section.__doc__)}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return shown(str(value) if isinstance(value, Path) else value)


def one_line(doc: str | None) -> str:
    """A docstring on one line; empty if there is none."""
    return " ".join((doc or "").split())


def _bare(words: str) -> str:
    return words.removeprefix("a ").removeprefix("an ")


def shown(value: Any) -> str:
    """A value as YAML would write it, cut to a readable length; text in quotes if it could be misread."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        plain = value.isprintable() and value == value.strip() and text.scalar(value) is value
        words = value if plain else repr(value)
    elif isinstance(value, float):
        words = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    elif isinstance(value, dict):
        words = "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list):
        words = "[" + ", ".join(map(shown, value)) + "]"
    else:
        words = str(value)
    return words if len(words) <= 60 else words[:57] + "…"


def counted(count: int, noun: str) -> str:
    """``1 update``, ``5,000 updates``, ``2 batches``, ``3 passes``."""
    plural = f"{noun}es" if noun.endswith(("tch", "s")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def wanted(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a field takes, in words: ``a number above 0 or null``."""
    base, metadata = _unwrapped(annotation, metadata)
    if get_origin(base) in (Union, types.UnionType):
        members = sorted(get_args(base), key=lambda member: member is types.NoneType)
        if all(_is_section(_unwrapped(member)[0]) for member in members):
            return "a group of keys"
        return " or ".join(wanted(member) for member in members)
    if get_origin(base) is Literal:
        options = [str(option) for option in get_args(base)]
        return options[0] if len(options) == 1 else f"one of {', '.join(options)}"
    if get_origin(base) is list:
        many = f"a list of {_plural(wanted(*get_args(base)))}"
        least = next((m.min_length for m in metadata if hasattr(m, "min_length")), 0)
        most = next((m.max_length for m in metadata if hasattr(m, "max_length")), None)
        if most is not None and most == least:
            return f"{many}, exactly {least}"
        return f"{many}, at least {least}" if least else many
    if get_origin(base) is dict:
        return "a mapping of names to values"
    if _is_section(base):
        return "a group of keys"
    words = {
        types.NoneType: "null",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
    }
    return words[base] + _range(metadata)


def _plural(words: str) -> str:
    plurals = {"a group of keys": "groups of keys", "a number": "numbers", "a whole number": "whole numbers"}
    return plurals.get(words, words)


def _range(metadata: Sequence[Any]) -> str:
    limits = {}
    for each in metadata:
        for kind in ("gt", "ge", "lt", "le"):
            limit = getattr(each, kind, None)
            if limit is not None:
                limits[kind] = str(limit) if isinstance(limit, int) else f"{limit:g}"
    if limits.keys() == {"ge", "le"}:
        return f" from {limits['ge']} to {limits['le']}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    parts = [f"{words[kind]} {limit}" for kind, limit in limits.items()]
    return f" {' and '.join(parts)}" if parts else ""


def sections(annotation: Any) -> list[type[Section]]:
    """The configuration sections that a value of this type may be; lists are not looked into."""
    base, _ = _unwrapped(annotation)
    if get_origin(base) in (Union, types.UnionType):
        return [section for member in get_args(base) for section in sections(member)]
    return [base] if _is_section(base) else []


def item_type(annotation: Any) -> Any | None:
    """Type of a list's entries; None if the type is not a list (or a choice of a list and something else)."""
    base, _ = _unwrapped(annotation)
    return get_args(base)[0] if get_origin(base) is list else None


def tag(section: type[Section]) -> str | None:
    """The value of ``type`` for this member of a union of sections."""
    field = section.model_fields.get("type")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else None


def is_text(field: FieldInfo) -> bool:
    """Whether the key takes text only (null aside), so that a word like ``7`` is text there."""
    base, _ = _unwrapped(field.annotation)
    members = get_args(base) if get_origin(base) in (Union, types.UnionType) else (base,)
    return set(members) - {types.NoneType} <= {str, Path}


def is_text_or_texts(field: FieldInfo) -> bool:
    """Whether the key takes text as well as a list of texts, and nothing else but null."""
    base, _ = _unwrapped(field.annotation)
    members = {_unwrapped(member)[0] for member in get_args(base)}
    return members - {types.NoneType} == {str, list[str]}


class Found(NamedTuple):
    """Where a location leads."""

    path: text.Path
    """Keys and list positions, as far as the configuration knows them and one unknown key further."""
    annotation: Any
    """Type of what is there, None for an unknown key."""
    field: FieldInfo | None
    """The key's field; None for an unknown key, a list's entry and the whole configuration."""


def find(section: type[Section], location: Sequence[str | int]) -> Found:
    """What is at a location.

    Args:
        location: keys and list positions; the names of union members that pydantic puts between them are dropped.
    """
    found = Found((), section, None)
    for part in location:
        members, item = sections(found.annotation), item_type(found.annotation)
        if item is not None and (isinstance(part, int) or part.isdecimal()):
            found = Found((*found.path, int(part)), item, None)
        elif len(members) > 1 and part in map(tag, members):
            found = found._replace(annotation=next(member for member in members if tag(member) == part))
        elif members:
            field = next((member.model_fields[part] for member in members if part in member.model_fields), None)
            found = Found((*found.path, part), field and field.annotation, field)
        else:
            break
    return found


def _unwrapped(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[Any, Sequence[Any]]:
    if get_origin(annotation) is Annotated:
        base, *more = get_args(annotation)
        plain = [each for one in more for each in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return _unwrapped(base, [*metadata, *plain])
    return annotation, metadata


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
