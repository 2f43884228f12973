"""JSON lines on disk: whole lines only, strict JSON only."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.errors import DataError

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends records to a file, one JSON object per line, each on disk before ``write`` returns.

    A kill can at most leave a torn last line. Opening the file again removes it.

    Args:
        path: the file; created with its folder if missing, otherwise continued.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        _mend(self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record. NaN and infinities, which JSON lacks, become null, and a warning names them."""
        self.write_all([record])

    def write_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends several records in one go."""
        lines = b"".join(self._line(record) for record in records)
        with self.path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def _line(self, record: Mapping[str, Any]) -> bytes:
        names: list[str] = []
        text = json.dumps(_strict(record, "", names), ensure_ascii=False, allow_nan=False, default=str)
        if names:
            logger.warning("%s: written as null because not finite: %s", self.path.name, ", ".join(names))
        # A lone surrogate, which UTF-8 cannot hold, becomes \udXXX: inside a JSON string that is its escape.
        return text.encode(errors="backslashreplace") + b"\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that was torn by a kill.

    Raises:
        DataError: another line is not a JSON object; the message names it.
    """
    return [record for _, record in _records(Path(path))]


def truncate_after(path: Path, step: int, evaluated_step: int) -> None:
    """Drops records after a checkpoint, in one atomic replacement, so that a resumed run repeats none of them.

    These are the records whose ``step`` is larger than the checkpoint's, or larger than ``evaluated_step`` for an
    evaluation: the last evaluation can follow the checkpoint of the same update.

    The other lines keep their bytes. A missing file stays missing.

    Raises:
        DataError: as in ``read_jsonl``, or a record has no step.
    """
    path = Path(path)
    if not path.exists():
        return
    last, kept = {False: step, True: evaluated_step}, []
    for line, record in _records(path):
        if not isinstance(record.get("step"), int):
            raise DataError(f"{path}: {line[:80]!r} has no step that is a whole number: fix or delete that line")
        if record["step"] <= last[_is_evaluation(record)]:
            kept.append(line + b"\n")
    write_whole(path, b"".join(kept))


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record of metrics.jsonl or samples.jsonl is from an evaluation."""
    return "eval_scores" in record or record.get("split") == "eval"


def _strict(value: Any, name: str, not_finite: list[str]) -> Any:
    """``value`` with None for numbers that JSON lacks; their dotted names are added to ``not_finite``."""
    if isinstance(value, float) and not math.isfinite(value):
        not_finite.append(f"{name}={value}")
        return None
    if isinstance(value, Mapping):
        return {k: _strict(v, f"{name}.{k}" if name else str(k), not_finite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v, f"{name}.{i}", not_finite) for i, v in enumerate(value)]
    return value


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, record) of every line except empty ones and a torn last one."""
    *lines, tail = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield line, _parsed(line, f"{path}, line {number}")
    if _is_whole(tail):
        yield tail, json.loads(tail)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}): fix or delete that line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is {type(record).__name__}, expected a JSON object: fix or delete that line")
    return record


def _is_whole(tail: bytes) -> bool:
    """Whether a last line without newline is a complete record; a torn object is never valid JSON."""
    try:
        return isinstance(json.loads(tail), dict)
    except ValueError:
        return False


def _mend(path: Path) -> None:
    """Makes the file end with a complete line, so that the next record starts a new one."""
    content = path.read_bytes()
    tail = content[content.rfind(b"\n") + 1 :]
    if tail:
        write_whole(path, content + b"\n" if _is_whole(tail) else content[: len(content) - len(tail)])


def write_new(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Creates a file of records: all of it or nothing.

    Raises:
        DataError: the file exists; names the file that the records are in instead.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with _all_or_nothing(path, temporary):
        JsonlWriter(temporary).write_all(records)
    if path.exists():
        raise DataError(f"{path} was created by something else meanwhile; the rows are in {temporary}")
    os.replace(temporary, path)


def unfinished(path: Path) -> Path:
    """The file that a process leaves if it is killed while it replaces ``path``. The next replacement removes it."""
    return path.with_name(f".{path.name}.tmp")


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file by ``content``: all of it or nothing."""
    temporary = unfinished(path)
    with _all_or_nothing(path, temporary), temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def _all_or_nothing(path: Path, temporary: Path) -> Iterator[None]:
    """Removes what was written to ``temporary`` if not all of it can be; errors of the disk then name ``path``."""
    try:
        yield
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
