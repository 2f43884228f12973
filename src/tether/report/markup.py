"""HTML from nested calls. Every string that is not ``Html`` is made visible and escaped, so that none can be
forgotten."""

from __future__ import annotations

from html import escape

from tether.report.text import visible

_VOID = frozenset({"br", "circle", "hr", "line", "meta", "path", "rect"})


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """One element. ``class_`` loses its underscore, other underscores become hyphens.

    Children and attribute values are escaped unless they are ``Html``; None is omitted, True becomes a bare attribute.
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Html(f"<{tag}{written}/>" if tag not in ("br", "hr", "meta") else f"<{tag}{written}>")
    return Html(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: object) -> Html:
    """Concatenates children, omitting None."""
    return Html("".join(_escaped(child) for child in children if child is not None))


def _escaped(value: object) -> str:
    return value if isinstance(value, Html) else escape(visible(str(value)))
