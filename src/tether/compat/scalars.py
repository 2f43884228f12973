"""Keys that have the same meaning and the same values in another system, under another name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tether.config import keys
from tether.config.base import Section
from tether.config.schema import RunConfig

GPUS = 8
"""Devices of the one node that a launch of another system is written for."""
ADAMW = {"adamw_torch": "adamw_torch", "adamw_hf": "adamw_torch", "adamw_torch_fused": "adamw_torch_fused"}
"""Our name of an optimizer of transformers, by that of any of its releases."""
ADAMW_8BIT = dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit")
"""The same of those with moments in 8 bits."""


class Scalar(NamedTuple):
    """One such key."""

    ours: str
    theirs: str
    default: Any = None
    """Theirs; None where that is left out, or the same as leaving ours out."""


def scalars_of(config: Section, table: Iterable[Scalar]) -> Iterator[tuple[str, Any]]:
    """A configuration's values under the other system's names; null ones are left out."""
    data = config.model_dump(mode="json")
    for scalar in table:
        value = at(data, scalar.ours)
        if value is not None:
            yield scalar.theirs, value


def at(data: Any, path: str) -> Any:
    """The value under a dotted key; None where a part of it is missing."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def left_out(config: Section, taken: Iterable[str]) -> list[str]:
    """Keys that a configuration sets to something else than their default, and that ``taken`` has not.

    Args:
        taken: keys, or sections whose keys are all meant.
    """
    taken = tuple(taken)
    return [
        f"{key}: {keys.shown(value)}"
        for key, value in _leaves(config.model_dump(mode="json", exclude_defaults=True))
        if not any(key == each or key.startswith(f"{each}.") for each in taken)
    ]


def reward_settings(config: RunConfig) -> Iterator[str]:
    """What reward sources have beside their type and place, a line each."""
    for i, reward in enumerate(config.rewards):
        settings = reward.model_dump(mode="json", exclude_defaults=True, exclude={"type", "path", "url", "name"})
        for key, value in settings.items():
            yield f"dropped, rewards.{i}.{key}: {keys.shown(value)}"


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
