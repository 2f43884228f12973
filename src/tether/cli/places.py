"""Files and folders in the arguments of a command."""

from __future__ import annotations

import argparse
from pathlib import Path

from tether.config.places import why_not_there


def place(word: str) -> str:
    """A name of a file or folder, or of something on the hub; argparse shows the error after the option's name."""
    if (why := why_not_there(word)) is not None:
        raise argparse.ArgumentTypeError(why)
    return word


def local_place(word: str) -> Path:
    """A file or folder of this machine, which may be written."""
    if (why := why_not_there(word, is_new=True)) is not None:
        raise argparse.ArgumentTypeError(why)
    return Path(word)
