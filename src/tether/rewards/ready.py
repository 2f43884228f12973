"""Ready-made reward functions: rules on an answer's text, some of them against a column of the dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tether.config.rewards import (
    ColumnReward,
    ExactMatchReward,
    JsonValidReward,
    LengthTargetReward,
    MathMatchReward,
    ReadyReward,
    RegexReward,
    RepetitionReward,
)
from tether.errors import ConfigError, RewardError
from tether.rewards import math_verify
from tether.rewards.base import answer_of, checked
from tether.types import RewardBatch, RewardOutput

Rule = Callable[[str, Any], float]
"""(answer, value of the column; None for a rule without one) → score."""


class ReadySource:
    """Scores each answer by a rule.

    Args:
        rule: the rule; may raise a ``ValueError`` that says what is wrong with the column.
        name: its name in messages.
        column: the dataset's column that the rule receives; None for a rule on the answer alone.
    """

    def __init__(self, rule: Rule, name: str, *, column: str | None = None) -> None:
        self.rule = rule
        self.name = name
        self.column = column

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The rule's scores.

        Raises:
            RewardError: the dataset lacks the column, or it holds something that the rule cannot use in some row.
        """
        if self.column is not None and self.column not in batch.columns:
            raise RewardError(f"reward {self.name}: {_no_column(self.column, list(batch.columns))}")
        wanted = batch.columns[self.column] if self.column is not None else [None] * len(batch)
        scores = []
        for row, (answer, value) in enumerate(zip(batch.responses, wanted, strict=True)):
            try:
                scores.append(self.rule(answer, value))
            except ValueError as error:
                raise RewardError(
                    f"reward {self.name}: {answer_of(row, len(batch))}: column {self.column} {error}"
                ) from error
        return RewardOutput(checked(scores, len(batch), f"reward {self.name}"))


def ready_source(config: ReadyReward, name: str) -> ReadySource:
    """The source that the configuration describes."""
    column = config.column if isinstance(config, ColumnReward) else None
    return ReadySource(_rule(config), name, column=column)


def check_ready(config: ReadyReward, key: str) -> None:
    """Raises ``ConfigError`` if a package is missing."""
    if isinstance(config, MathMatchReward):
        math_verify.check_installed(key)


def check_ready_column(config: ColumnReward, columns: Sequence[str], key: str) -> None:
    """Raises ``ConfigError`` if the dataset lacks the column of a rule."""
    if config.column not in columns:
        raise ConfigError(f"{key}.column: {_no_column(config.column, columns)}")


def check_value(config: ColumnReward, value: Any) -> None:
    """Raises ``ValueError`` if a row's column holds a value that the rule cannot use."""
    if isinstance(config, MathMatchReward):
        expression(value)
    else:
        written(value)


def _rule(config: ReadyReward) -> Rule:
    match config:
        case LengthTargetReward(target=target, unit="words"):
            return lambda answer, _: length_score(len(answer.split()), target)
        case LengthTargetReward(target=target):
            return lambda answer, _: length_score(len(answer), target)
        case RegexReward(pattern=pattern):
            return lambda answer, _: float(re.search(pattern, answer) is not None)
        case ExactMatchReward():
            return lambda answer, wanted: float(answer.strip() == written(wanted))
        case MathMatchReward():
            return math_score
        case RepetitionReward(n=n):
            return lambda answer, _: -repeated_share(answer.split(), n)
        case JsonValidReward():
            return lambda answer, _: float(is_json(answer))
    raise AssertionError(f"no rule for {type(config).__name__}")


def length_score(length: int, target: int) -> float:
    """0 at the target, falling linearly on both sides by 1 per target length: −|length − target| / target."""
    return -abs(length - target) / target


def repeated_share(words: Sequence[str], n: int) -> float:
    """Share of the n-grams that occurred earlier in the text: 1 − distinct / all; 0 for fewer than n words."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_json(text: str) -> bool:
    """Whether the whole text is one JSON value by RFC 8259, which allows neither NaN nor Infinity."""
    try:
        json.loads(text, parse_constant=_refused, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def math_score(answer: str, wanted: Any) -> float:
    """1 if the answer's expression equals the wanted one, else 0.

    Raises:
        ValueError: the wanted one is no mathematical expression.
    """
    return float(math_verify.is_equal(expression(wanted), answer))


def expression(wanted: Any) -> str:
    """A column's mathematical expression as text.

    Raises:
        ValueError: it is none.
    """
    text = written(wanted, number=int | float)
    if not math_verify.is_expression(text):
        raise ValueError(f"holds {text!r}, wanted a mathematical expression")
    return text


def written(wanted: Any, *, number: Any = int) -> str:
    """A column's value as text, stripped of white space.

    Args:
        number: types that count as numbers; other numbers have no unique spelling.

    Raises:
        ValueError: it is neither text nor such a number.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, str | number):
        kind = "whole number" if number is int else "number"
        raise ValueError(f"holds {wanted!r} ({type(wanted).__name__}), wanted text or a {kind}")
    return str(wanted).strip()


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _no_column(column: str, columns: Sequence[str]) -> str:
    return f"the dataset has no column {column}; its columns are {', '.join(columns) or 'none'}"
