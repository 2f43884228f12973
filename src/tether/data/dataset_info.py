"""LLaMA-Factory's ``dataset_info.json``: named datasets, and how their rows become prompts, answers and pairs.

    alpaca     instruction, input, output, history, system        → prompt, messages
               the same, with chosen and rejected or both in output → prompt, chosen, rejected
    sharegpt   a list of turns, with or without chosen and rejected → prompt, messages, or prompt, chosen, rejected
    openai     the same with other tags, and function calls in the format of the API
"""

from __future__ import annotations

import difflib
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tether.data.forms import as_text, content_told, decoded, function_calls, is_given, tool_calls
from tether.data.sources import RepeatedKey, Row, Rows, check_source, object_of, read_hub, read_rows
from tether.errors import DataError
from tether.types import Message

logger = logging.getLogger(__name__)

FILE = "dataset_info.json"
ONLINE = "ONLINE"
"""Used in place of the file's folder: names are hub ids of datasets in alpaca format."""
_KEYS = {
    "file_name", "hf_hub_url", "formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags",
    "revision",
}  # fmt: skip
_PASSED_OVER = {"file_sha1"}
_REFUSED = {
    "script_url": "dataset scripts are not run; save what the script makes as a file",
    "ms_hub_url": "ModelScope is not supported; download the file and name it in file_name",
    "om_hub_url": "OpenMind is not supported; download the file and name it in file_name",
    "cloud_file_name": "cloud storage is not supported; download the file and name it in file_name",
}
_REFUSED_COLUMNS = dict.fromkeys(("images", "videos", "audios"), "only text is supported")
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_OPENAI_TAGS = _TAGS | {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "tool",
}  # fmt: skip
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_COLUMNS = {"prompt", "query", "response", "history", "messages", "system", "tools", "chosen", "rejected", "kto_tag"}


@dataclass(frozen=True)
class _Entry:
    """One dataset as the file describes it."""

    where: str
    """Its name in messages."""
    settings: Mapping[str, Any]
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    passed_over: Sequence[str] = ()
    """Keys that LLaMA-Factory does not read either."""

    @property
    def formatting(self) -> Literal["alpaca", "sharegpt", "openai"]:
        """The form of its rows."""
        return self.settings.get("formatting", "alpaca")

    @property
    def is_on_hub(self) -> bool:
        """Whether it is read from the hub, which LLaMA-Factory prefers to a file named in the same entry."""
        return "hf_hub_url" in self.settings

    @property
    def is_ranking(self) -> bool:
        """Whether its rows are preference pairs."""
        return bool(self.settings.get("ranking", False))

    @property
    def has_verdicts(self) -> bool:
        """Whether each answer may be a good or a bad one, for KTO: then only its prompt is of use here."""
        return "kto_tag" in self.columns


def check_entry(folder: str, name: str, key: str) -> None:
    """Checks that ``dataset_info.json`` in ``folder`` has a readable dataset of that name; reads no row.

    Args:
        folder: folder of the file, or ``ONLINE``.
        key: the configuration key that named it, for messages.

    Raises:
        DataError: there is no such file or dataset, or its entry uses something unsupported.
    """
    entry = _entry(folder, name, key)
    if not entry.is_on_hub:
        check_source(_file(folder, entry), f"{entry.where}, file_name")


def read_entry(folder: str, name: str, key: str, *, max_rows: int | None = None) -> Rows:
    """The rows of a dataset that ``dataset_info.json`` names, with Tether's columns.

    A conversation becomes ``prompt`` (everything before the last answer) and ``messages`` (all of it; not in a dataset
    for KTO). Pairs become ``prompt``, ``chosen`` and ``rejected``. Other columns stay. Conversations without turns, or
    with an unknown role, are dropped with a warning.

    Args:
        folder, name, key: as in ``check_entry``.
        max_rows: maximum number of rows to read.

    Returns:
        The rows, and under ``bad`` those that lack a column or have one of the wrong type.

    Raises:
        DataError: as in ``check_entry``, the data lacks a column that the entry names, or no conversation is left.
    """
    entry = _entry(folder, name, key)
    if entry.passed_over:
        told = ", ".join(entry.passed_over)
        logger.warning("%s: passed over, as LLaMA-Factory does not read it either: %s", entry.where, told)
    settings, split = entry.settings, entry.settings.get("split", "train")
    needed = None if "num_samples" in settings else max_rows
    if entry.is_on_hub:
        table = read_hub(
            settings["hf_hub_url"], split=split, subset=settings.get("subset"), folder=settings.get("folder"),
            revision=settings.get("revision"), key=f"{entry.where}, hf_hub_url", max_rows=needed,
        )  # fmt: skip
    else:
        table = read_rows(_file(folder, entry), split=split, key=f"{entry.where}, file_name", max_rows=needed)
    _check_columns(table, entry)
    table = table.taken(_drawn(len(table.rows), settings.get("num_samples"), name)[:max_rows])
    read = _alpaca if entry.formatting == "alpaca" else _sharegpt
    rows, places, broken = [], [], []
    bad: dict[str, DataError] = {}
    for i, row in enumerate(table.rows):
        place = table.where(i)
        try:
            rows.append(_alone(read(row, entry, f"{key}: {place}")))
            places.append(place)
        except _Broken as error:
            broken.append(str(error))
        except DataError as error:
            bad[f"{key}: {place}"] = error
    if "system" not in entry.columns and any(is_given(row.get("system")) for row in table.rows):
        logger.warning(
            '%s: the column system is not read, as no entry of %s names it; "columns": {"system": "system", …} makes '
            "it the system message of its row", entry.where, FILE,
        )  # fmt: skip
    if broken and not rows and not bad:
        raise DataError(broken[0])
    if broken:
        logger.warning("%d of %d rows are left out; the first: %s", len(broken), len(table.rows), broken[0])
    return replace(table, rows=rows, places=places, bad=bad)


def _check_columns(table: Rows, entry: _Entry) -> None:
    """Raises ``DataError`` if no row has a column that the entry names and that may be empty: every row would be read
    without it."""
    names = dict.fromkeys(name for row in table.rows for name in row)
    for part in ("query", "response", "history", "system", "tools"):
        column = entry.settings.get("columns", {}).get(part)
        if table.rows and column is not None and column not in names:
            raise DataError(
                f"{entry.where}: columns.{part} is {column}, which no row of {table.name} has; its columns are: "
                f"{', '.join(names)}. Correct it, or leave it out"
            )


def _alone(row: Row) -> Row:
    """The row without another column that is read as the answer, if the entry says which column has it."""
    return {name: value for name, value in row.items() if name != "completion" or "messages" not in row}


class _Broken(Exception):
    """A conversation that LLaMA-Factory drops."""


def _entry(folder: str, name: str, key: str) -> _Entry:
    if folder == ONLINE:
        return _Entry(f"{key}: {name}", {"hf_hub_url": name}, _ALPACA, _TAGS)
    path = Path(folder).expanduser() / FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=object_of)
    except OSError as error:
        raise DataError(f"data.dataset_dir: {path} cannot be read: {error.strerror}") from error
    except RepeatedKey as error:
        raise DataError(f"data.dataset_dir: {path} {error}") from error
    except ValueError as error:
        raise DataError(f"data.dataset_dir: {path} is not JSON: {error}") from error
    if not isinstance(entries, dict) or not isinstance(entries.get(name), dict):
        known = ", ".join(entries) if isinstance(entries, dict) else "no datasets"
        raise DataError(f"{key}: {path} has no dataset {name}; it has {known}")
    settings, where = entries[name], f"{key}: {name} in {path}"
    for refused, why in _REFUSED.items():
        if refused in settings and not {"file_name", "hf_hub_url"} & settings.keys():
            raise DataError(f"{where}: {refused}: {why}")
    passed_over = _unread(settings, _KEYS, _PASSED_OVER | _REFUSED.keys(), where)
    origins = {"file_name", "hf_hub_url"} & settings.keys()
    if not origins:
        raise DataError(f"{where}: wanted file_name or hf_hub_url, which say where the data is")
    if settings.get("formatting", "alpaca") not in ("alpaca", "sharegpt", "openai"):
        raise DataError(f"{where}: formatting is {settings['formatting']!r}, wanted alpaca, sharegpt or openai")
    samples = settings.get("num_samples")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise DataError(f"{where}: num_samples is {samples!r}, wanted a whole number above 0")
    default = _ALPACA if settings.get("formatting", "alpaca") == "alpaca" else {"messages": "conversations"}
    columns, tags = settings.get("columns", default), settings.get("tags", {})
    for part, given, allowed in (("columns", columns, _COLUMNS), ("tags", tags, _TAGS.keys())):
        if not isinstance(given, dict):
            raise DataError(f"{where}: {part} is {given!r}, wanted an object")
        for column in given:
            if column in _REFUSED_COLUMNS:
                raise DataError(f"{where}: columns.{column}: {_REFUSED_COLUMNS[column]}")
        passed_over += _unread(given, allowed, (), where, f"{part}.")
    answers = {"chosen", "rejected"} & columns.keys()
    in_one_list = default is _ALPACA and "response" in columns and not answers
    if settings.get("ranking") and len(answers) < 2 and not in_one_list:
        other = ", or columns.response alone, with both in a list" if default is _ALPACA else ""
        raise DataError(f"{where}: ranking needs columns.chosen and columns.rejected{other}")
    needed = "prompt" if default is _ALPACA else "messages"
    usual = _OPENAI_TAGS if settings.get("formatting") == "openai" else _TAGS
    return _Entry(where, settings, {needed: default[needed]} | columns, usual | tags, passed_over)


def _unread(
    given: Mapping[str, Any], known: Iterable[str], others: Iterable[str], where: str, part: str = ""
) -> list[str]:
    """Keys of an entry that LLaMA-Factory does not read.

    Args:
        others: further keys, which are dealt with elsewhere.
        part: what goes before their names in messages.

    Raises:
        DataError: one of them is nearly one that it reads, and so a slip.
    """
    unread = sorted(given.keys() - {*known, *others})
    for key in unread:
        if close := difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8):
            raise DataError(f"{where}: unknown key {part}{key}; did you mean {part}{close[0]}?")
    return [part + key for key in unread]


def _file(folder: str, entry: _Entry) -> str:
    return str(Path(folder).expanduser() / entry.settings["file_name"])


def _drawn(count: int, wanted: int | None, name: str) -> list[int]:
    """Rows of a dataset that ``num_samples`` selects: some of them, or all of them and some repeatedly."""
    if wanted is None:
        return list(range(count))
    draw = random.Random(name)
    once = sorted(draw.sample(range(count), min(wanted, count)))
    return once + [draw.randrange(count) for _ in range(wanted - len(once))] if count else []


def _alpaca(row: Row, entry: _Entry, where: str) -> Row:
    columns, rest = entry.columns, _rest(row, entry)
    parts = [_text(row, columns[name], where, optional=name == "query") for name in ("prompt", "query") if
             name in columns]  # fmt: skip
    before = _system(row, entry, where) + _history(row, columns.get("history"), where)
    prompt = [*before, {"role": "user", "content": "\n".join(part for part in parts if part)}]
    if entry.is_ranking:
        return rest | {"prompt": prompt} | _pair(row, columns, where)
    is_read = "response" in columns and not entry.has_verdicts
    answer = _text(row, columns["response"], where, optional=True) if is_read else ""
    return rest | {"prompt": prompt} | ({"messages": [*prompt, _assistant(answer)]} if answer.strip() else {})


def _pair(row: Row, columns: Mapping[str, str], where: str) -> Row:
    """Both answers, each in its column or, as in files of earlier releases, in one list with the better one first."""
    if "chosen" in columns:
        return {side: _text(row, columns[side], where) for side in ("chosen", "rejected")}
    column = columns["response"]
    given = row.get(column)
    if isinstance(given, str) and given.lstrip().startswith("["):
        given = decoded(given, f"{where}, {column}")
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(text, str) for text in given):
        wanted = "a list of two texts, the better answer first"
        other = "or name columns.chosen and columns.rejected in the entry"
        raise DataError(f"{where}, {column}: {_got(row, column)}, wanted {wanted}; {other}")
    return {"chosen": given[0], "rejected": given[1]}


def _sharegpt(row: Row, entry: _Entry, where: str) -> Row:
    columns, rest = entry.columns, _rest(row, entry)
    column = columns["messages"]
    turns = decoded(row.get(column), f"{where}, {column}")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{where}, {column}: got {turns!r}, wanted a list of turns")
    if not turns:
        raise _Broken(f"{where}, {column}: no turns")
    messages = [_turn(turn, entry, f"{where}, {column}, turn {i}") for i, turn in enumerate(turns)]
    if messages[0]["role"] != "system":
        messages = [*_system(row, entry, where), *messages]
    if entry.is_ranking:
        answers = {side: _ranked(row, columns[side], entry, where) for side in ("chosen", "rejected")}
        return rest | {"prompt": messages} | answers
    if messages[-1]["role"] != "assistant":
        return rest | {"prompt": messages}
    return rest | {"prompt": messages[:-1]} | ({} if entry.has_verdicts else {"messages": messages})


def _turn(turn: Any, entry: _Entry, where: str) -> Message:
    tags, given = entry.tags, turn if isinstance(turn, Mapping) else {}
    role, content = given.get(tags["role_tag"]), as_text(given.get(tags["content_tag"]))
    calls = tool_calls(given.get("tool_calls"), where) if entry.formatting == "openai" else None
    if calls:
        return {"role": "assistant", "content": content or "", "tool_calls": _api_calls(calls, where)}
    if isinstance(role, str) and isinstance(content, list):
        raise DataError(f"{where}: {content_told(content)}")
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{where}: got {turn!r}, wanted text under {tags['role_tag']} and {tags['content_tag']}")
    roles = {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["observation_tag"]: "tool",
        tags["system_tag"]: "system",
    }
    if role == tags["function_tag"]:
        return {"role": "assistant", "content": "", "tool_calls": function_calls(content, where)}
    if role not in roles:
        raise _Broken(f"{where}: {tags['role_tag']} is {role!r}, wanted one of {', '.join(roles)}")
    return {"role": roles[role], "content": content}


def _api_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Function calls in the format of the API, without their ids."""
    listed = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in listed]
    if not all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in functions):
        raise DataError(f"{where}: got the tool_calls {calls!r}, wanted a list of calls, each with a function's name")
    read = [{"name": each["name"], "arguments": each.get("arguments")} for each in functions]
    return [{"type": "function", "function": function} for function in read]


def _ranked(row: Row, column: str, entry: _Entry, where: str) -> str:
    """One answer of a pair: text, or one turn."""
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("{") and f'"{entry.tags["role_tag"]}"' in value:
        value = decoded(value, f"{where}, {column}")
    if isinstance(value, Mapping):
        value = _turn(value, entry, f"{where}, {column}")["content"]
    if not isinstance(value, str):
        raise DataError(f"{where}, {column}: got {value!r}, wanted a turn or text")
    return value


def _history(row: Row, column: str | None, where: str) -> list[Message]:
    messages: list[Message] = []
    pairs = (decoded(row.get(column), f"{where}, {column}") if column else None) or []
    if not isinstance(pairs, Sequence):
        raise DataError(f"{where}, {column}: got {pairs!r}, wanted a list of questions and their answers")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{where}, {column}, entry {i}: got {pair!r}, wanted a question and its answer")
        messages += [{"role": "user", "content": pair[0]}, _assistant(pair[1])]
    return messages


def _system(row: Row, entry: _Entry, where: str) -> list[Message]:
    column = entry.columns.get("system")
    text = _text(row, column, where, optional=True) if column else ""
    return [{"role": "system", "content": text}] if text else []


def _rest(row: Row, entry: _Entry) -> Row:
    """The columns that are no part of the conversation; without a column ``system`` that the entry does not name, which
    LLaMA-Factory does not read as the system message."""
    used = {*entry.columns.values(), "system"}
    rest = {name: value for name, value in row.items() if name not in used}
    column = entry.columns.get("tools")
    return rest | {"tools": row.get(column) or None} if column else rest


def _text(row: Row, column: str, where: str, *, optional: bool = False) -> str:
    value = row.get(column)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}, {column}: {_got(row, column)}, wanted text")
    return value


def _got(row: Row, column: str) -> str:
    return f"got {row[column]!r}" if column in row else f"there is no column {column}; the columns are {', '.join(row)}"


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
