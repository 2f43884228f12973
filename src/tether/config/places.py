"""Keys that say where the inputs of a run lie. A resumed run may name other places if their contents are the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SETS = "prompts|eval_prompts|ptx|demonstrations|eval_demonstrations|pairs|eval_pairs"
OF_ROWS = re.compile(rf"data\.(dataset_dir|(\w+_)?(split|subset)|({_SETS})(\.\d+)?)")
"""Where rows are read from. Digests of the rows themselves show whether they are the same."""
OF_FILES = re.compile(r"model\.path|value\.init|data\.chat_template|rewards\.\d+\.(members\.\d+\.)?path")
"""Folders of models, files of reward functions, and files of chat templates."""
FILE_OF = "the file of "
"""Before the key of a file whose contents may be repaired in its place, in the digests of a run."""


def is_place(key: str) -> bool:
    """Whether a key says where an input lies."""
    return any(pattern.fullmatch(key) for pattern in (OF_ROWS, OF_FILES))


def not_moved(changed: Iterable[str], saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Those of the keys that have changed which do not just name another place with the same contents, as far as
    digests of files can show. For rows, ``different`` must compare the digests of the datasets, too.

    Args:
        saved, now: digests of the models and files that were and are read, by key. Models of the hub have none.
    """
    return [key for key in changed if not _may_have_moved(key, saved, now)]


def _may_have_moved(key: str, saved: Mapping[str, str], now: Mapping[str, str]) -> bool:
    if OF_ROWS.fullmatch(key):
        return True
    names = (key, f"{FILE_OF}{key}")
    return OF_FILES.fullmatch(key) is not None and any(n in saved and saved[n] == now.get(n) for n in names)


def different(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Datasets and models with other digests than before, by key."""
    both = (key for key in now.keys() | saved.keys() if not key.startswith(FILE_OF))
    return sorted(key for key in both if now.get(key) != saved.get(key))
