"""Reads shell scripts as far as a launch needs it: words, quotes, variables, arrays, pipes and redirections.

Nothing is run. What only a shell can know, such as the output of a command, stays as it is written, except for commands
that print a path made of others (``$(dirname "$0")``).
"""

from __future__ import annotations

import ast
import operator
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tether.errors import ConfigError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ENDS = "\n;|&"
"""Characters that end a command."""
_PAIRS = {"$(": ")", "<(": ")", ">(": ")", "(": ")", "${": "}", "$'": "'", "'": "'", '"': '"', "`": "`"}
"""What begins a piece of a word that may hold any character, and what ends it."""
_VARIABLE = re.compile(
    r"\$\{(\w+)(?:\[0\])?(?:(:?[-=+?]|##?|%%?|,,|\^\^)((?:\$\{[^}]*\}|[^}])*))?\}|\$(\w+)", re.DOTALL
)
"""A variable, perhaps with a word that takes its place if it is not set (``-``, ``=``) or if it is (``+``), or with a
pattern of what is cut off at its beginning (``#``) or end (``%``), or in other letters (``,,``, ``^^``)."""
_SUM = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
_WORD = re.compile(r"(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")
"""A word of a variable's value; blanks in a command whose output it has do not end it."""
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_TEXT = "<<"
"""The quote of a text that a script passes on by ``<<``; with a quote behind it, nothing in the text is expanded."""
_SETS = ("export", "set", "cd", "echo", "declare", "local", "readonly")
"""Commands that start nothing; some of them set variables."""
_SHELLS = ("bash", "sh", "zsh")
"""Programs that run a script that they are given as a word."""


def commands(script: str, source: str) -> Iterator[tuple[int, list[str], Mapping[str, str]]]:
    """The words of every command that starts something, with the number of its first line and the variables then.

    Pipes, redirections, ``&`` and parentheses around it end a command; a trailing backslash, an open quote or an open
    array continues it. Texts that a script passes on by ``<<`` are left out, unless ``read`` puts them into a variable.
    Variables and arrays that are set in the script and HOME are expanded, and so are sums of whole numbers, ``$((…))``;
    others are left as they are, except the arguments of the script, which are left out.

    Raises:
        ConfigError: a quote or a parenthesis is not closed.
    """
    variables = {"HOME": str(Path.home()), "PWD": str(Path.cwd()), "0": source, "BASH_SOURCE": source}
    for number, words in _commands(script, source, variables, {}):
        yield number, words, dict(variables)


def _commands(
    script: str, source: str, variables: dict[str, str], arrays: dict[str, Sequence[str]]
) -> Iterator[tuple[int, list[str]]]:
    for number, given in _Scanner(script, source).commands():
        passed = [parts[0] for parts in given if parts[0].quote.startswith(_TEXT)]
        given = [parts for parts in given if not parts[0].quote.startswith(_TEXT)]
        while given and (assigned := _ASSIGNED.match(given[0][0].text)) and not given[0][0].quote:
            _assign(assigned, given.pop(0), variables, arrays)
        words = [word for parts in given for word in _expanded(parts, variables, arrays)]
        if (inner := _inner_script(words)) is not None:
            try:
                found = list(_commands(inner, source, dict(variables), dict(arrays)))
            except ConfigError:  # no script, although it is given as one
                found = [(1, words)]
            yield from ((number + line - 1, each) for line, each in found)
        elif words and words[0] in _SETS:
            for parts in given[1:]:
                if assigned := _ASSIGNED.match(parts[0].text):
                    _assign(assigned, parts, variables, arrays)
            if words[0] == "cd":
                variables.pop("PWD", None)
        elif words and words[0] == ":":
            variables |= _defaults(given[1:], variables)
        elif words and words[0] == "read" and passed:
            variables[words[-1]] = _read(passed[-1], variables)
        elif words:
            yield number, words


def _inner_script(words: Sequence[str]) -> str | None:
    """The script that a command gives a shell as a word (``srun … bash -c "…"``), or that ``eval`` runs."""
    if words and words[0] == "eval":
        return " ".join(words[1:])
    for i, word in enumerate(words[:-2]):
        if Path(word).name in _SHELLS and re.fullmatch(r"-[a-z]*c", words[i + 1]):
            return words[i + 2]
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a word."""

    text: str
    quote: str = ""
    """The quote around it, if any."""


class _Scanner:
    """Takes a script apart into the words of its commands, in pieces. The words of an array in parentheses are the
    pieces of one word, each behind a piece that says so.

    Args:
        script: its text.
        source: its name in messages.
    """

    def __init__(self, script: str, source: str) -> None:
        self._script, self._source = script, source
        self._at, self._line, self._start = 0, 1, 0
        """Where it is, the line of that, and the first line of the command there."""
        self._words: list[list[_Part]] = []
        self._word: list[_Part] | None = None
        self._array: list[list[_Part]] | None = None
        self._depth = 0
        """Number of open parentheses around commands."""
        self._texts: list[tuple[str, str]] = []
        """The lines that end the texts which begin at the end of this line, and the quotes around them."""
        self._is_target = False
        """Whether the next word is where a redirection leads to."""

    def commands(self) -> Iterator[tuple[int, list[list[_Part]]]]:
        """The words of each command, with the number of the command's first line.

        Raises:
            ConfigError: a quote or a parenthesis is not closed.
        """
        while self._at < len(self._script):
            if self._word is None and not self._words and self._array is None:
                self._start = self._line
            is_end = self._step(self._script[self._at :])
            if is_end and self._words:
                yield self._start, self._words
                self._words = []
        if self._array is not None:
            told = "the array that begins here has no closing parenthesis"
            raise ConfigError(f"{self._source}, line {self._start}: {told}")
        self._close()
        if self._words:
            yield self._start, self._words

    def _step(self, rest: str) -> bool:
        """Reads what begins here, and returns whether it ends a command.

        Args:
            rest: the script from here on.
        """
        sign, word = rest[0], self._word
        if rest.startswith("\\\n") or rest == "\\":
            self._close()
            self._take(2)
            while comment := re.match(r"[ \t]*#[^\n]*\n", self._script[self._at :]):  # a line that is commented out
                self._take(comment.end())
        elif sign == "#" and word is None:
            self._take(len(rest.partition("\n")[0]))
        elif sign in " \t\r" or (sign == "\n" and self._array is not None):
            self._close()
            self._take(1)
        elif sign == "(" and word and _ASSIGNED.fullmatch(word[-1].text) and word[-1].text.endswith("="):
            self._words.append([*word, _Part("", "()")])
            self._word, self._array = None, []
            self._take(1)
        elif sign == ")" and self._array is not None:
            self._close()
            self._words[-1] += [part for each in self._array for part in (_Part("", "("), *each)]
            self._array = None
            self._take(1)
        elif sign == "(" and word is None and not self._words:
            self._depth += 1
            self._take(1)
        elif text := re.match(r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1", rest):
            self._close()
            self._texts.append((text[2], text[1]))
            self._take(text.end())
        elif redirection := re.match(r"&?>[>|]?&?(?!\()|<<<|<(?!\()", rest):
            if word and word[-1].text.isdecimal() and len(word) == 1:  # the 2 of 2>&1
                self._word = None
            self._close()
            self._is_target = True
            self._take(redirection.end())
        elif sign in _ENDS or (sign == ")" and self._depth):
            self._depth -= sign == ")"
            self._end(rest)
            return True
        else:
            self._take_piece(rest)
        return False

    def _take(self, length: int) -> None:
        """Moves on by so many characters."""
        self._line += self._script.count("\n", self._at, self._at + length)
        self._at += length

    def _close(self) -> None:
        """Ends a word."""
        if self._word is not None and not self._is_target:
            (self._words if self._array is None else self._array).append(self._word)
        self._is_target = self._is_target and self._word is None
        self._word = None

    def _end(self, rest: str) -> None:
        """Ends a command; the texts that begin behind its line become words of it."""
        self._close()
        self._is_target = False
        length = 1
        if rest[0] == "\n" and self._texts:
            pattern = "".join(rf"\n((?:.*\n)*?)\t*{end}(?=\n|\Z)" for end, _ in self._texts)
            if passed := re.match(pattern, rest):
                quotes = [quote for _, quote in self._texts]
                texts = zip(passed.groups(), quotes, strict=True)
                self._words += [[_Part(text, _TEXT + quote)] for text, quote in texts]
                length = passed.end()
            self._texts = []
        self._take(length)

    def _take_piece(self, rest: str) -> None:
        """Adds a piece to the word."""
        taken, quote, text = _piece(rest)
        if taken is None:
            raise ConfigError(f"{self._source}, line {self._line}: No closing quotation")
        self._word = [*(self._word or []), _Part(text, quote)]
        self._take(taken)


def _piece(rest: str) -> tuple[int | None, str, str]:
    """Length, quote and text of the piece of a word at the beginning; None if a quote or parenthesis is not closed."""
    opening = next((each for each in _PAIRS if each != "(" and rest.startswith(each)), None)
    if opening is not None:
        end = _end(rest, opening)
        if end is None:
            return None, "", ""
        if opening == '"':
            inner = re.sub(r"(?<!\\)`((?:\\.|[^`\\])*)`", r"$(\1)", rest[1 : end - 1])
            return end, opening, re.sub(r'\\(["\\`\n])', lambda match: match[1].strip("\n"), inner)
        if opening == "'":
            return end, opening, rest[1 : end - 1]
        if opening == "$'":
            return end, "'", _unescaped(rest[2 : end - 1])
        if opening == "`":
            return end, opening, f"$({rest[1 : end - 1]})"
        return end, "" if opening == "${" or _SUM.fullmatch(rest[:end]) else "`", rest[:end]
    if rest[0] == "\\":
        return len(rest[:2]), "'", rest[1:2]
    plain = re.match(r"\$?[^\s;|&<>()'\"`\\$]*|.", rest)[0] or rest[0]
    return len(plain), "", plain


def _end(rest: str, opening: str) -> int | None:
    """Length of what begins with ``opening`` at the beginning; None if it is not closed."""
    inner = {"'": (), "$'": (), "`": (), '"': ("$(", "${", "`"), "${": ("$(", "${", '"', "`")}.get(
        opening, tuple(_PAIRS)
    )
    at = len(opening)
    while at < len(rest):
        if rest.startswith(_PAIRS[opening], at):
            return at + 1
        begun = next((each for each in inner if rest.startswith(each, at)), None)
        taken = _end(rest[at:], begun) if begun else 2 if rest[at] == "\\" and opening != "'" else 1
        if taken is None:
            return None
        at += taken
    return None


def _expanded(
    parts: Sequence[_Part], variables: Mapping[str, str], arrays: Mapping[str, Sequence[str]]
) -> list[str]:
    """The words that a word of a command stands for: variables without quotes are split, arrays are spliced in."""
    words = [""]
    is_given = False
    for part in parts:
        named = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", part.text)
        if named and part.quote != "'" and named[1] in arrays:
            first, *more = [*arrays[named[1]]] or [""]
            words[-1] += first
            words += more
            is_given = is_given or bool(arrays[named[1]])
            continue
        if part.quote != "'" and re.fullmatch(r"\$[@*]", part.text):  # the script's own arguments
            continue
        text = _value(part, variables)
        if part.quote or text == part.text or _is_quoted_default(part.text, variables):
            words[-1] += text
            is_given = is_given or bool(part.quote) or bool(text)
            continue
        first, *more = _WORD.findall(text) or [""]
        words[-1] += first
        words += more
        is_given = is_given or bool(text.strip())
    return words if is_given else []


def _assign(
    assigned: re.Match[str], parts: Sequence[_Part], variables: dict[str, str], arrays: dict[str, Sequence[str]]
) -> None:
    """Sets the variable or the array that a word sets."""
    name, adds, begun = assigned[1], assigned[2], assigned[3]
    if len(parts) > 1 and parts[1].quote == "()":
        inner: list[list[_Part]] = []
        for part in parts[2:]:
            if part.quote == "(":
                inner.append([])
            else:
                inner[-1].append(part)
        values = [word for each in inner for word in _expanded(each, variables, arrays)]
        arrays[name] = [*(arrays.get(name, ()) if adds else ()), *values]
        return
    whole = [_Part(begun), *parts[1:]]
    text = "".join(_value(part, variables) for part in whole)
    variables[name] = (variables.get(name, "") if adds else "") + text


def _value(part: _Part, variables: Mapping[str, str]) -> str:
    """What a piece of a word stands for."""
    return part.text if part.quote == "'" else _filled(part.text, variables)


def _defaults(given: Sequence[Sequence[_Part]], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``: ${NAME:=value}`` sets, or that are set already."""
    texts = [part.text for parts in given for part in parts if part.quote != "'"]
    found = [match for text in texts for match in _VARIABLE.finditer(text) if (match[2] or "").endswith("=")]
    return {match[1]: _filled(match[0], variables) for match in found}


def _read(part: _Part, variables: Mapping[str, str]) -> str:
    """A text that is passed on by ``<<``, as the variable that ``read`` puts it into."""
    return part.text if part.quote != _TEXT else _filled(part.text.replace("\\\n", ""), variables)


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """A word with the values of its variables and sums, and of commands in it that print a path."""
    if "$(" in word.replace("$((", ""):
        pieces, at = [], 0
        while (begin := word.find("$(", at)) >= 0:
            end = _end(word[begin:], "$(")
            if end is None:
                break
            command = word[begin : begin + end]
            path = None if command.startswith("$((") else _printed(command[2:-1], variables)
            pieces += [word[at:begin], command if path is None else path]
            at = begin + end
        word = "".join([*pieces, word[at:]])

    def value(match: re.Match[str]) -> str:
        name, sign, other = match[1] or match[4], match[2] or "", match[3] or ""
        own = variables.get(name)
        is_set = bool(own) if ":" in sign else own is not None
        if sign[-1:] not in ("-", "=", "+"):
            return _changed(own, sign, _filled(other, variables)) if is_set else match[0]
        if is_set != (sign[-1] == "+"):
            return own or ""
        return _filled(re.sub(r"(['\"])(.*?)\1", r"\2", other), variables)

    return _SUM.sub(lambda match: _sum(match, variables), _VARIABLE.sub(value, word))


def _printed(command: str, variables: Mapping[str, str]) -> str | None:
    """The path that a command prints, if it only names the present folder or changes other paths; else None."""
    try:
        found = [
            [word for parts in given for word in _expanded(parts, variables, {})]
            for _, given in _Scanner(command, "").commands()
        ]
    except ConfigError:
        return None
    match found:
        case [["pwd", *_]]:
            return variables.get("PWD")
        case [["cd", path], ["pwd", *_]] | [["cd", "--", path], ["pwd", *_]] | [["cd", path], ["realpath", "."]]:
            shown = os.path.abspath(path)
        case [["realpath", path]] | [["readlink", "-f", path]]:
            shown = os.path.abspath(path)
        case [["dirname", path]] | [["dirname", "--", path]]:
            shown = os.path.dirname(path) or "."
        case [["basename", path]] | [["basename", "--", path]]:
            shown = os.path.basename(path.rstrip("/"))
        case [["basename", path, ending]]:
            shown = os.path.basename(path.rstrip("/")).removesuffix(ending)
        case _:
            return None
    return None if "$" in path else shown


def _unescaped(text: str) -> str:
    """The characters that ``$'…'`` stands for."""
    signs = {"n": "\n", "t": "\t", "r": "\r"}
    return re.sub(r"\\(.)", lambda match: signs.get(match[1], match[1]), text, flags=re.DOTALL)


def _changed(value: str, sign: str, pattern: str) -> str:
    """A variable's value after ``#`` and the like."""
    if sign[:1] not in ("#", "%"):
        return {",,": value.lower(), "^^": value.upper()}.get(sign, value)
    parts = [(value[:i], value[i:]) for i in range(len(value) + 1)]
    cut = [(b, a) for a, b in parts] if sign[0] == "#" else parts  # what stays, and what is cut off
    fits = [stays for stays, gone in cut if fnmatchcase(gone, pattern)]
    return (min if len(sign) == 2 else max)(fits, key=len, default=value)


def _sum(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """The value of ``$((…))``; the same words if they hold anything but whole numbers and variables that are set."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    try:
        return str(_whole(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match[0]


def _whole(node: ast.expr) -> int:
    """The value of a sum; raises ``ValueError`` if it is not one of whole numbers."""
    match node:
        case ast.Constant(value=int()):
            return int(node.value)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_whole(node.left), _whole(node.right))
    raise ValueError(ast.dump(node))


def _is_quoted_default(word: str, variables: Mapping[str, str]) -> bool:
    """Whether a word stands for a default in quotes, which is not split."""
    variable = _VARIABLE.fullmatch(word)
    is_default = variable is not None and (variable[2] or "")[-1:] in ("-", "=") and variable[3][:1] in ("'", '"')
    return is_default and not variables.get(variable[1])
