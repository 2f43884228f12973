"""Generation and scoring shared by several processes: each does its share, and all get the whole.

They implement the generator and reward source protocols, so that a rollout looks the same with one process and many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import nn

from tether.errors import OutOfStep
from tether.machine.distributed import Dist, share
from tether.rewards.adapter import AdapterSource
from tether.rewards.base import InForwards
from tether.rewards.build import Make, ToSpread
from tether.rewards.early import Begun, begun, joined, whole
from tether.train.engines.base import Engine
from tether.train.interrupt import Stopped
from tether.types import Completion, Generator, Request, RewardBatch, RewardOutput, RewardSource, Sampling


def shared_generator(generator: Generator, dist: Dist, engine: Engine, *, gather: bool = True) -> Generator:
    """A generator that divides the answers over all processes; ``generator`` itself if there is only one process.

    Args:
        gather: whether to gather sharded weights once for all answers, instead of for every token.
    """
    if dist.num_processes == 1 and not engine.spreads_weights:
        return generator
    return SharedGenerator(generator, dist, engine.whole if gather else engine.in_step)


def shared(
    make: Make, at_once: int | None = None, by_one: bool = False, *, dist: Dist, engine: Engine | None = None
) -> RewardSource:
    """A source that divides scoring over all processes; the source of ``make`` itself if there is only one process.

    Args:
        make: makes this process's source; a failure in one process fails in all.
        at_once: maximum number of requests in flight over all processes, which is divided among them.
        by_one: whether the first process scores everything, so that the others need no source.
        engine: the engine that shards weights: those of the policy's base, on which a source may be an adapter, and
            those of a source that is to be sharded.
    """
    asking = 1 if by_one else min(dist.num_processes, at_once or dist.num_processes)
    most = at_once and len(share(at_once, dist.rank, asking))
    own = dist.each(lambda: make(most) if dist.rank < asking else None)
    in_step = engine is not None and engine.spreads_weights and isinstance(own, AdapterSource | ToSpread)
    if isinstance(own, ToSpread):
        own.source.through = engine.spread(own.modules, waits=own.waits)
        own = own.source
    return own if dist.num_processes == 1 else SharedSource(own, dist, asking=asking, in_step=in_step)


class SharedGenerator:
    """Yields the answers of all processes in each process: its own as they finish, then those of the others.

    An answer depends only on its request, so the answers are the same as with a single process.

    Args:
        generator: decodes this process's share.
        decoding: a context in which this process may run forward passes of the policy; entered once for all answers.
    """

    def __init__(self, generator: Generator, dist: Dist, decoding: Callable[[], AbstractContextManager[None]]) -> None:
        self._generator, self._dist, self._decoding = generator, dist, decoding

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer). A failure or a stop request in one process applies to all."""
        own, finished, error = self._dist.share(len(requests)), {}, None
        with self._decoding():
            try:
                for i, completion in self._generator.generate([requests[k] for k in own], sampling):
                    finished[own[i]] = completion
                    yield own[i], completion
                    if (reason := self._dist.stop_asked()) is not None:
                        raise Stopped(reason)
            except OutOfStep:
                raise
            except Exception as raised:  # sent to the other processes, and raised by `agreed` in all of them
                error = raised
        for answers in self._dist.agreed(finished, error):
            if answers.keys() != finished.keys():
                yield from answers.items()

    @property
    def batch_size(self) -> int:
        """Number of answers that this process decodes at once."""
        return self._generator.batch_size

    @batch_size.setter
    def batch_size(self, count: int) -> None:
        self._generator.batch_size = count

    def sync_weights(self, policy: nn.Module) -> None:
        """Passes the weights on to the generator."""
        self._generator.sync_weights(policy)

    def close(self) -> None:
        """Closes the generator."""
        self._generator.close()


class SharedSource:
    """A reward source with which every process scores its share of a batch; all get the scores of the whole batch.

    Args:
        source: this process's source; None if it does not score.
        dist: the processes.
        asking: how many processes score: the first ones.
        in_step: whether the weights are sharded, so that all processes take part in each forward pass: each gets the
            same number of answers, some of them twice, and none begins before all have read theirs.
    """

    def __init__(self, source: RewardSource | None, dist: Dist, *, asking: int, in_step: bool = False) -> None:
        self.source, self._dist, self._asking, self._in_step = source, dist, asking, in_step

    def score(self, batch: RewardBatch) -> RewardOutput:
        """Scores of the whole batch.

        Raises:
            RewardError: the source failed in one of the processes.
        """
        return whole(self.begin(batch), batch)

    def begin(self, batch: RewardBatch) -> Begun:
        """Starts scoring this process's share, as early as the source allows."""
        shares = self._dist.shares(len(batch), self._asking)
        if not self._in_step:
            return _BegunShare(self.source, batch, shares, self._dist)
        return _BegunShare(_InStep(self.source, self._dist), batch, shares, self._dist, max(map(len, shares)))


class _InStep:
    """A source that scores in step with the sources of the other processes.

    Args:
        source: gets the same number of answers in each process.
    """

    def __init__(self, source: InForwards, dist: Dist) -> None:
        self._source, self._dist = source, dist

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The source's scores. A failure to read in one process is shared before any process runs a forward pass."""
        read = self._dist.each(lambda: self._source.read(batch))
        return self._source.scored(read)


class _BegunShare:
    """A batch of which this process scores its share.

    Args:
        shares: rows of each process.
        most: number of rows that each process must score, in step with the others. Missing ones are filled with the
            first row of its share, or of the batch.
    """

    def __init__(
        self, source: RewardSource | None, batch: RewardBatch, shares: Sequence[range], dist: Dist, most: int = 0
    ) -> None:
        self._batch, self._shares, self._dist = batch, shares, dist
        own = shares[dist.rank]
        self._rows = [*own, *[own[0] if own else 0] * (most - len(own))]
        self._part = _part(batch, self._rows)
        self._asked = begun(source, self._part) if self._rows else None
        self._in_step = most > 0

    def finished(self, rows: Sequence[int]) -> None:
        """Passes those of this process's share on to the source."""
        told = set(rows)
        ready = [i for i, row in enumerate(self._rows) if row in told]
        for i in ready:
            row = self._rows[i]
            self._part.responses[i] = self._batch.responses[row]
            self._part.response_ids[i] = self._batch.response_ids[row]
        if ready:
            self._asked.finished(ready)

    def output(self) -> RewardOutput:
        """The scores of the whole batch.

        Raises:
            Stopped: one of the processes was asked to stop while it waited for its share.
        """
        outputs = self._dist.together(self._own_output)
        groups = [
            (rows, _first(output, len(rows))) for rows, output in zip(self._shares, outputs, strict=True) if len(rows)
        ]
        return joined(groups, self._batch)

    def _own_output(self) -> RewardOutput | None:
        if self._asked is None:
            return None
        return self._asked.output() if self._in_step else self._dist.interruptible(self._asked.output)

    def give_up(self) -> None:
        """Cancels this process's pending requests."""
        if self._asked is not None:
            self._asked.give_up()


def _part(batch: RewardBatch, rows: Sequence[int]) -> RewardBatch:
    """Some rows of a batch, in new lists."""

    def of(values: Sequence) -> list:
        return [values[row] for row in rows]

    columns: Mapping[str, list] = {name: of(values) for name, values in batch.columns.items()}
    names = ("prompts", "queries", "responses", "query_ids", "response_ids", "conversations")
    return replace(batch, **{name: of(getattr(batch, name)) for name in names}, columns=columns)


def _first(output: RewardOutput, count: int) -> RewardOutput:
    """The output for the first ``count`` answers."""
    tokens = output.token_scores
    return RewardOutput(
        output.scores[:count],
        {name: values[:count] for name, values in output.components.items()},
        None if tokens is None else tokens[:count],
    )
