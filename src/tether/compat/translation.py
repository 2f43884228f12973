"""Another system's configuration in our keys: what became what, what was ignored, and what could not be translated."""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tether.compat.launch import Unset
from tether.compat.table import NULL, Key, Rule
from tether.config import keys, text
from tether.config.base import Section
from tether.config.load import checked_config, dump_settings
from tether.config.schema import without_idle
from tether.errors import ConfigError

S = TypeVar("S", bound=Section)

_WORDS = {"yes": True, "on": True, "no": False, "off": False}
OF_ONE_PROCESS = (
    "Their batch size is that of one process, ours that of all: if theirs ran on several, multiply "
    "train.rollout_batch_size, or train.batch_size, by their number."
)
"""A sentence for systems whose batch sizes are per process, if the number of processes is unknown."""
_UNDECIDED = re.compile(r"\$\{(\w+)\?(\d+)\}")
"""What stands for a variable that a condition decides, with its line."""
_SECRET = re.compile(r"hub_token$|api_key$|secret|webhook|^use_wandb$|wandb\.key$")


@dataclass(frozen=True)
class Translation:
    """A configuration that was read from another system's keys."""

    source: str
    """The file, for messages."""
    system: str
    """Name of the other system, such as ``LLaMA-Factory``."""
    config: Mapping[str, Any]
    """The configuration in our keys."""
    origins: Mapping[text.Path, str]
    """Where each of our keys comes from, for messages."""
    became: Sequence[tuple[str, str]]
    """Their key and value, and ours."""
    ignored: Sequence[tuple[str, str]]
    """Their key and value, and why they have no effect here."""
    dropped: Sequence[tuple[str, str]]
    """Their key and value, and why they have no counterpart here; only for files that are converted, not run."""
    notes: Sequence[str]
    """Further differences, one sentence each."""
    plots: bool = False
    """Whether curves are to be written as PNG files."""

    @property
    def table(self) -> list[list[str]]:
        """Each of their keys with what became of it, one row per key."""
        dropped = [[theirs, f"dropped: {why}"] for theirs, why in self.dropped]
        ignored = [[theirs, f"ignored: {why}"] for theirs, why in self.ignored]
        return [[*row] for row in self.became] + dropped + ignored

    def noting(self, sentence: str) -> Translation:
        """A copy with one more sentence about a difference."""
        return replace(self, notes=[*self.notes, sentence])

    def checked(self, section: type[S], overrides: Sequence[str] = ()) -> S:
        """The validated configuration.

        Args:
            overrides: command-line arguments in our keys.

        Raises:
            ConfigError: names every key whose value is invalid, with their key.
        """
        return checked_config(
            dict(self.config), section, overrides=overrides, source=self.source, origins=self.origins
        )

    def yaml(self, command: str, config: Section) -> str:
        """Our file: comments at the top on what was dropped and ignored, then every key that differs from our default.

        Args:
            command: the command that runs the file, for its first line.
            config: the configuration, as ``checked`` returns it.
        """
        lines = [f"{command}", f"From {self.source} ({self.system}).", ""]
        lines += [f"dropped, {theirs}: {why}" for theirs, why in self.dropped]
        for why, several in self._ignored_by_reason().items():
            if len(several) == 1:
                lines.append(f"ignored, {several[0]}: {why}")
            else:
                lines.append(f"ignored, {why}:")
                lines += textwrap.wrap(", ".join(several), 110, initial_indent="  ", subsequent_indent="  ",
                                       break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines += self.notes
        head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        return f"{head}\n{dump_settings(config)}"

    def _ignored_by_reason(self) -> dict[str, list[str]]:
        reasons: dict[str, list[str]] = {}
        for theirs, why in self.ignored:
            reasons.setdefault(why, []).append(theirs)
        return reasons


class Translator:
    """Takes another system's keys one by one and collects ours.

    Args:
        source: the file, for messages.
        system: name of the other system.
        given: its keys with their values.
        origins: where each key was set.
        spelled: keys that the file has under another name, such as that of an earlier release, with that name.
    """

    def __init__(
        self,
        source: str,
        system: str,
        given: Mapping[str, Any],
        origins: Mapping[str, str],
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.system = source, system
        self._spelled = spelled or {}
        self.given = dict(given)
        self.config: dict[str, Any] = {}
        self.plots = False
        self.defaults: Mapping[str, Any] = {}
        """Their defaults that take precedence over those that a method is given."""
        self._origins = origins
        self._seen: set[str] = set()
        self._told: set[str] = set()
        self._ours: dict[text.Path, str] = {}
        self._became: list[tuple[str | None, str, str]] = []
        """Our key if there is one, their key and value, and what became of them."""
        self._ignored: list[tuple[str, str]] = []
        self._notes: list[str] = []
        self._dropped: list[tuple[str, str]] = []
        self._problems: list[tuple[str, str]] = []

    def name(self, key: str) -> str:
        """Their key as the file spells it."""
        return self._spelled.get(key, key)

    def take(self, key: str, default: Any = None) -> Any:
        """Their value, or their default if the file omits the key or sets it to null.

        A value with a variable that the script does not set, or with a command's output, is refused.
        """
        self._seen.add(key)
        value = self.given.get(key)
        unset = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Unset)]
        if unset:
            is_run, line = any("$(" in each for each in unset), next(filter(None, map(_UNDECIDED.search, unset)), None)
            why = "only a shell can run that command" if is_run else "the script does not set that variable"
            if line is not None:
                why = f"line {line[2]} holds a condition that only a shell knows, which decides it"
            self.refuse(key, f"{why}: write its value, or set it in a line {'above' if line is None else 'below'}")
            return default
        return self.defaults.get(key, default) if value is None else value

    def number(self, key: str, default: float) -> Any:
        """Like ``take``, for a key that holds a number; any other value is refused."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "wanted a number")
            return default
        return value

    def steps(self, key: str, default: float, updates: float, *, length: str = "max_steps") -> Any:
        """Like ``number``, for a key that counts steps; a number below 1 is a fraction of the run.

        Args:
            updates: number of steps in the whole run; 0 or less if the file does not give it.
            length: the key that would give it, for the message.
        """
        value = self.number(key, default)
        if not 0 < value < 1:
            return value
        if updates <= 0:
            self.refuse(key, f"without {length} the number of steps in this share is unknown: write whole steps")
            return default
        return math.ceil(value * updates)

    def pair(self, key: str, default: tuple[Any, Any]) -> tuple[Any, Any]:
        """Like ``take``, for a key that holds two numbers, as a list or as words; anything else is refused."""
        if not self.gives(key):
            self._seen.add(key)
            return default
        value = self.take(key)
        parts = value if isinstance(value, list) else str(value).split()
        try:
            first, second = map(float, parts)
        except (TypeError, ValueError):
            self.refuse(key, "wanted two numbers")
            return default
        return first, second

    def flag(self, key: str, default: bool = False) -> bool:
        """Like ``take``, for a key that is true or false; any other value is refused."""
        value = _boolean(self.take(key, default))
        if not isinstance(value, bool):
            self.refuse(key, "wanted true or false")
            return default
        return value

    def choice(self, key: str, default: str, table: Mapping[str, str], otherwise: str) -> str:
        """Our word for theirs; if there is none, ``otherwise`` takes its place and the key is reported as dropped."""
        value = self.take(key, default)
        if isinstance(value, str) and value in table:
            return table[value]
        self.drop(f"not supported here; {otherwise} is used instead", key)
        return otherwise

    def one_of(self, key: str, default: str, table: Mapping[str, str]) -> str:
        """Our word for theirs, where ``default`` is one of theirs; a value without a word of ours is refused."""
        value = self.take(key, default)
        if isinstance(value, str) and value in table:
            return table[value]
        self.refuse(key, f"wanted one of {', '.join(table)}")
        return table[default]

    def estimator(self, key: str, table: Mapping[str, str], baseline: str) -> None:
        """Sets ppo.advantage_estimator.

        Args:
            baseline: their name of the estimator that takes the prompt's mean return as baseline, then whitens: rloo
                differs from it by a constant factor, which whitening removes.
        """
        self.put("ppo.advantage_estimator", self.one_of(key, "gae", {**table, baseline: "rloo"}), key)
        if self.take(key) == baseline:
            self.put("ppo.whiten_advantages", True, key)

    def put_betas(self, key: str, default: tuple[float, float]) -> None:
        """Sets both decays of Adam from their key."""
        for name, beta in zip(("adam_beta1", "adam_beta2"), self.pair(key, default), strict=True):
            self.put(f"train.{name}", beta, key)

    @property
    def has_critic(self) -> bool:
        """Whether the estimator that was set has one."""
        return self.config["ppo"]["advantage_estimator"] == "gae"

    def put_init(self, key: str, policy: str, reward: str) -> None:
        """Sets value.init from their key that names the critic's model.

        Args:
            policy: their key of the policy.
            reward: that of the reward model.
        """
        init = self.take(key)
        if init is not None and init != self.take(reward):
            self.put("value.init", "policy" if init == self.take(policy) else init, key)
        self.covered(key, by="the reward model, as by default here")

    def allow_truncation(self, note: str = "") -> None:
        """Allows to restrict the tokens that can be drawn, if what was set does."""
        if {"top_p", "top_k"} & self.config["sampling"].keys():
            self.put("sampling.allow_truncated_sampling", True, note=note)

    def warmup(self) -> None:
        """Sets train.warmup_steps or train.warmup_ratio from their ``warmup_steps``, of which a number below 1 is a
        share, or ``warmup_ratio``, as transformers does."""
        steps, ratio = self.number("warmup_steps", 0), self.number("warmup_ratio", 0.0)
        if steps >= 1:
            self.put("train.warmup_steps", int(steps), "warmup_steps")
        elif steps or ratio:
            self.put("train.warmup_ratio", steps or ratio, "warmup_steps" if steps else "warmup_ratio")
        if steps:
            self.ignore("warmup_steps takes precedence", "warmup_ratio")
        self.covered("warmup_steps", "warmup_ratio", by="no warm-up, as by default here")

    def below(self, section: str) -> dict[str, Any]:
        """The keys that the file sets below ``section``, which ends with a dot, without it."""
        given = [key for key in self.given if key.startswith(section) and key not in self._told]
        return {key.removeprefix(section): self.take(key) for key in given}

    def drop_secrets(self, section: str, why: str) -> None:
        """Drops keys below ``section`` that look like the key of a service."""
        self.drop(why, *(key for key in self.given if key.startswith(section) and _SECRET.search(key)))

    def single(self, *theirs: str, names: bool = False) -> None:
        """Refuses lists and groups of keys where a single value is expected, and continues without them.

        Args:
            names: also accept a list.
        """
        for key in theirs:
            if isinstance(self.given.get(key), dict if names else dict | list):
                self.refuse(key, "wanted names" if names else "wanted one value")
                self.given[key] = None

    def gives(self, key: str) -> bool:
        """Whether the file sets the key to a value other than null."""
        return self.given.get(key) is not None

    def put(self, path: str, value: Any, *theirs: str, note: str = "") -> None:
        """Sets our key.

        Args:
            theirs: the keys that it comes from, paired with their value if the file does not give it:
                ``("lam", 0.95)``.
            note: what the reader must know about it.
        """
        here = self.config
        *above, last = path.split(".")
        for name in above:
            here = here.setdefault(name, {})
        here[last] = value
        self._seen.update(theirs)
        given = [key for key in theirs if self.gives(key)]
        where = [self._origins.get(given[0], ""), self.name(given[0])] if given else [""]
        self._ours[tuple(path.split("."))] = ", ".join(filter(None, where))
        self._told.update(given)
        said = ", ".join(map(self._shown, given)) or (
            f"{', '.join(map(self.name, theirs))} (default)" if theirs else "(built in)"
        )
        self._became.append((path, said, f"{path}: {keys.shown(value)}" + (f" ({note})" if note else "")))

    def covered(self, *theirs: str, by: str) -> None:
        """Records that keys need no counterpart, unless one of ours was set from them.

        Args:
            by: what takes their place here.
        """
        for key in theirs:
            self._seen.add(key)
            if self.gives(key) and key not in self._told:
                self._told.add(key)
                self._became.append((None, self._shown(key), by))

    def ignore(self, why: str, *theirs: str) -> None:
        """Ignores keys that have no effect here."""
        for key in theirs:
            self._seen.add(key)
            if self.gives(key) and key not in self._told:
                self._told.add(key)
                self._ignored.append((self._shown(key), why))

    def refuse(self, key: str, why: str) -> None:
        """Records a key that would change the result and has no counterpart here, with the way out; only the first
        record per key counts."""
        self._seen.add(key)
        if all(key != other for other, _ in self._problems):
            self._problems.append((key, f"got {self._value(key)}; {why}" if self.gives(key) else why))

    def drop(self, why: str, *theirs: str) -> None:
        """Drops keys that have no counterpart here, and reports it."""
        for key in theirs:
            self._seen.add(key)
            if self.gives(key) and key not in self._told:
                self._told.add(key)
                self._dropped.append((self._shown(key), why))

    def drop_unless(self, usual: Any, why: str, key: str) -> None:
        """Like ``drop``, for a key that has no effect at its usual value."""
        if self.take(key, usual) == usual:
            self.covered(key, by="its default, as here")
        self.drop(why, key)

    def drop_rest(self, why: str) -> None:
        """Drops every key that has not been handled yet."""
        self.drop(why, *(key for key in self.given if key not in self._seen))

    def need(self, key: str, what: str) -> None:
        """Refuses a file without the key, which says ``what``."""
        if not self.gives(key):
            self.refuse(key, f"missing; wanted {what}")

    def put_table(self, table: Iterable[Key | Rule], critic: tuple[str, ...] = ()) -> None:
        """Sets all keys of ours that a table has, as the file says them.

        Args:
            critic: beginnings of the keys of the critic, which have no effect if there is none.
        """
        for entry in table:
            if isinstance(entry, Rule):
                entry.read(self)
            elif entry.theirs.startswith(critic) and not self.has_critic:
                self.ignore("there is no critic", entry.theirs)
            elif (value := entry.form.read(self, entry)) is not None and (not entry.needs or self.gives(entry.needs)):
                self.put(entry.ours, None if value is NULL else value, entry.theirs)
            else:
                self.covered(entry.theirs, by=entry.form.kept)
        if critic and not self.has_critic:
            self.ignore("there is no critic", *(key for key in self.given if key.startswith(critic)))

    def off(self, why: str, **usual: Any) -> None:
        """Refuses keys that are set to anything but a value without effect.

        Args:
            why: what to do instead.
            usual: that value, by key; a tuple if there are several.
        """
        for key, values in usual.items():
            self._seen.add(key)
            allowed = values if isinstance(values, tuple) else (values,)
            if not self.gives(key):
                continue
            if self.given[key] in allowed or _boolean(self.given[key]) in allowed:
                self.covered(key, by="its default, as here")
            else:
                self.refuse(key, why)

    def note(self, sentence: str) -> None:
        """Adds a sentence about a difference."""
        self._notes.append(sentence)

    def finish(self, known: Iterable[str]) -> Translation:
        """The translation that was collected.

        Args:
            known: every key of the other system, to tell a typo from a key that was overlooked here.

        Raises:
            ConfigError: keys were refused, or do not exist in the other system; names all of them.
        """
        known = set(known)
        for key in self.given.keys() - known - self._seen:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            self._problems.append((key, f"{self.system} has no such key; {hint}"))
        if self._problems:
            order = list(self.given)
            self._problems.sort(key=lambda problem: order.index(problem[0]) if problem[0] in order else len(order))
            raise ConfigError(_message(self.source, [self._place(key, what) for key, what in self._problems]))
        if "rewards" in self.config:  # a run; stages have sections of their own
            self._leave_out_idle()
        forgotten = {key for key in self.given if self.gives(key)} - self._seen  # null means that a key is not set
        assert not forgotten, f"known, but neither taken nor passed over: {sorted(forgotten)}"
        return Translation(
            self.source,
            self.system,
            self.config,
            self._ours,
            [(theirs, ours) for _, theirs, ours in self._became],
            self._ignored,
            self._dropped,
            self._notes,
            self.plots,
        )

    def _leave_out_idle(self) -> None:
        """Drops keys that would have no effect, which exist because their defaults are not ours; reports those that the
        file sets."""
        self.config, idle = without_idle(self.config)
        for path, why in idle.items():
            said = next(said for ours, said, _ in self._became if ours == path)
            self._became = [entry for entry in self._became if entry[0] != path]
            self._ours.pop(tuple(path.split(".")))
            if any(self._shown(key) in said for key in self.given if self.gives(key)):
                self._ignored.append((said, why.partition(": ")[0]))

    def _place(self, key: str, what: str) -> str:
        return ": ".join(part for part in (self._origins.get(key, ""), self.name(key), what) if part)

    def _shown(self, key: str) -> str:
        return f"{self.name(key)}: {self._value(key)}"

    def _value(self, key: str) -> str:
        return "…" if _SECRET.search(key) else _UNDECIDED.sub(r"$\1", keys.shown(self.given[key]))


def _boolean(value: Any) -> Any:
    """A value; YAML 1.1's words for true and false count as booleans, as other systems read them so."""
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _message(source: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{source}, {problems[0]}"
    return "\n".join([f"{source}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])
