"""Hashes of what a run reads from datasets and files, by which a resumed run recognizes them."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def file_digest(path: str) -> str | None:
    """A hash of a file's contents; None if there is no such file."""
    file = Path(path)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def rows_digest(rows: Iterable[tuple[int, Sequence[Iterable[int]], Mapping[str, Any]]]) -> str:
    """A hash of all rows and their order.

    Args:
        rows: for each row its index, the token ids of its texts, and its other columns.
    """
    digest = hashlib.sha256()
    for row, texts, columns in rows:
        first, *others = texts
        ids = [*first, *(token for text in others for token in (-1, *text))]
        digest.update(array("q", [row, *ids, -2]).tobytes())
        digest.update(json.dumps(columns, default=str, sort_keys=True).encode())
    return digest.hexdigest()
