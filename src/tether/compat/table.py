"""Keys that have the same meaning and values in another system, under another name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tether.config import keys
from tether.config.base import Section
from tether.config.schema import RunConfig

GPUS = 8
"""Number of devices of the single node for which launches of other systems are written."""
ADAMW = {"adamw_torch": "adamw_torch", "adamw_hf": "adamw_torch", "adamw_torch_fused": "adamw_torch_fused"}
"""Our name of an optimizer of transformers, by its name in any release."""
ADAMW_8BIT = dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit")
"""The same for optimizers with 8-bit moments."""


NO_LIMIT = 1e6
"""What stands for no limit where a launch cannot say so."""


class Scalar(NamedTuple):
    """One such key."""

    ours: str
    theirs: str
    default: Any = None
    """Their default; None if it is not given, or equals ours."""


def scalars_of(config: Section, table: Iterable[Scalar]) -> Iterator[tuple[str, Any]]:
    """A configuration's values under the other system's names, without null values."""
    data = config.model_dump(mode="json")
    for scalar in table:
        value = at(data, scalar.ours)
        if value is not None:
            yield scalar.theirs, value


def at(data: Any, path: str) -> Any:
    """The value under a dotted key; None if a part of it is missing."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def has_baseline(config: RunConfig) -> bool:
    """Whether it takes a prompt's mean score as baseline, then whitens, for which others have an estimator."""
    return config.ppo.advantage_estimator == "rloo" and config.ppo.whiten_advantages is True


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
