"""Keys that say where the inputs of a run lie. A resumed run may name other places if their contents are the same. And
names that no file can have.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping

_SETS = "prompts|eval_prompts|ptx|demonstrations|eval_demonstrations|pairs|eval_pairs"
OF_ROWS = re.compile(rf"data\.(dataset_dir|(\w+_)?(split|subset)|({_SETS})(\.\d+)?)")
"""Where rows are read from. Digests of the rows themselves show whether they are the same."""
OF_FILES = re.compile(r"model\.path|value\.init|data\.chat_template|rewards\.\d+\.(members\.\d+\.)?path")
"""Folders of models, files of reward functions, and files of chat templates."""
PLACES = frozenset((*_SETS.split("|"), "dataset_dir", "chat_template", "path", "init", "output_dir", "resume"))
"""Names of keys whose text may name a file or a folder."""
FILE_OF = "the file of "
"""Before the key of a file whose contents may be repaired in its place, in the digests of a run."""
SHOWN = 100
"""Maximum number of characters of a name that a message shows."""


def why_no_name(place: str) -> str | None:
    """Why no file or folder of this machine can have a name, in words; None if one can."""
    home = os.path.expanduser(place)
    if home.startswith("~"):
        return f"got {_shown(place)}, but there is no home folder {place.partition('/')[0]}"
    try:
        os.stat(home)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return f"{_shown(place)} cannot be accessed: {error.strerror}"
    return None


def why_not_there(place: str, *, is_new: bool = False) -> str | None:
    """Why nothing can be read at a place now, in words; None if something can, or if it could be the name of something
    else, as on the hub, or if nothing is there.

    Args:
        is_new: whether a file may be written there, also by way of a link to nothing.
    """
    if (why := why_no_name(place)) is not None:
        return why
    home = os.path.expanduser(place)
    try:
        os.stat(home)
    except FileNotFoundError:
        if os.path.islink(home) and not is_new:
            return f"{_shown(place)} is a link to {os.readlink(home)}, which does not exist"
    except NotADirectoryError:
        return None
    except OSError as error:
        return f"{_shown(place)} cannot be accessed: {error.strerror}"
    if os.path.isdir(home) and not os.access(home, os.R_OK | os.X_OK):
        return f"{_shown(place)} is a folder that you may not read"
    return None


def _shown(place: str) -> str:
    return place if len(place) <= SHOWN else f"{place[:SHOWN]}…"


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
