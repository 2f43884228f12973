"""A hash of what a run reads from a dataset, by which a resumed run recognizes it."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


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
