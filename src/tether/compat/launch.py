"""Reads command lines of other systems as keys and values: shell scripts, lists of arguments, Hydra overrides, YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.compat.shell import commands
from tether.config import text
from tether.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """One command line."""

    program: str
    """The program: the words before its first argument."""
    words: Sequence[str]
    """The arguments."""
    line: int
    """Number of its first line in the script."""


class Unset(str):
    """A word with a variable that the script does not set, or with the output of a command."""


LAUNCHERS = {"accelerate", "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed"}
"""Programs and modules that start a script in several processes."""


def launches(script: str, source: str) -> list[Launch]:
    """The command lines of a shell script, or a single one if it holds nothing but arguments.

    A wrapper (``ray job submit … --``) and the options of a launcher (``torchrun --nproc_per_node 8 script.py``) count
    as part of the program.

    Raises:
        ConfigError: a line has an unclosed quote or parenthesis.
    """
    found = []
    for number, words in commands(script, source):
        inner = words.index("--") + 1 if "--" in words else 0  # ray job submit … -- python …
        begin = max(inner, _script(words, inner) + 1)
        first = next((i for i in range(begin, len(words)) if _is_argument(words[i])), len(words))
        found.append(Launch(" ".join(words[:first]), words[first:], number))
    return found


def _script(words: Sequence[str], inner: int) -> int:
    """Index of the script or module that Python or a launcher runs; -1 if there is none."""
    for i in range(inner, len(words)):
        is_module = i > inner and words[i - 1] in ("-m", "--module") and words[i] not in LAUNCHERS
        if is_module or words[i].endswith(".py"):
            names = [Path(word).name for word in words[inner:i]]
            return i if any(name in LAUNCHERS or name.startswith("python") for name in names) else -1
    return -1


def processes(launch: Launch) -> int | None:
    """Number of processes that a launcher is to start; None if it takes the number from elsewhere.

    A program that is not started by accelerate, torchrun or deepspeed is one process.
    """
    words = [*launch.program.split(), *launch.words]
    told = _told(words, "num_processes")
    for each, machines in (("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes")):
        if told is None and (told := _told(words, each)) is not None:
            told *= _told(words, machines) or 1
    is_launched = any(Path(word).name in LAUNCHERS for word in words)
    return told or (None if is_launched else 1)


def launcher(launch: Launch) -> str | None:
    """The words with which accelerate or torchrun starts a script; None if neither does."""
    words = launch.program.split()
    begin = next((i for i, word in enumerate(words) if Path(word).name in ("accelerate", "torchrun")), None)
    end = _script(words, 0)
    if begin is None or end <= begin:
        return None
    if words[end - 1] in ("-m", "--module"):
        end -= 1
    return shlex.join([Path(words[begin]).name, *words[begin + 1 : end]])


def _told(words: Sequence[str], name: str) -> int | None:
    """The whole number after an option of a launcher, whose words may be joined by ``-`` or ``_``."""
    text = " ".join(words)
    found = re.search(rf"(?:^| )--{name.replace('_', '[-_]')}[ =](\d+)(?: |$)", text)
    return int(found[1]) if found else None


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


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a nested mapping."""
    data: dict[str, Any] = {}
    for key, value in given.items():
        *above, last = key.split(".")
        here = data
        for name in above:
            here = here.setdefault(name, {})
        here[last] = value
    return data


def command(program: Sequence[str], words: Sequence[tuple[str, ...]]) -> str:
    """A shell command over several lines, every word quoted where it must be."""
    lines = [" ".join(map(shlex.quote, program)), *(" ".join(map(shlex.quote, line)) for line in words)]
    return " \\\n    ".join(lines) + "\n"


def _unset(word: str) -> bool:
    """Whether the word still holds a shell's variable or command; ``${a.b}`` and ``${oc.select:…}`` are Hydra's."""
    return re.search(r"\$(\w|\{\w+(\[[@*]\])?(([#%/,^]|:?[-=+?])[^}]*)?\}|\()", word) is not None


def _value(word: str) -> Any:
    """The value of a word as YAML; text that is not YAML stands for itself."""
    if _unset(word):
        return Unset(word)
    try:
        value = text.parse(word).data
    except text.TextError:
        return word
    return word if isinstance(value, dict) else value
