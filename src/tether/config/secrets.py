"""The parts of a configuration that may be shown to others."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit


def without_keys(value: Any, key: str = "") -> Any:
    """The configuration without what may hold a key: the query of an address, further fields of a request.

    Args:
        value: what ``model_dump`` gives, or a part of it.
        key: where the part is.
    """
    if isinstance(value, dict):
        return {name: without_keys(inner, name) for name, inner in value.items() if name != "extra_body" or not inner}
    if isinstance(value, list):
        return [without_keys(inner, key) for inner in value]
    return address_without_keys(value) if isinstance(value, str) and key in ("url", "base_url") else value


def address_without_keys(url: str) -> str:
    """An address without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="…" if parts.query else ""))
