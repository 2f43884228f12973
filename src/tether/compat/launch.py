"""Reads command lines of other systems as keys and values: shell scripts, lists of arguments, Hydra overrides, YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.compat.flow import commands
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
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that the script has set before it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The texts that the script has written to files before it."""
    notes: Sequence[str] = ()
    """Under which condition it starts, one sentence each."""


class Unset(str):
    """A word with a variable that the script does not set, or with the output of a command."""


LAUNCHERS = {"accelerate", "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed"}
"""Programs and modules that start a script in several processes."""
CLI = {"llamafactory-cli", "lmf", "llamafactory.cli"}
"""LLaMA-Factory's command, which starts a process for each device."""


def launches(script: str, source: str) -> list[Launch]:
    """The command lines of a shell script, or a single one if it holds nothing but arguments; those behind a condition
    that does not hold come last.

    A wrapper (``ray job submit … --``) and the options of a launcher (``torchrun --nproc_per_node 8 script.py``) count
    as part of the program.

    Raises:
        ConfigError: a line has an unclosed quote or parenthesis.
    """
    found = []
    for each in sorted(commands(script, source), key=lambda each: not each.is_reached):
        words = each.words
        inner = words.index("--") + 1 if "--" in words else 0  # ray job submit … -- python …
        begin = max(inner, _script(words, inner) + 1)
        first = next((i for i in range(begin, len(words)) if _is_argument(words[i])), len(words))
        found.append(Launch(" ".join(words[:first]), words[first:], each.line, each.variables, each.files, each.notes))
    return found


def _script(words: Sequence[str], inner: int) -> int:
    """Index of the script or module that Python or a launcher runs; -1 if there is none."""
    for i in range(inner, len(words)):
        is_module = i > inner and words[i - 1] in ("-m", "--module") and words[i] not in LAUNCHERS
        if is_module or words[i].endswith(".py"):
            names = [Path(word).name for word in words[inner:i]]
            return i if any(name in LAUNCHERS or name.startswith("python") for name in names) else -1
    return -1


def processes(launch: Launch, settings: Mapping[str, Any] | None = None) -> int | None:
    """Number of processes that a launcher is to start; None if it takes the number from elsewhere.

    A program that is not started by accelerate, torchrun, deepspeed or LLaMA-Factory's command is one process.

    Args:
        settings: those of the file that accelerate is given.
    """
    words = [*launch.program.split(), *launch.words]
    names = set(map(_name, words))
    for total in (_option(words, "num_processes"), (settings or {}).get("num_processes")):
        if total is not None:
            return _count(total)
    for each, machines in (("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes")):
        if (of_one := _option(words, each)) is not None:
            return _product(of_one, _option(words, machines))
    if names & CLI:
        of_one = launch.environment.get("NPROC_PER_NODE", _devices(launch))
        return _product(of_one, launch.environment.get("NNODES"))
    if "deepspeed" in names and _option(words, "include") is None:
        return _product(_devices(launch), _option(words, "num_nodes"))
    return None if names & LAUNCHERS else 1


def config_file(launch: Launch) -> str | None:
    """The file that accelerate is given; None if it is given none, or does not start the program."""
    words = launch.program.split()
    return _option(words, "config_file") if "accelerate" in map(_name, words) else None


def _name(word: str) -> str:
    return Path(word).name


def _devices(launch: Launch) -> int | None:
    """Number of devices that the script makes visible."""
    listed = launch.environment.get("CUDA_VISIBLE_DEVICES", "")
    return len(listed.split(",")) if re.fullmatch(r"\d+(,\d+)*", listed) else None


def _product(of_one: Any, machines: Any) -> int | None:
    counts = _count(of_one), _count(1 if machines is None else machines)
    return None if None in counts else counts[0] * counts[1]


def _count(value: Any) -> int | None:
    """A whole number above 0; None for anything else, such as a variable that the script does not set."""
    return int(value) if re.fullmatch(r"[1-9]\d*", str(value)) else None


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


def _option(words: Sequence[str], name: str) -> str | None:
    """What is said after an option of a launcher, whose words may be joined by ``-`` or ``_``; None if it is absent."""
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("-", "_") == name:
            return value if equals else next(iter(words[i + 1 : i + 2]), "")
    return None


def _is_argument(word: str) -> bool:
    return word.startswith("--") or re.match(r"[+~]{0,2}[A-Za-z_][\w.]*\.[\w.]+=", word) is not None


def options(words: Sequence[str], source: str) -> dict[str, Any]:
    """``--key value value --flag`` as keys with values; several values become a list, none becomes true.

    Raises:
        ConfigError: a value has no key before it, or as ``overrides``.
    """
    given: dict[str, Any] = {}
    key = None
    values: list[str] = []

    def close() -> None:
        if key is not None:
            given[key] = True if not values else _plain(values[0]) if len(values) == 1 else [*map(_plain, values)]

    for word in words:
        _check_known(word, source)
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


def overrides(words: Sequence[str], source: str) -> dict[str, Any]:
    """Hydra's ``a.b=value`` as keys with values; the signs before additions are dropped, ``~a.b`` stays as it is.

    Raises:
        ConfigError: it is unknown which ones a variable or an array holds, or a command prints.
    """
    given: dict[str, Any] = {}
    for word in words:
        _check_known(word, source)
        if match := re.fullmatch(r"[+]{0,2}([^\s=$'\"{}\[\]-][^\s=$'\"{}\[\]]*)=(.*)", word, re.DOTALL):
            quoted = re.fullmatch(r"(['\"])(.*)\1", match[2], re.DOTALL)
            if quoted and not _unset(word):
                given[match[1]] = re.sub(r"\\(['\"])", r"\1", quoted[2])
            else:
                value = _value(match[2])
                given |= flat(value, f"{match[1]}.") if isinstance(value, dict) and value else {match[1]: value}
        elif re.fullmatch(r"\$\(.*\)", word, re.DOTALL):
            raise ConfigError(f"{source}: only a shell can run {word[:60]}…: write what it prints in its place")
        elif re.fullmatch(r"~[\w./@]+", word):
            given[word] = "removed"
    return given


def _check_known(word: str, source: str) -> None:
    """Raises ``ConfigError`` if a word stands for options of which only a shell knows whether they are there."""
    if unknown := re.search(r"\$\{(\w+)\[[@*]\]\?(\d+)\}", word):
        raise ConfigError(
            f"{source}: line {unknown[2]} holds a condition that only a shell knows, which decides what {unknown[1]} "
            "holds: keep the branch that runs, and remove the condition"
        )


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
    return re.search(r"\$(\w|\{#?\w+(\[[^\]]*\])?(([#%/,^]|:?[-=+?])[^}]*)?\}|\()", word) is not None


def as_unset(value: Any) -> Any:
    """A value, which is marked if it still holds a shell's variable or command."""
    return Unset(value) if isinstance(value, str) and _unset(value) else value


def _value(word: str) -> Any:
    """The value of a word as YAML; text that is not YAML stands for itself."""
    if _unset(word):
        return Unset(word)
    try:
        return text.parse(word).data
    except text.TextError:
        return word


def _plain(word: str) -> Any:
    """As ``_value``, but for groups of keys, which stay text."""
    value = _value(word)
    return word if isinstance(value, dict) else value
