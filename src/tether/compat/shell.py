"""Takes shell scripts apart into words: quotes, variables, arrays, pipes and redirections.

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

from tether.errors import ConfigError

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BEFORE_TESTS = ("if", "elif", "while", "until", "!", "then", "do", "else", "{")
"""Words that a condition may stand behind."""
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
SUM = "(("
"""The quote of a sum that is a command of its own, ``((N > 1))``."""
_WORD = re.compile(r"(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")
"""A word of a variable's value; blanks in a command whose output it has do not end it."""
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
FILE = ">"
"""The quote of a word that names a file which a command writes."""
_COMPARED = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
TEXT = "<<"
"""The quote of a text that a script passes on by ``<<``; with a quote behind it, nothing in the text is expanded."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word."""

    text: str
    quote: str = ""
    """The quote around it, if any."""


@dataclass(frozen=True, slots=True)
class Command:
    """The words of a command, in pieces."""

    line: int
    """Number of its first line."""
    words: Sequence[list[Part]]
    end: str
    """What ends it, such as ``&&``; empty at the end of the script."""

    @property
    def keyword(self) -> str:
        """Its first word if that is one piece without quotes, as the shell's own words are; else empty."""
        return self.words[0][0].text if len(self.words[0]) == 1 and not self.words[0][0].quote else ""

    @property
    def defines(self) -> str | None:
        """The function that begins here, if one does."""
        first, second = ("".join(part.text for part in parts) for parts in [*self.words, [], []][:2])
        if self.keyword == "function" and second:
            return second.removesuffix("()")
        name = first.removesuffix("()") if first.endswith("()") else first if second.startswith("()") else ""
        return name if re.fullmatch(r"[\w-]+", name) else None


class Scanner:
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
        self._words: list[list[Part]] = []
        self._word: list[Part] | None = None
        self._array: list[list[Part]] | None = None
        self._depth = 0
        """Number of open parentheses around commands."""
        self._begins_pattern = False
        """Whether a branch of ``case`` has just ended, so that a parenthesis begins a pattern."""
        self._texts: list[tuple[str, str]] = []
        """The lines that end the texts which begin at the end of this line, and the quotes around them."""
        self._target = ""
        """The sign of a redirection to which the next word belongs."""

    def commands(self) -> Iterator[Command]:
        """The commands; ``;;`` behind a branch is one of its own.

        Raises:
            ConfigError: a quote or a parenthesis is not closed.
        """
        while self._at < len(self._script):
            if self._word is None and not self._words and self._array is None:
                self._start = self._line
            line, end = self._line, self._step(self._script[self._at :])
            if end is not None and self._words:
                yield Command(self._start, self._words, end)
                self._words, self._begins_pattern = [], False
            if end is not None and ";;" in end:
                yield Command(line, [[Part(";;")]], "\n")
                self._begins_pattern = True
        if self._array is not None:
            told = "the array that begins here has no closing parenthesis"
            raise ConfigError(f"{self._source}, line {self._start}: {told}")
        self._close()
        if self._words:
            yield Command(self._start, self._words, "")

    def _step(self, rest: str) -> str | None:
        """Reads what begins here, and returns what ends a command, if it does.

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
        elif sign in " \t\r" or (sign == "\n" and (self._array is not None or self._in_test)):
            self._close()
            self._take(1)
        elif sign in "&|()<>" and self._in_test:
            self._close()
            self._word = [Part((re.match(r"&&|\|\|", rest) or [sign])[0])]
            self._take(len(self._word[0].text))
            self._close()
        elif sign == "(" and word and ASSIGNED.fullmatch(word[-1].text) and word[-1].text.endswith("="):
            self._words.append([*word, Part("", "()")])
            self._word, self._array = None, []
            self._take(1)
        elif sign == ")" and self._array is not None:
            self._close()
            self._words[-1] += [part for each in self._array for part in (Part("", "("), *each)]
            self._array = None
            self._take(1)
        elif word is None and rest.startswith(SUM) and self._at_command and (found := _SUM.match(f"${rest}")):
            self._word = [Part(found[1], SUM)]
            self._take(found.end() - 1)
            self._close()
        elif sign == "(" and word is None and not self._words:
            self._depth += not self._begins_pattern
            self._take(1)
        elif text := re.match(r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1", rest):
            self._close()
            self._texts.append((text[2], text[1]))
            self._take(text.end())
        elif redirection := re.match(r"&?>[>|]?&?(?!\()|<<<|<(?!\()", rest):
            if word and word[-1].text.isdecimal() and len(word) == 1:  # the 2 of 2>&1
                self._word = None
            self._close()
            self._target = redirection[0]
            self._take(redirection.end())
        elif (sign in _ENDS and self._array is None) or (sign == ")" and self._depth):
            self._depth -= sign == ")"
            return self._end(rest)
        else:
            self._take_piece(rest)
        return None

    @property
    def _in_test(self) -> bool:
        """Whether a condition in ``[[ ]]`` is open, in which signs that end commands mean something else."""
        words = self._plain_words
        begin = next((i for i, word in enumerate(words) if word not in _BEFORE_TESTS), len(words))
        return words[begin : begin + 1] == ["[["] and "]]" not in words and self._word != [Part("]]")]

    @property
    def _at_command(self) -> bool:
        """Whether no word of a command has been read, other than the shell's own."""
        return all(word in _BEFORE_TESTS for word in self._plain_words)

    @property
    def _plain_words(self) -> list[str]:
        """The words of this command that are one piece without quotes; others are empty."""
        return [word[0].text if len(word) == 1 and not word[0].quote else "" for word in self._words]

    def _take(self, length: int) -> None:
        """Moves on by so many characters."""
        self._line += self._script.count("\n", self._at, self._at + length)
        self._at += length

    def _close(self) -> None:
        """Ends a word."""
        if self._word is None:
            return
        if not self._target:
            (self._words if self._array is None else self._array).append(self._word)
        elif self._target in (">", ">>", ">|"):
            self._words.append([Part("", FILE), *self._word])
        self._word, self._target = None, ""

    def _end(self, rest: str) -> str:
        """Ends a command and returns by what; the texts that begin behind its line become words of it."""
        self._close()
        self._target = ""
        end = re.match(r"&&|\|[|&]|;;&?|;&|.", rest, re.DOTALL)[0]
        length = len(end)
        if rest[0] == "\n" and self._texts:
            pattern = "".join(rf"\n((?:.*\n)*?)\t*{end}(?=\n|\Z)" for end, _ in self._texts)
            if passed := re.match(pattern, rest):
                quotes = [quote for _, quote in self._texts]
                texts = zip(passed.groups(), quotes, strict=True)
                self._words += [[Part(text, TEXT + quote)] for text, quote in texts]
                length = passed.end()
            self._texts = []
        self._take(length)
        return end

    def _take_piece(self, rest: str) -> None:
        """Adds a piece to the word."""
        taken, quote, text = _piece(rest)
        if taken is None:
            raise ConfigError(f"{self._source}, line {self._line}: No closing quotation")
        self._word = [*(self._word or []), Part(text, quote)]
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


def expanded(
    parts: Sequence[Part], variables: Mapping[str, str], arrays: Mapping[str, Sequence[str]]
) -> list[str]:
    """The words that a word of a command stands for: variables without quotes are split, arrays are spliced in."""
    words = [""]
    is_given = False
    for part in parts:
        values = None if part.quote == "'" else _spliced(part.text, variables, arrays)
        if values is not None:
            first, *more = values or [""]
            words[-1] += first
            words += more
            is_given = is_given or bool(values)
            continue
        text = value(part, variables, arrays)
        if part.quote or text == part.text or _is_quoted_default(part.text, variables):
            words[-1] += text
            is_given = is_given or bool(part.quote) or bool(text)
            continue
        first, *more = _WORD.findall(text) or [""]
        words[-1] += first
        words += more
        is_given = is_given or bool(text.strip())
    return words if is_given else []


def _spliced(text: str, variables: Mapping[str, str], arrays: Mapping[str, Sequence[str]]) -> list[str] | None:
    """The words of the array that a piece stands for; None if it does not stand for all of one. Those of a function's
    arguments are under ``@``; the script has none."""
    given = re.fullmatch(r"\$(?:[@*]|\{[@*](?::(\d+))?\})", text)
    if given is not None:
        return list(arrays.get("@", ()))[max(int(given[1] or 1) - 1, 0) :]
    named = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text)
    return list(arrays.get(named[1], ())) if named is not None and named[1] not in variables else None


def _indexed(text: str, variables: Mapping[str, str], arrays: Mapping[str, Sequence[str]]) -> str:
    """A text with the elements of arrays, ``${NAME[1]}``, ``${NAME[key]}``, and their numbers, ``${#NAME[@]}``."""

    def element(match: re.Match[str]) -> str:
        words = arrays.get(match[2])
        if words is None or any("$" in word for word in words):
            return "0" if words is None and match[1] and match[2] not in variables else match[0]
        if match[3] in ("@", "*"):
            return str(len(words)) if match[1] else " ".join(words)
        index = filled(match[3], variables).strip("\"'")
        named = dict(found.groups() for word in words if (found := re.fullmatch(r"\[(.*?)\]=(.*)", word, re.DOTALL)))
        by_number = words[int(index)] if index.isdecimal() and int(index) < len(words) else match[0]
        return match[0] if match[1] else named.get(index, by_number)

    return re.sub(r"\$\{(#?)(\w+)\[((?:[^][{}]|\$\{\w+\})+)\]\}", element, text)


def assign(
    assigned: re.Match[str], parts: Sequence[Part], variables: dict[str, str], arrays: dict[str, Sequence[str]]
) -> None:
    """Sets the variable or the array that a word sets."""
    name, adds, begun = assigned[1], assigned[2], assigned[3]
    if len(parts) > 1 and parts[1].quote == "()":
        inner: list[list[Part]] = []
        for part in parts[2:]:
            if part.quote == "(":
                inner.append([])
            else:
                inner[-1].append(part)
        values = [word for each in inner for word in expanded(each, variables, arrays)]
        arrays[name] = [*(arrays.get(name, ()) if adds else ()), *values]
        return
    whole = [Part(begun), *parts[1:]]
    text = "".join(value(part, variables, arrays) for part in whole)
    variables[name] = (variables.get(name, "") if adds else "") + text


def value(part: Part, variables: Mapping[str, str], arrays: Mapping[str, Sequence[str]]) -> str:
    """What a piece of a word stands for."""
    return part.text if part.quote == "'" else filled(_indexed(part.text, variables, arrays), variables)


def defaults(given: Sequence[Sequence[Part]], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``: ${NAME:=value}`` sets, or that are set already."""
    texts = [part.text for parts in given for part in parts if part.quote != "'"]
    found = [match for text in texts for match in _VARIABLE.finditer(text) if (match[2] or "").endswith("=")]
    return {match[1]: filled(match[0], variables) for match in found}


def filled(word: str, variables: Mapping[str, str]) -> str:
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

    def text(match: re.Match[str]) -> str:
        name, sign, other = match[1] or match[4], match[2] or "", match[3] or ""
        own = variables.get(name)
        is_set = bool(own) if ":" in sign else own is not None
        if sign[-1:] not in ("-", "=", "+"):
            return _changed(own, sign, filled(other, variables)) if is_set else match[0]
        if is_set != (sign[-1] == "+"):
            return own or ""
        return filled(re.sub(r"(['\"])(.*?)\1", r"\2", other), variables)

    return _SUM.sub(lambda match: _sum(match, variables), _VARIABLE.sub(text, word))


def _printed(command: str, variables: Mapping[str, str]) -> str | None:
    """The path that a command prints, if it only names the present folder or changes other paths; else None."""
    try:
        found = [
            [word for parts in each.words if parts[0].quote != FILE for word in expanded(parts, variables, {})]
            for each in Scanner(command, "").commands()
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


def sum_holds(text: str, variables: Mapping[str, str]) -> bool | None:
    """Whether the value of a sum is not 0; None if it holds anything but whole numbers and variables."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0]) or "0", text)
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    try:
        return _whole(ast.parse(text.strip(), mode="eval").body) != 0
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _whole(node: ast.expr) -> int:
    """The value of a sum; raises ``ValueError`` if it is not one of whole numbers."""
    match node:
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARED:
            return int(_COMPARED[type(sign)](_whole(left), _whole(right)))
        case ast.BoolOp(op=ast.And(), values=values):
            return int(all([_whole(value) for value in values]))
        case ast.BoolOp(values=values):
            return int(any([_whole(value) for value in values]))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _whole(operand))
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
