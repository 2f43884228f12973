"""Scores a file of answers with reward sources: ``tether score``, to test a judge before it is trusted."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tether.config.chat import check_columns, present, with_now
from tether.config.keys import counted
from tether.config.load import check_kind
from tether.config.rewards import OwnModelReward, sources_of
from tether.config.source import SourceConfig
from tether.data.judged import JudgedData, JudgedRow, load_judged
from tether.data.pairs import pair_accuracy
from tether.data.sources import check_source
from tether.errors import DataError, RewardResponseError
from tether.inference.judges import Judges, PolicyReader, check_sources, load_judges, load_reader
from tether.inference.options import named_source
from tether.inference.output import check_outputs, kept, write_metrics
from tether.report.read import is_missing_share
from tether.rewards.build import check_contents, check_reward_columns, try_sources
from tether.rewards.combine import Part, WeightedSum
from tether.rewards.ensemble import Ensemble
from tether.rewards.lengths import Room, or_raise
from tether.rewards.missing import way_out_of
from tether.rewards.reading import Reads
from tether.train.display import Display, NullDisplay
from tether.types import RewardBatch, RewardOutput, RewardSource

Answers = Sequence[tuple[JudgedRow, str]]
"""Answers, each with its row."""

BATCH = 64
"""Number of answers between two progress updates."""
SHOWN_ROWS, SHOWN_ENDS = 2, 600
"""Number of rows whose text is shown as a model reads it, and of characters shown at either end."""
SCORE = "score"
"""Name of the weighted sum in tables."""


@dataclass(frozen=True)
class Table:
    """A table of results."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Scored:
    """A scored file of answers."""

    rows: list[dict[str, Any]]
    """Every row of the file with its scores, as written to the output."""
    tables: list[Table]
    """Summaries of the scores of each source."""
    seen: list[str]
    """The first rows as models among the sources read them, one line each."""


def score_file(
    config: SourceConfig,
    file: str | Path,
    *,
    split: str = "train",
    subset: str | None = None,
    columns: dict[str, str] | None = None,
    output: str | Path | None = None,
    metrics: str | Path | None = None,
    display: Display | None = None,
) -> Scored:
    """Scores every answer of a file of pairs or answers.

    If it is interrupted or fails, rows that are scored by then are still written to ``output``.

    Args:
        file: a file that ``load_judged`` can read.
        split, subset: those to read if ``file`` has several.
        columns: the file's column names by ours, as ``data.columns``.
        output: JSONL file for the rows.
        metrics: JSON file for what the tables show, with the file and the sources.

    Raises:
        ConfigError: ``output`` or ``metrics`` exists or cannot be written, or a source is not usable.
        DataError, ModelError: the file or a model is not usable.
        RewardError: an answer could not be scored.
    """
    check_kind(config, SourceConfig, "score_file", "load_sources(path)")
    file, display, config = str(file), display or NullDisplay(), with_now(config, present())
    check_columns(columns)
    check_source(file, "FILE")
    output, metrics = check_outputs(output, metrics)
    check_sources(config)
    reader = load_reader(config)
    source = named_source(file, "FILE", split=split, subset=subset, columns=columns)
    data = load_judged(source, is_chat=reader.is_chat)
    check_reward_columns(config.rewards, data.columns)
    check_contents(config.rewards, ((row.prompt or "", row.columns, row.place) for row in data.rows))
    answers = [(row, answer) for row in data.rows for answer in row.answers]
    batches = [_batch(reader, answers[start : start + BATCH], data.columns) for start in range(0, len(answers), BATCH)]
    _check_lengths(config, reader, batches, [row.place for row, _ in answers])
    first = _batch(reader, answers[:1], data.columns)
    try_sources(config.rewards, config.reward_names, first, reader.tokenizer)
    display.phase("loading models", 0, 1)
    judges = load_judges(config, reader)
    outputs: list[RewardOutput] = []
    with kept(output, lambda: _rows(data, outputs), display):
        for scored in _scored(judges.rewards, batches, display):
            outputs.append(scored)
    totals, components = _joined(outputs)
    own = {name: values for name, values in components.items() if values != totals and not is_missing_share(name)}
    scores = {SCORE: totals} | own
    lengths = [len(answer) for row in data.rows for answer in row.answers]
    tables = (pair_tables if data.is_pairs else answer_tables)(scores, lengths, data.name)
    if metrics is not None:
        of_sources, by_length = map(_by_label, tables)
        write_metrics(
            metrics,
            "score",
            config,
            file=file,
            split=split,
            subset=subset,
            columns=columns,
            num_answers=len(answers),
            metrics=of_sources,
            by_length=by_length,
        )
    return Scored(_rows(data, outputs), tables, _seen(judges, data))


def pair_tables(scores: Mapping[str, Sequence[float]], lengths: Sequence[int], name: str) -> list[Table]:
    """Tables for scores of pairs: accuracy and means of each source, and the accuracy of the first by length.

    Args:
        scores: by source, alternating between the chosen and the rejected answer of each pair.
        lengths: number of characters of each answer.
        name: name of the pairs.
    """
    summary = []
    for source, values in scores.items():
        chosen, rejected = values[::2], values[1::2]
        margins = [better - worse for better, worse in zip(chosen, rejected, strict=True)]
        means = [statistics.fmean(each) for each in (chosen, rejected, margins)]
        summary.append([source, *accuracy(margins), margins.count(0), *means, correlation(values, lengths)])
    values = next(iter(scores.values()))
    margins = [better - worse for better, worse in zip(values[::2], values[1::2], strict=True)]
    pairs = list(zip(lengths[::2], lengths[1::2], strict=True))
    groups = {
        "the chosen answer is longer": [i for i, (chosen, rejected) in enumerate(pairs) if chosen > rejected],
        "the chosen answer is shorter": [i for i, (chosen, rejected) in enumerate(pairs) if chosen < rejected],
        "both are equally long": [i for i, (chosen, rejected) in enumerate(pairs) if chosen == rejected],
    } | {f"the longer one has {label}": rows for label, rows in thirds([max(pair) for pair in pairs]).items()}
    by_length = [[label, len(rows), *accuracy([margins[i] for i in rows])] for label, rows in groups.items() if rows]
    header = ["source", "accuracy", "±", "ties", "chosen", "rejected", "margin", "r with length"]
    return [
        Table(f"{counted(len(pairs), 'pair')} of {name}: accuracy and mean scores", header, summary),
        Table("accuracy by length", ["pairs in which", "pairs", "accuracy", "±"], by_length),
    ]


def answer_tables(scores: Mapping[str, Sequence[float]], lengths: Sequence[int], name: str) -> list[Table]:
    """Tables for scores of answers: mean and spread of each source, and the mean of the first by length.

    Args:
        scores: by source, one per answer.
        lengths: number of characters of each answer.
        name: name of the answers.
    """
    summary = [
        [
            source,
            statistics.fmean(values),
            statistics.pstdev(values),
            min(values),
            max(values),
            correlation(values, lengths),
        ]
        for source, values in scores.items()
    ]
    values = next(iter(scores.values()))
    by_length = [
        [label, len(rows), statistics.fmean(values[i] for i in rows)] for label, rows in thirds(lengths).items()
    ]
    header = ["source", "mean", "std", "lowest", "highest", "r with length"]
    return [
        Table(f"{counted(len(lengths), 'answer')} of {name}: scores", header, summary),
        Table("score by length", ["answers of", "answers", "mean"], by_length),
    ]


def accuracy(margins: Sequence[float]) -> tuple[float, float]:
    """``pair_accuracy`` and its standard error √(p(1 − p)/n)."""
    share = pair_accuracy(margins)
    return share, (share * (1 - share) / len(margins)) ** 0.5


def correlation(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Pearson's r; None if one of the two is constant, or varies too little for floats."""
    if len(set(values)) < 2 or len(set(others)) < 2:
        return None
    try:
        return statistics.correlation(values, others)
    except statistics.StatisticsError:  # the squares of its differences are 0
        return None


def thirds(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Indices of the short, medium and long items by a label, a third each except for ties."""
    ordered = sorted(lengths)
    edges = sorted({ordered[-(-len(ordered) * part // 3) - 1] for part in (1, 2, 3)})
    groups, below = {}, -1
    for edge in edges:
        span = f"{below + 1} to {edge}" if below + 1 < edge else str(edge)
        groups[f"{span} characters"] = [i for i, length in enumerate(lengths) if below < length <= edge]
        below = edge
    return groups


def _check_lengths(
    config: SourceConfig, reader: PolicyReader, batches: Sequence[RewardBatch], places: Sequence[str]
) -> None:
    """Raises ``DataError`` for the first answer that, together with its prompt, is longer than a model can read and to
    which it gives no score.

    Args:
        places: the row of each answer, in the order of the batches, for messages.
    """
    models = [(key, reward) for key, reward in sources_of(config.rewards) if isinstance(reward, OwnModelReward)]
    rooms = [(key, reward, Room(reward, reader.tokenizer, config.data.chat_template_now)) for key, reward in models]
    limited = [(key, reward, room) for key, reward, room in rooms if room.limit is not None and reward.missing is None]
    ahead = iter(places)
    for batch in batches if limited else ():
        own = list(islice(ahead, len(batch)))
        for key, reward, room in limited:
            for place, length in zip(own, room.lengths(batch), strict=True):
                if length > room.limit:
                    raise DataError(
                        f"{place}, for {key}: prompt and answer have {length} tokens, but {reward.path} reads at most "
                        f"{room.limit}: remove the row, use a model that reads more{or_raise(key, reward)}, or "
                        f"{way_out_of(key)}"
                    )


def _by_label(table: Table) -> dict[str, dict[str, Any]]:
    """The rows of a table by their first entry, each with its other entries by column."""
    return {label: dict(zip(table.columns[1:], values, strict=True)) for label, *values in table.rows}


def _scored(rewards: RewardSource, batches: Sequence[RewardBatch], display: Display) -> Iterator[RewardOutput]:
    """Yields the outputs of the sources for all answers, batch by batch.

    Raises:
        RewardResponseError: not all batches have the same components.
    """
    done, total, names = 0, sum(map(len, batches)), None
    for batch in batches:
        display.phase("scoring", done, total)
        output = rewards.score(batch)
        names = output.components.keys() if names is None else names
        if output.components.keys() != names:
            raise RewardResponseError(
                f"the rewards returned the components {', '.join(output.components) or 'none'} for answers {done} to "
                f"{done + len(batch) - 1} (counted from 0) and {', '.join(names) or 'none'} for those before; wanted "
                "the same for all"
            )
        yield output
        done += len(batch)
    display.phase("scoring", total, total)


def _joined(outputs: Sequence[RewardOutput]) -> tuple[list[float], dict[str, list[float]]]:
    """The weighted sum for every answer, and each source's own scores by name."""
    components: dict[str, list[float]] = {}
    for output in outputs:
        for name, values in output.components.items():
            components.setdefault(name, []).extend(values)
    return [score for output in outputs for score in output.scores], components


def _batch(reader: PolicyReader, answers: Answers, columns: Sequence[str]) -> RewardBatch:
    return reader.batch(
        [row.prompt for row, _ in answers],
        [answer for _, answer in answers],
        {name: [row.columns[name] for row, _ in answers] for name in columns},
        [row.place for row, _ in answers],
    )


def _rows(data: JudgedData, outputs: Sequence[RewardOutput]) -> list[dict[str, Any]]:
    """Every row whose answers have all been scored, with its scores."""
    totals, components = _joined(outputs)
    names = ("chosen", "rejected") if data.is_pairs else ("response",)
    rows = []
    for i, row in enumerate(data.rows[: len(totals) // len(names)]):
        record: dict[str, Any] = {"row": i, "prompt": row.prompt}
        for offset, (name, answer) in enumerate(zip(names, row.answers, strict=True)):
            at, prefix = i * len(names) + offset, f"{name}_" if data.is_pairs else ""
            rewards = {source: values[at] for source, values in components.items()}
            record |= {name: answer, f"{prefix}score": totals[at], f"{prefix}rewards": rewards}
        rows.append(record)
    return rows


def _seen(judges: Judges, data: JudgedData) -> list[str]:
    """The first rows as the models among the sources read them."""
    kinds = ("chosen", "rejected") if data.is_pairs else ("answer",)
    answers = [(row, answer) for row in data.rows[:SHOWN_ROWS] for answer in row.answers]
    batch = _batch(judges.reader, answers, data.columns)
    assert isinstance(judges.rewards, WeightedSum), "sources are summed"
    return [
        f"row {i // len(kinds)}, {kinds[i % len(kinds)]}, as {name} reads it: {_shortened(text)!r}"
        for name, source in _readers(judges.rewards.parts)
        for i, text in enumerate(source.seen(batch))
    ]


def _readers(parts: Sequence[Part], prefix: str = "") -> Iterator[tuple[str, Reads]]:
    """Yields name and source of every model that reads text, including members of ensembles."""
    for part in parts:
        name = prefix + part.name
        if isinstance(part.source, Ensemble):
            yield from _readers(part.source.members, f"{name}/")
        elif isinstance(part.source, Reads):
            yield name, part.source


def _shortened(text: str) -> str:
    """Both ends of a long text."""
    return text if len(text) <= 2 * SHOWN_ENDS else f"{text[:SHOWN_ENDS]} […] {text[-SHOWN_ENDS:]}"
