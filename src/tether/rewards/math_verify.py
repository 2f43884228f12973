"""Whether two mathematical expressions are equal, by the package math-verify."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from importlib.util import find_spec

from tether.errors import ConfigError

_SECONDS = 5
"""Time limit for reading an expression or comparing two; anything slower does not match."""
_MARK = re.compile(r"(?<!\\)\$|\\boxed")
"""What marks LaTeX in a text."""


def check_installed(key: str) -> None:
    """Raises ``ConfigError`` if the package is not installed.

    Args:
        key: the configuration key of the source, for the message.
    """
    if find_spec("math_verify") is None:
        missing = "math-verify, which is not installed: pip install 'tether[math]'"
        raise ConfigError(f"{key}: type math_match needs {missing}")


@lru_cache(maxsize=2**16)
def is_expression(wanted: str) -> bool:
    """Whether ``wanted`` can be read: LaTeX, with or without dollar signs, or a number."""
    return bool(_parsed(_in_dollars(wanted)))


def is_equal(wanted: str, answer: str) -> bool:
    """Whether the expression that ``answer`` ends with, boxed or last in the text, equals ``wanted``."""
    from math_verify import verify

    return verify(_parsed(_in_dollars(wanted)), _parsed(answer), timeout_seconds=_limit())


def _parsed(text: str) -> list:
    from math_verify import parse

    return parse(text, parsing_timeout=_limit())


def _in_dollars(text: str) -> str:
    """``text`` marked as LaTeX, which also reads fractions, sets and intervals; an escaped dollar is no mark of it."""
    return text if _MARK.search(text) else f"${text}$"


def _limit() -> int | None:
    """The time limit, which is kept by a signal and so only in the main thread."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
