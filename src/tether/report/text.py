"""Makes text of unknown origin safe to show, and numbers readable. Used by the HTML report and the terminal.

Model output and datasets may hold anything: terminal escapes, bidirectional overrides that reorder the line around
them, invisible characters, lone surrogates that no encoder accepts. ``visible`` turns each of them into the escape that
Python would write for it, so that a reader sees it and nothing acts on it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: ESC and CSI start terminal sequences
    "\xad\u180e\u200b\u2060-\u2065\ufeff"  # invisible; the joiners U+200C and U+200D stay, scripts and emoji need them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # bidirectional controls
    "\u2028\u2029\ufff9-\ufffb"  # line separators, interlinear annotation
    "\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff"  # noncharacters, surrogates
    "\U000e0000-\U000e00ff"  # tags: invisible ASCII
    "]"
)
_MINUS = "−"


def visible(text: str) -> str:
    """``text`` with every character that could act on its surroundings, or hide, replaced by a visible escape.

    Newlines and tabs stay, CRLF becomes a newline. The result can be encoded as UTF-8.
    """
    return _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def json_line(value: Any, *, as_ascii: bool = False) -> str:
    """``value`` as JSON on one line, with the escapes of JSON for every character that ``visible`` would escape.

    Args:
        as_ascii: whether to escape all other non-ASCII characters too.
    """
    text = json.dumps(value, ensure_ascii=as_ascii)
    return _UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(text: str, limit: int) -> str:
    """``text`` made visible on one line, white space collapsed, at most ``limit`` characters, ending in "…" if cut.

    Only the beginning of a longer text is processed, so that a huge answer costs nothing.
    """
    start = text[: 8 * limit]
    line = " ".join(visible(start).split())
    return line if len(line) <= limit and len(start) == len(text) else line[: limit - 1].rstrip() + "…"


def prompt_text(prompt: Any) -> str:
    """A prompt as in the dataset, text or chat messages, as one text: ``role: content`` per message."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list | tuple):
        return "" if prompt is None else str(prompt)
    turns = [m if isinstance(m, dict) else {"content": m} for m in prompt]
    if len(turns) == 1 and turns[0].get("role") == "user":
        return str(turns[0].get("content", ""))
    return "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in turns)


def number(value: float | None) -> str:
    """A readable number with three significant digits: ``1.23``, ``−0.05``, ``12,345``, ``3.1e−6``; "–" for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    else:
        text = f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"
    return text.replace("-", _MINUS)


def amount(value: float | None, noun: str) -> str:
    """``number`` with its unit: ``1 nat``, ``0.31 nats``, ``12,345 answers``."""
    text = number(value)
    return f"{text} {noun if text == '1' else f'{noun}s'}"


def signed(value: float) -> str:
    """``number`` with a plus sign if the value is positive."""
    return ("+" if value > 0 else "") + number(value)


def percent(share: float | None) -> str:
    """A share of 1 in per cent, with one decimal below 10 %."""
    if share is None or not math.isfinite(share):
        return "–"
    value = 100 * share
    text = f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"
    return text.replace("-", _MINUS)


def duration(seconds: float) -> str:
    """Seconds in the two largest units: ``42 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    total = max(0, round(seconds))
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            large, rest = divmod(total, size)
            return f"{large} {unit} {rest // small} {small_unit}" if rest // small else f"{large} {unit}"
    return f"{total} s"


def byte_size(num_bytes: int) -> str:
    """A number of bytes in the largest unit: ``1023 bytes``, ``512 MiB``, ``1.5 GiB``."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, len(units) - 1)
    value = num_bytes / 1024**power
    return f"{value:{'.0f' if value >= 1000 else '.3g'}} {units[power]}" if power else f"{num_bytes} bytes"
