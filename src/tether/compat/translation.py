"""Another system's configuration in our words: what became what, what was passed over, what could not be taken."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tether.compat.launch import Unset
from tether.compat.scalars import Scalar
from tether.config import keys, text
from tether.config.base import Section
from tether.config.load import checked_config
from tether.errors import ConfigError

S = TypeVar("S", bound=Section)

_WORDS = {"yes": True, "on": True, "no": False, "off": False}
OF_ONE_PROCESS = (
    "The batch is that of one process, and ours is that of all: where theirs ran on several, multiply "
    "train.rollout_batch_size, or train.batch_size, by their number."
)
"""A sentence for systems whose batches are of each process, where their number is not known."""
_SECRET = re.compile(r"hub_token$|api_key$|secret|webhook|^use_wandb$|wandb\.key$")


@dataclass(frozen=True)
class Translation:
    """A configuration that was read in another system's words."""

    source: str
    """The file, for messages."""
    system: str
    """Whose words they were: ``LLaMA-Factory``."""
    config: Mapping[str, Any]
    """The same in our keys."""
    origins: Mapping[text.Path, str]
    """Where each of our keys comes from, for messages."""
    became: Sequence[tuple[str, str]]
    """Their key and value, and ours."""
    ignored: Sequence[tuple[str, str]]
    """Their key and value, and why it changes nothing here."""
    dropped: Sequence[tuple[str, str]]
    """Their key and value, and why it has no place here; of files that are converted, not run."""
    notes: Sequence[str]
    """What else is different here, a sentence each."""
    plots: bool = False
    """Whether curves are wanted as PNG files."""

    @property
    def table(self) -> list[list[str]]:
        """Every key of theirs with what became of it, a row each."""
        dropped = [[theirs, f"dropped: {why}"] for theirs, why in self.dropped]
        ignored = [[theirs, f"ignored: {why}"] for theirs, why in self.ignored]
        return [[*row] for row in self.became] + dropped + ignored

    def noting(self, sentence: str) -> Translation:
        """The same with one more sentence about what is different here."""
        return replace(self, notes=[*self.notes, sentence])

    def checked(self, section: type[S], overrides: Sequence[str] = ()) -> S:
        """The configuration itself.

        Args:
            overrides: command-line arguments in our words.

        Raises:
            ConfigError: names every key whose value does not fit, with theirs.
        """
        return checked_config(
            dict(self.config), section, overrides=overrides, source=self.source, origins=self.origins
        )

    def yaml(self, command: str) -> str:
        """Our file: what was passed over in comments at its head, then every key that differs from our default.

        Args:
            command: what runs the file, for its first line.
        """
        lines = [f"{command}", f"From {self.source} ({self.system}).", ""]
        lines += [f"dropped, {theirs}: {why}" for theirs, why in self.dropped]
        lines += [f"ignored, {theirs}: {why}" for theirs, why in self.ignored]
        lines += self.notes
        head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        return f"{head}\n{text.dump(dict(self.config))}"


class Translator:
    """Takes another system's keys one by one and collects ours.

    Args:
        source: the file, for messages.
        system: name of the other system.
        given: its keys with their values.
        origins: where each of them was set.
    """

    def __init__(self, source: str, system: str, given: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        self.source, self.system = source, system
        self.given = dict(given)
        self.config: dict[str, Any] = {}
        self.plots = False
        self._origins = origins
        self._seen: set[str] = set()
        self._told: set[str] = set()
        self._ours: dict[text.Path, str] = {}
        self._became: list[tuple[str, str]] = []
        self._ignored: list[tuple[str, str]] = []
        self._notes: list[str] = []
        self._dropped: list[tuple[str, str]] = []
        self._problems: list[tuple[str, str]] = []

    def take(self, key: str, default: Any = None) -> Any:
        """Their value, or their default where the file leaves the key out or says null.

        One that takes a variable which the script does not set is refused.
        """
        self._seen.add(key)
        value = self.given.get(key)
        if any(isinstance(each, Unset) for each in (value if isinstance(value, list) else [value])):
            self.refuse(key, "the script does not set that variable: write its value, or set it in a line above")
            return default
        return default if value is None else value

    def number(self, key: str, default: float) -> Any:
        """As ``take``, for a key that holds a number; one that holds anything else is refused."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "wanted a number")
            return default
        return value

    def steps(self, key: str, default: float, updates: float, *, length: str = "max_steps") -> Any:
        """As ``number``, for a key that counts steps, where a number below 1 is their share of the run.

        Args:
            updates: steps of the whole run; 0 or less where the file does not say how many.
            length: the key that would say it, for the message.
        """
        value = self.number(key, default)
        if not 0 < value < 1:
            return value
        if updates <= 0:
            self.refuse(key, f"without {length} it cannot be told how many steps this share is: write whole steps")
            return default
        return math.ceil(value * updates)

    def pair(self, key: str, default: tuple[Any, Any]) -> tuple[Any, Any]:
        """As ``take``, for a key that holds two numbers, as a list or as words; anything else is refused."""
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
        """As ``take``, for a key that is true or false; one that holds anything else is refused."""
        value = _boolean(self.take(key, default))
        if not isinstance(value, bool):
            self.refuse(key, "wanted true or false")
            return default
        return value

    def choice(self, key: str, default: str, table: Mapping[str, str], otherwise: str) -> str:
        """Our word for theirs; where ours has none, ``otherwise`` stands in and the key is said to be dropped."""
        value = self.take(key, default)
        if isinstance(value, str) and value in table:
            return table[value]
        self.drop(f"not offered here; {otherwise} stands in", key)
        return otherwise

    def one_of(self, key: str, default: str, table: Mapping[str, str]) -> str:
        """Our word for theirs, ``default`` being one of theirs; what ours has no word for is refused."""
        value = self.take(key, default)
        if isinstance(value, str) and value in table:
            return table[value]
        self.refuse(key, f"wanted one of {', '.join(table)}")
        return table[default]

    def estimator(self, key: str, table: Mapping[str, str], baseline: str) -> str:
        """Sets and returns ppo.advantage_estimator.

        Args:
            baseline: their name of the one without the prompt's mean, whitened, which is like our rloo: its means
                differ from theirs by a factor that whitening takes out.
        """
        ours = self.one_of(key, "gae", {**table, baseline: "rloo"})
        self.put("ppo.advantage_estimator", ours, key)
        if self.take(key) == baseline:
            self.put("ppo.whiten_advantages", True, key)
        return ours

    def warmup(self, updates: float, *, length: str) -> None:
        """Sets train.warmup_ratio from their ``warmup_steps`` or ``warmup_ratio``.

        Args:
            updates: steps of the whole run; 0 or less where the file does not say how many.
            length: the key that would say it.
        """
        steps, ratio = self.number("warmup_steps", 0), self.number("warmup_ratio", 0.0)
        if steps >= 1 and updates <= 0:
            self.refuse("warmup_steps", f"without {length} it cannot be told which share that is: write warmup_ratio")
        elif steps >= 1:
            self.put("train.warmup_ratio", warmup_share(steps, updates), "warmup_steps", length)
        elif steps or ratio:
            self.put("train.warmup_ratio", steps or ratio, "warmup_steps" if steps else "warmup_ratio")
        self.covered("warmup_steps", "warmup_ratio", by="train.warmup_ratio")

    def single(self, *theirs: str, names: bool = False) -> None:
        """Refuses lists and groups of keys where one value is wanted, and goes on without them.

        Args:
            names: a list is wanted as well.
        """
        for key in theirs:
            if isinstance(self.given.get(key), dict if names else dict | list):
                self.refuse(key, "wanted names" if names else "wanted one value")
                self.given[key] = None

    def gives(self, key: str) -> bool:
        """Whether the file sets the key to something."""
        return self.given.get(key) is not None

    def put(self, path: str, value: Any, *theirs: str, note: str = "") -> None:
        """Sets our key.

        Args:
            theirs: the keys that it comes from, with their value where the file does not give it: ``("lam", 0.95)``.
            note: what a reader must know about it.
        """
        here = self.config
        *above, last = path.split(".")
        for name in above:
            here = here.setdefault(name, {})
        here[last] = value
        self._seen.update(theirs)
        given = [key for key in theirs if self.gives(key)]
        where = [self._origins.get(given[0], ""), given[0]] if given else [""]
        self._ours[tuple(path.split("."))] = ", ".join(filter(None, where))
        self._told.update(given)
        said = ", ".join(map(self._shown, given)) or (f"{', '.join(theirs)} (default)" if theirs else "(built in)")
        self._became.append((said, f"{path}: {keys.shown(value)}" + (f" ({note})" if note else "")))

    def covered(self, *theirs: str, by: str) -> None:
        """Says that keys need none of ours, unless one of ours was set from them.

        Args:
            by: what stands for them here.
        """
        for key in theirs:
            self._seen.add(key)
            if self.gives(key) and key not in self._told:
                self._told.add(key)
                self._became.append((self._shown(key), by))

    def ignore(self, why: str, *theirs: str) -> None:
        """Passes over keys that change nothing here."""
        for key in theirs:
            self._seen.add(key)
            if self.gives(key) and key not in self._told:
                self._told.add(key)
                self._ignored.append((self._shown(key), why))

    def refuse(self, key: str, why: str) -> None:
        """Notes a key that would change the result and has no place here, with the way out; the first one a key."""
        self._seen.add(key)
        if all(key != other for other, _ in self._problems):
            self._problems.append((key, f"got {self._value(key)}; {why}" if self.gives(key) else why))

    def drop(self, why: str, *theirs: str) -> None:
        """Leaves out keys that have no place here, and says so."""
        for key in theirs:
            self._seen.add(key)
            if self.gives(key) and key not in self._told:
                self._told.add(key)
                self._dropped.append((self._shown(key), why))

    def drop_unless(self, usual: Any, why: str, key: str) -> None:
        """As ``drop``, for a key that changes nothing where it has the usual value."""
        if self.take(key, usual) == usual:
            self.covered(key, by="its default, as here")
        self.drop(why, key)

    def drop_rest(self, why: str) -> None:
        """Leaves out every key that nothing was said of yet."""
        self.drop(why, *(key for key in self.given if key not in self._seen))

    def put_scalars(self, table: Iterable[Scalar]) -> None:
        """Sets the keys that only have another name; what is null is left out."""
        for scalar in table:
            value = self.take(scalar.theirs, scalar.default)
            if value is not None:
                self.put(scalar.ours, value, scalar.theirs)

    def off(self, why: str, **usual: Any) -> None:
        """Refuses keys that are set to anything but the value that leaves them without effect.

        Args:
            why: what is to be done instead.
            usual: that value by key; a tuple of several.
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
        """Adds a sentence about what is different here."""
        self._notes.append(sentence)

    def finish(self, known: Iterable[str]) -> Translation:
        """What was collected.

        Args:
            known: every key that the other system has, to tell a slip from one that was forgotten.

        Raises:
            ConfigError: keys were refused, or are none of the other system's; names all of them.
        """
        known = set(known)
        for key in self.given.keys() - known - self._seen:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            self._problems.append((key, f"{self.system} has no such key; {hint}"))
        if self._problems:
            order = list(self.given)
            self._problems.sort(key=lambda problem: order.index(problem[0]) if problem[0] in order else len(order))
            raise ConfigError(_message(self.source, [self._place(key, what) for key, what in self._problems]))
        forgotten = {key for key in self.given if self.gives(key)} - self._seen  # null leaves a key out
        assert not forgotten, f"known, but neither taken nor passed over: {sorted(forgotten)}"
        return Translation(
            self.source,
            self.system,
            self.config,
            self._ours,
            self._became,
            self._ignored,
            self._dropped,
            self._notes,
            self.plots,
        )

    def _place(self, key: str, what: str) -> str:
        return ": ".join(part for part in (self._origins.get(key, ""), key, what) if part)

    def _shown(self, key: str) -> str:
        return f"{key}: {self._value(key)}"

    def _value(self, key: str) -> str:
        return "…" if _SECRET.search(key) else keys.shown(self.given[key])


def warmup_share(steps: float, updates: float) -> float:
    """The share of a run of so many updates over which the learning rate rises; below 1, ``steps`` are that share."""
    return steps if steps < 1 else min(1.0, steps / max(updates, 1))


def _boolean(value: Any) -> Any:
    """A value, the words for true and false of YAML 1.1 among them, which other systems read so."""
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _message(source: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{source}, {problems[0]}"
    return "\n".join([f"{source}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])
