"""Tables of another system's keys: what each is called here, and how its values map there and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tether.compat.launch import Unset, command
from tether.config import keys
from tether.config.base import Section
from tether.config.schema import RunConfig

if TYPE_CHECKING:
    from tether.compat.translation import Translator

GPUS = 8
"""Number of devices of the single node for which launches of other systems are written."""
ADAMW = {"adamw_torch": "adamw_torch", "adamw_hf": "adamw_torch", "adamw_torch_fused": "adamw_torch_fused"}
"""Our name of an optimizer of transformers, by its name in any release."""
ADAMW_8BIT = dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit")
"""The same for optimizers with 8-bit moments."""
NO_LIMIT = 1e6
"""What stands for no limit where a launch cannot say so."""


NULL = object()
"""What a form reads if ours is null, which is not its default."""


class Form(NamedTuple):
    """How the values of a key map to ours and back."""

    read: Callable[[Translator, Key], Any]
    """Our value; None if ours keeps its default."""
    write: Callable[[Any], Any] = lambda value: value
    """Their value for ours; None if the key is left out."""
    kept: str = "its default, as here"
    """What is told of a key that the file sets if ours keeps its default."""


def _named(keys: Translator, key: Key) -> Any:
    """A name that only a shell knows, as it holds the date for example, is dropped."""
    if isinstance(keys.given.get(key.theirs), Unset):
        return keys.drop("only a shell knows it", key.theirs)
    return keys.take(key.theirs)


def _above_0(keys: Translator, key: Key) -> Any:
    is_off = keys.given.get(key.theirs) is False or keys.number(key.theirs, key.default or -1) <= 0
    return None if is_off else keys.take(key.theirs, key.default)


def _several(keys: Translator, key: Key) -> Any:
    value = keys.take(key.theirs, key.default)
    return value.split(",") if isinstance(value, str) and "," in value else value


def _column(keys: Translator, key: Key) -> Any:
    column = keys.take(key.theirs, key.default)
    return None if column in ("prompt", "messages") else column


def constant(ours: Any, *, when: bool = True) -> Form:
    """A form of a key that is true or false: ``ours`` if it is ``when``, else left out."""
    return Form(
        lambda keys, key: ours if keys.flag(key.theirs, bool(key.default)) is when else None,
        lambda value: (value == ours) is when or None,
        "its default, as here" if when else "as by default here",
    )


def below(bound: float) -> Form:
    """A form in which ``bound``, or more, stands for no limit."""

    def read(keys: Translator, key: Key) -> Any:
        value = keys.take(key.theirs, key.default)
        return None if isinstance(value, int | float) and value >= bound else value

    return Form(read, lambda limit: bound if limit is None else limit)


def words(table: Mapping[str, str], otherwise: str) -> Form:
    """A form that has other words for the same.

    Args:
        table: our word for each of theirs.
        otherwise: our word that takes the place of one without a counterpart, which is reported as dropped.
    """
    theirs = {ours: theirs for theirs, ours in table.items()}
    return Form(
        lambda keys, key: keys.choice(key.theirs, key.default, table, otherwise),
        lambda ours: theirs.get(ours, theirs[otherwise]),
    )


PLAIN = Form(lambda keys, key: keys.take(key.theirs, key.default))
"""The same values."""
NULLABLE = Form(lambda keys, key: NULL if (value := keys.take(key.theirs)) is None else value)
"""The same values, where null is their default, but not always ours."""
WHOLE = Form(PLAIN.read, lambda value: value if value is None else math.ceil(value))
"""A number that is whole there."""
NAME = Form(_named)
"""A name of the run."""
FLAG = constant(True)
"""True or left out."""
SWITCH = Form(lambda keys, key: keys.flag(key.theirs) if keys.gives(key.theirs) else None)
"""True, false or left out."""
COUNT = Form(_above_0, lambda count: count or None, kept="not at all, as by default here")
"""A number, which false, or one below 1, turns off."""
TOP_K = COUNT._replace(kept="every token can be drawn, as by default here")
TOP_P = below(1.0)._replace(kept=TOP_K.kept)
"""The tokens that can be drawn, by their number and by their share."""
JOINED = Form(_several, lambda value: ",".join(value) if isinstance(value, list) else value)
"""One value, or several that are joined by commas."""
COLUMN = Form(_column, lambda column: column or "prompt", kept="the column prompt or messages")
"""The column of the prompts."""


class Key(NamedTuple):
    """A key of theirs that stands for one of ours."""

    ours: str
    theirs: str
    default: Any = None
    """Their default; None if it is not given, or equals ours."""
    form: Form = PLAIN
    former: str = ""
    """Its name in earlier releases."""
    needs: str = ""
    """Another key of theirs without which this one has no effect."""


class Rule(NamedTuple):
    """Keys that map together."""

    ours: Sequence[str]
    """Those of ours, or sections, which stand for all their keys."""
    read: Callable[[Translator], None]
    """Sets them from theirs."""
    write: Callable[[RunConfig], Iterable[tuple[str, Any]]]
    """Theirs, with values."""


def arguments(
    config: RunConfig, table: Iterable[Key | Rule], critic: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """A configuration as their keys with values.

    Args:
        critic: beginnings of the keys of the critic, which are left out if there is none.
    """
    data = config.model_dump(mode="json")
    for part in (data["train"], data["value"]):
        if part["learning_rate"] is None:
            part["learning_rate"] = config.learning_rate
    for entry in table:
        if isinstance(entry, Rule):
            yield from entry.write(config)
            continue
        ours = at(data, entry.ours)
        value = entry.form.write(ours)
        is_usual = value is None or (ours is None and value == entry.default)
        if not is_usual and (config.ppo.has_critic or not entry.theirs.startswith(critic)):
            yield entry.theirs, value


def script(
    config: RunConfig,
    table: Iterable[Key | Rule],
    program: Sequence[str],
    arguments: Iterable[Sequence[str]],
    *,
    title: str,
    notes: Iterable[str],
    written: Iterable[str] = (),
) -> str:
    """A shell script that starts the same run, with comments that name what it cannot express.

    Args:
        program: words that start it.
        arguments: its arguments, one line each.
        title: its first comment.
        notes: further ones.
        written: keys of ours that it says, other than those of the table.
    """
    taken = [name for entry in table for name in (entry.ours if isinstance(entry, Rule) else [entry.ours])]
    taken += [*written, "sampling.allow_truncated_sampling", *["ppo.whiten_advantages"] * has_baseline(config)]
    comments = [title, *(f"dropped, {line}" for line in left_out(config, taken)), *notes]
    return "\n".join(["#!/bin/sh", *(f"# {each}" for each in comments)]) + "\n\n" + command(program, arguments)


def at(data: Any, path: str) -> Any:
    """The value under a dotted key; None if a part of it is missing."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def has_baseline(config: RunConfig) -> bool:
    """Whether it takes a prompt's mean score as baseline, then whitens, for which others have an estimator."""
    return config.ppo.advantage_estimator == "rloo" and config.ppo.whiten_advantages is True


def estimator(config: RunConfig, table: Mapping[str, str], baseline: str) -> str:
    """Their name of the advantage estimator.

    Args:
        table: our name for each of theirs.
        baseline: as in ``Translator.estimator``.
    """
    theirs = {ours: theirs for theirs, ours in table.items()}
    return baseline if has_baseline(config) else theirs[config.ppo.advantage_estimator]


def left_out(config: Section, taken: Iterable[str]) -> list[str]:
    """Keys that a configuration sets to other than their default and that are not in ``taken``.

    Args:
        taken: keys, or sections, which stand for all their keys.
    """
    taken = tuple(taken)
    return [
        f"{key}: {keys.shown(value)}"
        for key, value in _leaves(config.model_dump(mode="json", exclude_defaults=True))
        if not any(key == each or key.startswith(f"{each}.") for each in taken)
    ]


def reward_settings(config: RunConfig, *written: str) -> Iterator[str]:
    """Settings of reward sources other than type and location, one line each.

    Args:
        written: names of settings that have a counterpart.
    """
    for i, reward in enumerate(config.rewards):
        where = {"type", "path", "url", "name", *written}
        settings = reward.model_dump(mode="json", exclude_defaults=True, exclude=where)
        for key, value in settings.items():
            yield f"dropped, rewards.{i}.{key}: {keys.shown(value)}"


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
