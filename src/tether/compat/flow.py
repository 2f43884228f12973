"""Follows a shell script as far as a launch needs it: branches, loops, functions and scripts that it reads in.

Nothing is run, so what a test of files or the output of a command says is unknown. A script is read as if it had no
arguments and its variables came from nowhere else.

    condition holds            the branch counts
    condition does not hold    its commands come last, each with a note, and set no variables for what follows
    unknown                    its commands count; what it sets is unknown behind it
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

from tether.compat.shell import (
    ASSIGNED,
    FILE,
    SUM,
    TEXT,
    Command,
    Part,
    Scanner,
    assign,
    defaults,
    expanded,
    filled,
    sum_holds,
    value,
)
from tether.errors import ConfigError

_SETS = ("export", "set", "cd", "echo", "declare", "local", "readonly", "typeset", "unset", "exit", "return", "trap")
"""Commands that start nothing; some of them set variables."""
_SHELLS = ("bash", "sh", "zsh")
"""Programs that run a script that they are given as a word."""
_TESTS = ("[", "[[", "test")
_ASKS = ("grep", "command", "which", "type", "diff", "cmp", "pgrep", "nvidia-smi", "ls")
"""Commands that scripts run to see whether they succeed."""
_COMPARED = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A command that starts something."""

    line: int
    """Number of its first line."""
    words: Sequence[str]
    variables: Mapping[str, str]
    """The variables then."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The texts that the script has written to files by then, by their names."""
    notes: Sequence[str] = ()
    """Under which condition it runs, and in which round of a loop, one sentence each."""
    is_reached: bool = True
    """Whether no condition around it is known not to hold."""


_Steps = Generator[Found, None, Any]


def commands(script: str, source: str) -> Iterator[Found]:
    """The commands of a script that start something, in the order in which it reaches them.

    Pipes, redirections, ``&`` and parentheses around it end a command; a trailing backslash, an open quote or an open
    array continues it. Texts that a script passes on by ``<<`` are left out, unless ``read`` puts them into a variable.
    Variables and arrays that are set in the script and HOME are expanded, and so are sums of whole numbers, ``$((…))``;
    others are left as they are, except the arguments of the script, which are left out. Of a loop, the first round is
    read.

    Raises:
        ConfigError: a quote or a parenthesis is not closed.
    """
    reader = _Reader(source)
    yield from reader.block(deque(Scanner(script, source).commands()))
    for name, body in list(reader.functions.items()):
        if name not in reader.called:
            yield from reader.branch(reader.call(name, ()), False, body[0].line)


@dataclass
class _Reader:
    """What a script has set so far."""

    source: str
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, Sequence[str]] = field(default_factory=dict)
    functions: dict[str, Sequence[Command]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """The texts that it writes to files."""
    called: set[str] = field(default_factory=set)
    """The functions that it calls."""
    notes: tuple[str, ...] = ()
    is_reached: bool = True
    active: list[Any] = field(default_factory=list)
    """Functions and scripts that are being read, which are not followed again."""
    end: str = ""
    """What ended the last command."""
    is_guess: bool = False
    """Whether it is only likely that the last command succeeds, as nothing goes wrong."""

    def __post_init__(self) -> None:
        known = {"HOME": str(Path.home()), "PWD": str(Path.cwd()), "0": self.source, "BASH_SOURCE": self.source}
        self.variables = self.variables or known

    def block(self, rest: deque[Command], ends: Sequence[str] = ()) -> _Steps:
        """Reads commands up to one of the words ``ends``; returns that word, and whether the last command succeeds."""
        holds, joint = True, ""
        while rest:
            if (word := rest[0].keyword) in ends:
                self._take_word(rest)
                return word, holds
            line, reached = rest[0].line, {"&&": holds, "||": _not(holds)}.get(joint, True)
            found = yield from self.branch(self._command(rest), reached, line)
            holds, joint = found if reached else holds if reached is False else None, self.end
        return "", holds

    def _take_word(self, rest: deque[Command]) -> None:
        """Takes the first word of the next command, which is one of the shell's own."""
        command = rest.popleft()
        if command.words[1:]:
            rest.appendleft(replace(command, words=command.words[1:]))
        self.end = command.end

    def branch(self, steps: _Steps, holds: bool | None, line: int, changed: dict[str, str] | None = None) -> _Steps:
        """Follows steps that are taken if a condition holds.

        Args:
            line: where the condition is.
            changed: collects the names whose values become unknown. Default: they do so at once.
        """
        if holds:
            return (yield from steps)
        before = dict(self.variables), dict(self.arrays)
        files, notes, is_reached = dict(self.files), self.notes, self.is_reached
        if holds is False:
            self.is_reached = False
            self.notes = (*notes, f"The run is in a branch that the script, as it stands, does not take (line {line}).")
        result = yield from steps
        names = {} if changed is None else changed
        if holds is None:
            texts = {name: text for name, text in self.variables.items() if text != before[0].get(name)}
            names |= {name: "[*]" if re.search(r"(^|\s)--|=", text) else "" for name, text in texts.items()}
            names |= {name: "[@]" for name, words in self.arrays.items() if words != before[1].get(name)}
        (self.variables, self.arrays), self.notes, self.is_reached = before, notes, is_reached
        self.files = files if holds is False else self.files
        if changed is None:
            self._forget(names, line)
        return result

    def _forget(self, names: Mapping[str, str], line: int) -> None:
        """Makes values unknown; what stands for them names the line that decides them."""
        for name, kind in names.items():
            unknown = f"${{{name}{kind}?{line}}}"
            if kind == "[@]":
                self.arrays[name] = [*self.arrays.get(name, ()), unknown]
            else:
                self.variables[name] = f"{self.variables.get(name, '')} {unknown}".strip() if kind else unknown

    def _command(self, rest: deque[Command]) -> _Steps:
        """Reads a command, a branch or a loop; returns whether it succeeds, None if unknown."""
        match rest[0].keyword:
            case "if":
                return (yield from self._if(rest))
            case "case":
                return (yield from self._case(rest))
            case "for" | "select":
                return (yield from self._for(rest))
            case "while" | "until" as word:
                return (yield from self._while(rest, until=word == "until"))
            case "{":
                self._take_word(rest)
                return (yield from self.block(rest, ("}",)))[1]
            case "!":
                self._take_word(rest)
                return _not((yield from self._command(rest)) if rest else True)
            case "time" | "then" | "do" | "else" as word:
                self._take_word(rest)
                return (yield from self._command(rest)) if rest else True
        if (name := rest[0].defines) is not None:
            self._define(name, rest)
            return True
        command = rest.popleft()
        self.end = command.end
        return (yield from self._simple(command))

    def _condition(self, rest: deque[Command], end: str) -> _Steps:
        """Whether the commands up to the word ``end`` succeed."""
        _, holds = yield from self.block(rest, (end,))
        return None if holds and self.is_guess else holds

    def _if(self, rest: deque[Command]) -> _Steps:
        line, open_, changed, end = rest[0].line, True, {}, "elif"
        while end == "elif":
            if rest and rest[0].keyword == "if":
                self._take_word(rest)
            holds = yield from self._condition(rest, "then")
            end, _ = yield from self.branch(
                self.block(rest, ("elif", "else", "fi")), _both(open_, holds), line, changed
            )
            open_ = _both(open_, _not(holds))
        if end == "else":
            yield from self.branch(self.block(rest, ("fi",)), open_, line, changed)
        self._forget(changed, line)
        return True

    def _case(self, rest: deque[Command]) -> _Steps:
        command = rest.popleft()
        line, self.end = command.line, command.end
        text = self._text(command.words[1]) if command.words[1:] else "$"
        if command.words[3:]:
            rest.appendleft(replace(command, words=command.words[3:]))
        open_, changed, end = True, {}, ";;"
        while rest and end == ";;" and rest[0].keyword != "esac":
            holds = self._pattern(rest, text)
            end, _ = yield from self.branch(
                self.block(rest, (";;", "esac")), _both(open_, holds), line, changed
            )
            open_ = _both(open_, _not(holds))
        if end == ";;" and rest:
            self._take_word(rest)
        self._forget(changed, line)
        return True

    def _pattern(self, rest: deque[Command], text: str) -> bool | None:
        """Takes the patterns before a branch, ``a | b)``; whether one of them fits the text."""
        fits: list[bool] = []
        while rest:
            command = rest.popleft()
            parts, *words = command.words
            is_last = parts[-1] == Part(")")
            texts = [escape(part.text) if part.quote else self._text([part]) for part in parts if part != Part(")")]
            fits.append(fnmatchcase(text, "".join(texts).removeprefix("(")))
            if is_last:
                if words:
                    rest.appendleft(replace(command, words=words))
                break
        return None if "$" in text else any(fits)

    def _for(self, rest: deque[Command]) -> _Steps:
        """The first round of a loop."""
        command = rest.popleft()
        line, words = command.line, command.words[1:]
        name = re.sub(r"^\(*|\W.*", "", self._text(words[0])) if words else ""
        listed = [word for parts in words[2:] for word in expanded(parts, self.variables, self.arrays)]
        has_list = len(words) > 1 and self._text(words[1]) == "in"
        while rest and rest[0].keyword != "do":
            rest.popleft()
        if rest:
            self._take_word(rest)
        notes, first = self.notes, _first(listed[0]) if listed else None
        if first is not None:
            self.variables[name] = first
            if listed != [first]:
                told = f"The run is that of the first round of the loop in line {line}, with {name} {first}."
                self.notes = (*notes, told)
        else:
            self._forget({name: ""}, line)
        yield from self.branch(self.block(rest, ("done",)), bool(listed) or not has_list, line)
        self.notes = notes
        return True

    def _while(self, rest: deque[Command], *, until: bool) -> _Steps:
        line = rest[0].line
        self._take_word(rest)
        holds = yield from self._condition(rest, "do")
        yield from self.branch(self.block(rest, ("done",)), _not(holds) if until else holds, line)
        return True

    def _define(self, name: str, rest: deque[Command]) -> None:
        """Takes a function and keeps its commands."""
        command = rest.popleft()
        begin = next((i for i, parts in enumerate(command.words) if parts == [Part("{")]), None)
        if begin is not None:
            rest.appendleft(replace(command, words=command.words[begin:]))
        body, depth = [], 0
        while rest:
            command = rest.popleft()
            depth += (command.keyword == "{") - (command.keyword == "}")
            body.append(command)
            if depth == 0:
                break
        self.end = command.end
        if body:
            self.functions[name] = body

    def _simple(self, command: Command) -> _Steps:
        """A command without branches; whether it succeeds, None if unknown."""
        passed = [parts[0] for parts in command.words if parts[0].quote.startswith(TEXT)]
        written = [parts[1:] for parts in command.words if parts[0].quote == FILE]
        given = [parts for parts in command.words if not parts[0].quote.startswith((TEXT, FILE))]
        while given and (assigned := ASSIGNED.match(given[0][0].text)) and not given[0][0].quote:
            assign(assigned, given.pop(0), self.variables, self.arrays)
        self.is_guess = False
        if given and given[0][0].quote == SUM:
            text = given[0][0].text
            changed = re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", text)
            self._forget(dict.fromkeys(changed, ""), command.line)
            return None if changed else sum_holds(self._text(given[0]), self.variables)
        if given and self._text(given[0]) in _TESTS:
            return _holds([self._text(parts) for parts in given[1:] if parts not in ([Part("]")], [Part("]]")])])
        words = [word for parts in given for word in expanded(parts, self.variables, self.arrays)]
        name = words[0] if words else ":"
        if (inner := _inner_script(words)) is not None:
            yield from self._inner(inner, command.line, words)
        elif name in self.functions:
            yield from self.call(name, words[1:])
        elif name in ("source", ".") and words[1:]:
            yield from self._read_in(words[1])
        elif name == "set" and "--" in words:
            self._set_arguments(words[words.index("--") + 1 :])
        elif name in _SETS:
            for parts in given[1:]:
                if assigned := ASSIGNED.match(parts[0].text):
                    assign(assigned, parts, self.variables, self.arrays)
            if name == "cd":
                self.variables.pop("PWD", None)
        elif name == ":":
            self.variables |= defaults(given[1:], self.variables)
        elif name == "shift":
            gone = int(words[1]) if words[1:] and words[1].isdecimal() else 1
            self._set_arguments(list(self.arrays.get("@", ()))[gone:])
        elif name == "read" and passed:
            self.variables[words[-1]] = self._passed(passed[-1])
        elif name in ("cat", "tee") and passed and (written or words[1:]):
            path = self._text(written[-1]) if written else words[-1]
            self.files[path] = self._passed(passed[-1])
        elif name not in ("true", "false", "read"):
            self.is_guess = True
            yield self._found(command.line, words)
        return None if name in _ASKS else name != "false"

    def _found(self, line: int, words: Sequence[str]) -> Found:
        return Found(line, words, dict(self.variables), dict(self.files), self.notes, self.is_reached)

    def _passed(self, text: Part) -> str:
        """A text that is passed on by ``<<``."""
        return text.text if text.quote != TEXT else filled(text.text.replace("\\\n", ""), self.variables)

    def _inner(self, script: str, line: int, words: Sequence[str]) -> _Steps:
        """A script that a shell is given as a word; it sets nothing for what follows, unless by ``eval``."""
        before = dict(self.variables), dict(self.arrays)
        try:
            found = list(Scanner(script, self.source).commands())
        except ConfigError:  # no script, although it is given as one
            yield self._found(line, words)
            return
        yield from self.block(deque(replace(each, line=line + each.line - 1) for each in found))
        if words[0] != "eval":
            self.variables, self.arrays = before

    def call(self, name: str, given: Sequence[str]) -> _Steps:
        """A function with its arguments."""
        self.called.add(name)
        if name in self.active:
            return
        outer, end = self.arrays.get("@", ()), self.end
        self.active.append(name)
        self._set_arguments(given)
        yield from self.block(deque(self.functions[name]))
        self._set_arguments(outer)
        self.active.pop()
        self.end = end

    def _set_arguments(self, given: Sequence[str]) -> None:
        self.arrays["@"] = given
        for i in range(1, 10):
            self.variables.pop(str(i), None)
        self.variables |= {str(i + 1): word for i, word in enumerate(given[:9])}

    def _read_in(self, path: str) -> _Steps:
        """A script that this one reads in, if it is in the current folder or beside it."""
        places = [place for place in (Path(path), Path(self.source).parent / path) if place.is_file()]
        if places and places[0].resolve() not in self.active:
            end = self.end
            self.active.append(places[0].resolve())
            script = places[0].read_text(encoding="utf-8", errors="replace")
            yield from self.block(deque(Scanner(script, str(places[0])).commands()))
            self.active.pop()
            self.end = end

    def _text(self, parts: Sequence[Part]) -> str:
        """A word of a condition: a variable that is not set is empty."""
        variables = _Empty(self.variables)
        count = str(len(self.arrays.get("@", ())))
        counted = (replace(part, text=part.text.replace("$#", count)) if part.quote != "'" else part for part in parts)
        return "".join(value(part, variables, self.arrays) for part in counted)


class _Empty(dict[str, str]):
    """Variables, of which one that is not set is empty."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, "")


def _inner_script(words: Sequence[str]) -> str | None:
    """The script that a command gives a shell as a word (``srun … bash -c "…"``), or that ``eval`` runs."""
    if words and words[0] == "eval":
        return " ".join(words[1:])
    for i, word in enumerate(words[:-2]):
        if Path(word).name in _SHELLS and re.fullmatch(r"-[a-z]*c", words[i + 1]):
            return words[i + 2]
    return None


def _first(word: str) -> str | None:
    """The first value of a word in a loop's list, such as ``{1..5}`` or ``$(seq 5)``; None if only a shell knows."""
    if numbers := re.fullmatch(r"\{(-?\d+)\.\.-?\d+(?:\.\.-?\d+)?\}", word):
        return numbers[1]
    if numbers := re.fullmatch(r"\$\(seq (?:(-?\d+) )?(?:-?\d+ )?-?\d+\)", word):
        return numbers[1] or "1"
    return None if re.search(r"[$`{*?\[]", word) else word


def _not(holds: bool | None) -> bool | None:
    return None if holds is None else not holds


def _both(first: bool | None, second: bool | None) -> bool | None:
    return False if False in (first, second) else None if None in (first, second) else True


def _holds(words: Sequence[str]) -> bool | None:
    """Whether the condition between brackets holds; None if only a shell knows."""
    for operators, join in ((("||", "-o"), lambda a, b: _not(_both(_not(a), _not(b)))), (("&&", "-a"), _both)):
        for i, word in enumerate(words):
            if word in operators and i > 0:
                return join(_holds(words[:i]), _holds(words[i + 1 :]))
    if words[:1] == ["!"]:
        return _not(_holds(words[1:]))
    if any("$" in word or "`" in word for word in words):
        return None
    match words:
        case [text] | ["-n", text]:
            return text != ""
        case ["-z", text]:
            return text == ""
        case [text, "=" | "==", pattern]:
            return fnmatchcase(text, pattern)
        case [text, "!=", pattern]:
            return not fnmatchcase(text, pattern)
        case [a, sign, b] if sign in _COMPARED and a.lstrip("-").isdecimal() and b.lstrip("-").isdecimal():
            return _COMPARED[sign](int(a), int(b))
    return None
