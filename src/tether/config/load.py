"""A configuration file and command-line overrides to a checked configuration, and back to text."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tether.config import keys, text
from tether.config.aliases import alias
from tether.config.base import Section
from tether.config.schema import RunConfig
from tether.errors import ConfigError

S = TypeVar("S", bound=Section)


def load_config(path: str | Path, overrides: Sequence[str] = (), section: type[S] = RunConfig) -> S:
    """The configuration that a YAML file and overrides describe.

    Args:
        path: the file. Relative paths in it are relative to the current folder, as everywhere in the ecosystem, and
            ``~/`` is the home folder.
        overrides: command-line arguments, ``--ppo.kl_coef=0.02`` or ``--ppo.kl_coef 0.02``; ``--rewards.0.weight=2``
            reaches into a list. Values are YAML, except that keys that take text take it as it is; those that take a
            list of texts too read one that begins with ``[``.
        section: class of the whole file.

    Raises:
        ConfigError: names every problem at once, each with its line or override, what was found and what is wanted.
    """
    return parse_config(read_file(path), section, overrides=overrides, source=str(path))


def check_kind(config: Any, kind: type, function: str, reader: str = "load_config(path)") -> None:
    """Raises ``ConfigError`` if a function was given something other than a configuration of its kind.

    Args:
        function: name of the function, for the message.
        reader: the call that reads such a configuration from a file, for the message.
    """
    if not isinstance(config, kind):
        raise ConfigError(
            f"{function}: got {type(config).__name__}, wanted a {kind.__name__}: {reader} reads one from a file"
        )


def parse_config(
    content: str, section: type[S] = RunConfig, *, overrides: Sequence[str] = (), source: str = "configuration"
) -> S:
    """As ``load_config``, from the text itself.

    Args:
        source: where the text is from, for messages.
    """
    try:
        document = text.parse(content)
    except text.TextError as error:
        raise ConfigError(f"{source}, line {error.line}: {error}") from error
    origins = {path: f"line {line}" for path, line in document.lines.items()}
    return checked_config(document.data, section, overrides=overrides, source=source, origins=origins)


def checked_config(
    data: Any,
    section: type[S] = RunConfig,
    *,
    overrides: Sequence[str] = (),
    source: str,
    origins: Mapping[text.Path, str],
    within: str = "",
) -> S:
    """As ``load_config``, from plain data.

    Args:
        source: where the data is from, for messages.
        origins: where in it each key was set, for messages.
        within: what the command line puts before the keys, for messages: ``sft.``.
    """
    problems: list[_Problem] = []
    for name, value in override_pairs(overrides):
        try:
            data, path = _overridden(data, name, value, section)
            origins = {k: o for k, o in origins.items() if k[: len(path)] != path} | {path: f"--{within}{name}"}
        except ConfigError as error:
            problems.append(_Problem(f"--{within}{name}", name, str(error)))
    data = at_home(data)
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: wanted keys and values (`model:`, `data:`, …), got {keys.shown(data)}")
    try:
        config = section.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems += _problems(error, data, origins, section)
    if problems:
        raise ConfigError(_message(source, problems))
    return config


def at_home(data: Any) -> Any:
    """The data with ``~/`` at the beginning of a text as the home folder, which a shell leaves alone after ``=``."""
    if isinstance(data, dict):
        return {key: at_home(value) for key, value in data.items()}
    if isinstance(data, list):
        return [at_home(value) for value in data]
    return str(Path(data).expanduser()) if isinstance(data, str) and data.startswith("~/") else data


def dump_config(config: Section, *, continues: bool = False) -> str:
    """YAML of every key, defaults included, that loads back to an equal configuration.

    Args:
        continues: whether the run continues an adapter, which has settings of its own: keys of ``model.lora`` that are
            left out are then left out here as well, as their defaults would be taken for wanted settings.
    """
    lora = config.model.lora if continues else None
    unset = {} if lora is None else {"model": {"lora": type(lora).model_fields.keys() - lora.model_fields_set}}
    return text.dump(config.model_dump(mode="json", exclude=unset))


def dump_settings(config: Section) -> str:
    """YAML of the keys that are not at their defaults."""
    return text.dump(config.model_dump(mode="json", exclude_defaults=True))


def dump_run(config: Section, *, continues: bool) -> str:
    """``dump_config`` for the folder of a run, without what was asked of one start only: the file may begin another
    run, which is not to be resumed, and must not replace this one."""
    asked_once = {"resume": False, "overwrite_output_dir": False}
    return dump_config(config.model_copy(update=asked_once), continues=continues)


@dataclass(frozen=True, slots=True)
class _Problem:
    where: str
    """``line 4``, ``--ppo.kl_coef``, or empty where neither said anything."""
    key: str
    """The key, empty for the whole file."""
    what: str
    """What is wrong with it."""

    def __str__(self) -> str:
        key = "" if self.where.startswith("--") and f".{self.where[2:]}".endswith(f".{self.key}") else self.key
        return ": ".join(part for part in (self.where, key, self.what) if part)


def _message(path: str, problems: Sequence[_Problem]) -> str:
    if len(problems) == 1:
        return f"{path}{', ' if problems[0].where else ': '}{problems[0]}"
    return "\n".join([f"{path}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])


def read_file(path: str | Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: it cannot be read.
    """
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file (current folder: {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; wanted a YAML file, for example {path / 'config.yaml'}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def override_pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of each override, both spellings.

    Raises:
        ConfigError: one is not an override, or has no value.
    """
    arguments = iter(overrides)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ConfigError(f"{argument}: wanted an override such as --train.seed=1")
        if not equals:
            value = next(arguments, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"--{name}: has no value; write --{name}=VALUE")
        yield name, value


def _overridden(data: Any, name: str, value: str, section: type[Section]) -> tuple[Any, text.Path]:
    """The data with one key replaced, and the path of that key."""
    field = keys.find(section, name.split(".")).field
    is_list = value.startswith("[")
    as_text = field is not None and (keys.is_text(field) or (keys.is_text_or_texts(field) and not is_list))
    return _replaced(data, name.split("."), _value(value, as_text=as_text), (), section)


def _value(value: str, *, as_text: bool) -> Any:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    try:
        return text.checked(value) if as_text and not quoted and value != "null" else text.parse(value).data
    except text.TextError as error:
        raise ConfigError(f"{keys.shown(value)} is not a YAML value: {error}") from error


def _replaced(
    node: Any, names: Sequence[str], value: Any, done: text.Path, section: type[Section]
) -> tuple[Any, text.Path]:
    if not names:
        return value, done
    head, *rest = names
    if isinstance(node, list):
        if not head.isdecimal() or int(head) >= len(node):
            raise ConfigError(f"{text.dotted(done)} has {len(node)} entries, numbered from 0; got {head}")
        position = int(head)
        inner, path = _replaced(node[position], rest, value, (*done, position), section)
        return [*node[:position], inner, *node[position + 1 :]], path
    if node is not None and not isinstance(node, dict):
        raise ConfigError(f"{text.dotted(done)} is {keys.shown(node)}, which has no key {head}")
    if node is None and head.isdecimal() and keys.item_type(keys.find(section, done).annotation) is not None:
        name = text.dotted(done)
        way_out = f"add it there, or give all of --{name}='[…]'"
        raise ConfigError(f"the file has no {name}, and so no entry {head}: {way_out}")
    inner, path = _replaced((node or {}).get(head), rest, value, (*done, head), section)
    return {**(node or {}), head: inner}, path


def _problems(
    error: ValidationError, data: Any, origins: Mapping[text.Path, str], section: type[Section]
) -> list[_Problem]:
    """One problem per key, in the order of the file; problems of missing keys come last."""
    found: dict[tuple[text.Path, str], _Problem] = {}
    for each in error.errors(include_url=False):
        place = keys.find(section, each["loc"])
        is_unknown = each["type"] == "extra_forbidden"
        for path, what in _unknown(place.path, data, section) if is_unknown else [_explained(each, place, data)]:
            found.setdefault((path, what), _Problem(_origin(path, origins), text.dotted(path), what))
    order = {path: number for number, path in enumerate(origins)}
    return [found[k] for k in sorted(found, key=lambda k: order.get(k[0], len(order)))]


def _explained(error: Any, place: keys.Found, data: Any) -> tuple[text.Path, str]:
    """The key that an error of pydantic is about, and the error in our words."""
    path, annotation, field = place
    wants = keys.wanted(annotation, field.metadata if field else ())
    match error["type"]:
        case "value_error":
            return path, str(error["ctx"]["error"])
        case "missing":
            return path, f"missing; wanted {wants} ({keys.one_line(field.description)})"
        case "union_tag_invalid" | "union_tag_not_found":
            tags = ", ".join(filter(None, map(keys.tag, keys.sections(annotation))))
            got = _at(data, path).get("type")
            return (*path, "type"), f"{'missing' if got is None else f'got {keys.shown(got)}'}; wanted one of {tags}"
        case "finite_number":
            return path, f"got {keys.shown(_at(data, path))}, which is not finite; wanted {wants}"
        case _:
            return path, f"got {keys.shown(_at(data, path))}, wanted {wants}"


def _unknown(path: text.Path, data: Any, section: type[Section]) -> Iterator[tuple[text.Path, str]]:
    """Says what to write for an unknown key; where other systems nest keys that we know by name, for each of them."""
    known = [doc.key for doc in keys.describe(section)]
    named = [(leaf, hint) for leaf in _leaves(path, _at(data, path)) if (hint := _called(leaf, known))]
    for leaf, hint in named or [(path, _nearest(path, known, section))]:
        yield leaf, f"unknown key; {hint}"


def _leaves(path: text.Path, value: Any) -> Iterator[text.Path]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    else:
        yield path


def _called(path: text.Path, known: Sequence[str]) -> str | None:
    """What to write for a key that another system, or another of our sections, has under this very name."""
    other = alias(text.dotted(path))
    if other and set(other.keys) <= {*known, *_groups(known)}:
        here = f"here it is {' and '.join(other.keys)}" if other.keys else other.note
        return f"{here}: {other.note}" if other.keys and other.note else here
    name = str(path[-1])
    if "." in name and name in known:
        return f"nest it: {name.replace('.', ': {')}: …{'}' * name.count('.')}"
    places = [key for key in known if key.rpartition(".")[2] == name and ".N." not in key]
    return f"it belongs elsewhere: {' or '.join(places)}" if 0 < len(places) < 4 else None


def _groups(known: Sequence[str]) -> set[str]:
    return {key[:end] for key in known for end, sign in enumerate(key) if sign == "."}


def _nearest(path: text.Path, known: Sequence[str], section: type[Section]) -> str:
    """The key that was probably meant, or else all keys that are allowed at this place."""
    here = list(
        dict.fromkeys(
            name for member in keys.sections(keys.find(section, path[:-1]).annotation) for name in member.model_fields
        )
    )
    written = str(path[-1]).lower().replace("-", "_").rpartition(".")[2]
    if close := difflib.get_close_matches(written, here, n=1):
        return f"did you mean {text.dotted((*path[:-1], close[0]))}?"
    last = {key.rpartition(".")[2]: key for key in known}
    if close := difflib.get_close_matches(written, last, n=1, cutoff=0.75):
        return f"did you mean {last[close[0]]}?"
    return f"allowed here: {', '.join(here)}"


def _at(data: Any, path: text.Path) -> Any:
    for part in path:
        data = data[part]
    return data


def _origin(path: text.Path, origins: Mapping[text.Path, str]) -> str:
    """Where the nearest key around ``path`` was set."""
    return next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), "")
