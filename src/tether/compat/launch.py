"""Reads command lines of other systems as keys and values: shell scripts, lists of arguments, Hydra overrides, YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.config import text
from tether.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """One command line."""

    program: str
    """The program: the words before its first argument."""
    words: Sequence[str]
    """The arguments."""


class Unset(str):
    """A word with a variable that the script does not set."""


def launches(script: str, source: str) -> list[Launch]:
    """The command lines of a shell script, or a single one if it holds nothing but arguments.

    A trailing backslash continues a line; variables set in the script and HOME are expanded, others are left as they
    are; a wrapper (``ray job submit … --``) counts as part of the program.

    Raises:
        ConfigError: a line has an unclosed quote.
    """
    variables = {"HOME": str(Path.home())}
    found = []
    for number, line in _lines(script):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from error
        words = [_filled(word, variables) for word in words]
        while words and (assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
            variables[assigned[1]] = assigned[2]
            words = words[1:]
        if words[:1] in (["export"], ["set"], ["cd"], ["echo"]):
            for word in words[1:]:
                name, equals, value = word.partition("=")
                if equals:
                    variables[name] = value
            continue
        if words:
            first = next((i for i, word in enumerate(words) if _is_argument(word)), len(words))
            if "--" in words:  # ray job submit … -- python …
                inner = words.index("--") + 1
                first = next((i for i in range(inner, len(words)) if _is_argument(words[i])), len(words))
            found.append(Launch(" ".join(words[:first]), words[first:]))
    return found


def processes(launch: Launch) -> int | None:
    """Number of processes that a launcher is to start; None if it takes the number from elsewhere.

    A program that is not started by accelerate, torchrun or deepspeed is one process.
    """
    words = [*launch.program.split(), *launch.words]
    told = _told(words, "num_processes")
    if told is None and (told := _told(words, "nproc_per_node")) is not None:
        told *= _told(words, "nnodes") or 1
    launchers = {"accelerate", "torchrun", "torch.distributed.run", "deepspeed"}
    is_launched = any(Path(word).name in launchers for word in words)
    return told or (None if is_launched else 1)


def _told(words: Sequence[str], name: str) -> int | None:
    """The whole number after an option of a launcher, whose words may be joined by ``-`` or ``_``."""
    text = " ".join(words)
    found = re.search(rf"(?:^| )--{name.replace('_', '[-_]')}[ =](\d+)(?: |$)", text)
    return int(found[1]) if found else None


def _lines(script: str) -> Iterator[tuple[int, str]]:
    """Complete commands with the number of their first line."""
    begun, start = "", 1
    for number, line in enumerate(script.splitlines(), start=1):
        if not begun:
            start = number
        stripped = line.rstrip()
        if re.match(r"\s*#", line):
            continue
        if stripped.endswith("\\"):
            begun += stripped[:-1] + " "
            continue
        whole, begun = begun + line, ""
        if whole.strip():
            yield start, whole
    if begun.strip():
        yield start, begun


def _filled(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, default if default is not None else match[0])

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, word)


def _is_argument(word: str) -> bool:
    return word.startswith("--") or re.match(r"[+~]{0,2}[A-Za-z_][\w.]*\.[\w.]+=", word) is not None


def options(words: Sequence[str], source: str) -> dict[str, Any]:
    """``--key value value --flag`` as keys with values; several values become a list, none becomes true.

    Raises:
        ConfigError: a value has no key before it.
    """
    given: dict[str, Any] = {}
    key = None
    values: list[str] = []

    def close() -> None:
        if key is not None:
            given[key] = True if not values else _value(values[0]) if len(values) == 1 else [*map(_value, values)]

    for word in words:
        if re.match(r"--[A-Za-z_]", word):
            close()
            name, equals, value = word[2:].partition("=")
            key, values = name.replace("-", "_"), [value] if equals else []
        elif key is None:
            raise ConfigError(f"{source}: got {word} before the first option; wanted --key value")
        else:
            values.append(word)
    close()
    return given


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """Hydra's ``a.b=value`` as keys with values; the signs before additions are dropped."""
    given = {}
    for word in words:
        if match := re.fullmatch(r"[+]{0,2}([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
            quoted = re.fullmatch(r"(['\"])(.*)\1", match[2], re.DOTALL)
            if quoted and not _unset(word):
                given[match[1]] = re.sub(r"\\(['\"])", r"\1", quoted[2])
            else:
                given[match[1]] = _value(match[2])
    return given


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping with its keys joined by dots."""
    given: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        given |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return given


def command(program: Sequence[str], words: Sequence[tuple[str, ...]]) -> str:
    """A shell command over several lines, every word quoted where it must be."""
    lines = [" ".join(map(shlex.quote, program)), *(" ".join(map(shlex.quote, line)) for line in words)]
    return " \\\n    ".join(lines) + "\n"


def _unset(word: str) -> bool:
    """Whether the word still holds a shell variable; ``${a.b}`` and ``${oc.select:…}`` are Hydra's."""
    return re.search(r"\$(\w|\{\w+\})", word) is not None


def _value(word: str) -> Any:
    """The value of a word as YAML; text that is not YAML stands for itself."""
    if _unset(word):
        return Unset(word)
    try:
        value = text.parse(word).data
    except text.TextError:
        return word
    return word if isinstance(value, dict) else value
