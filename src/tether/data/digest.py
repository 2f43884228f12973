"""A hash of what a run reads of a dataset, by which a run that goes on knows it again."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping
from typing import Any


def rows_digest(rows: Iterable[tuple[int, Iterable[int], Mapping[str, Any]]]) -> str:
    """A hash of number, token ids and other columns of every row, and of their order."""
    digest = hashlib.sha256()
    for row, ids, columns in rows:
        digest.update(array("q", [row, *ids, -2]).tobytes())
        digest.update(json.dumps(columns, default=str, sort_keys=True).encode())
    return digest.hexdigest()
