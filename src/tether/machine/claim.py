"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tether.errors import ConfigError


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Creates ``folder`` and locks it against other runs until exit; the lock also ends with the process.

    Raises:
        ConfigError: it cannot be created, or another run is writing to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be created: {error.strerror}") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"output_dir: another run is writing to {folder}; wait for it, or choose another") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
            raise
