"""Answers and scores that several processes make together: each does its share, and all know the whole.

A generator and a reward source of their own kind, so that a rollout reads the same with one process and with many.
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
    """The generator whose answers all processes make together; itself where there is one process.

    Args:
        gather: put spread weights together once for all answers, not anew for every token.
    """
    if dist.num_processes == 1 and not engine.spreads_weights:
        return generator
    return SharedGenerator(generator, dist, engine.whole if gather else engine.in_step)


def shared(
    make: Make, at_once: int | None = None, by_one: bool = False, *, dist: Dist, engine: Engine | None = None
) -> RewardSource:
    """The source of whose scores every process makes its share; its own where there is one process.

    Args:
        make: makes what this process asks; what fails in one process fails in all.
        at_once: most requests in flight, of all processes together; they are divided.
        by_one: the first process scores everything, and the others have nothing to ask.
        engine: what spreads weights: of the policy's base, on which a source may be an adapter, and those of a source
            that waits for it.
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
    """Answers of a generator in every process: its own as they finish, then those of the others.

    An answer depends on its request alone, so the answers are those of one process.

    Args:
        generator: decodes this process's share.
        decoding: a context in which this process may run forwards of the policy; entered once for all answers.
    """

    def __init__(self, generator: Generator, dist: Dist, decoding: Callable[[], AbstractContextManager[None]]) -> None:
        self._generator, self._dist, self._decoding = generator, dist, decoding

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in ``requests``, answer); what fails in one process fails in all, and so does a stop."""
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
            except Exception as raised:  # told to the other processes, and raised by `agreed` in all of them
                error = raised
        for answers in self._dist.agreed(finished, error):
            if answers.keys() != finished.keys():
                yield from answers.items()

    @property
    def batch_size(self) -> int:
        """Answers that this process decodes side by side."""
        return self._generator.batch_size

    @batch_size.setter
    def batch_size(self, count: int) -> None:
        self._generator.batch_size = count

    def sync_weights(self, policy: nn.Module) -> None:
        """As the generator does it."""
        self._generator.sync_weights(policy)

    def close(self) -> None:
        """As the generator does it."""
        self._generator.close()


class SharedSource:
    """A reward source that every process asks about its share of a batch; all get the scores of the whole.

    Args:
        source: what this process asks, if it asks at all.
        dist: the processes.
        asking: how many of them ask, the first ones.
        in_step: its weights are spread, so that each forward is one of all processes: each gets equally many answers,
            some of them twice, and none begins before all have read theirs.
    """

    def __init__(self, source: RewardSource | None, dist: Dist, *, asking: int, in_step: bool = False) -> None:
        self.source, self._dist, self._asking, self._in_step = source, dist, asking, in_step

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The source's scores of the whole batch.

        Raises:
            RewardError: the source failed in one of the processes.
        """
        return whole(self.begin(batch), batch)

    def begin(self, batch: RewardBatch) -> Begun:
        """Asks about this process's share as early as the source can be asked."""
        shares = self._dist.shares(len(batch), self._asking)
        if not self._in_step:
            return _BegunShare(self.source, batch, shares, self._dist)
        return _BegunShare(_InStep(self.source, self._dist), batch, shares, self._dist, max(map(len, shares)))


class _InStep:
    """A source that scores in step with those of the other processes.

    Args:
        source: has equally many answers in each process.
    """

    def __init__(self, source: InForwards, dist: Dist) -> None:
        self._source, self._dist = source, dist

    def score(self, batch: RewardBatch) -> RewardOutput:
        """The source's scores; what one process cannot read is told before any of them begins with a forward."""
        read = self._dist.each(lambda: self._source.read(batch))
        return self._source.scored(read)


class _BegunShare:
    """A batch of which this process asks about its share.

    Args:
        shares: rows of each process.
        most: rows that each process must score at least, in step with the others; the first of its own again, or of
            the batch.
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
        """Tells the source of those that are its."""
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
            Stopped: one of the processes was asked to stop while it waited for its own share.
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
        """Ends what this process has under way."""
        if self._asked is not None:
            self._asked.give_up()


def _part(batch: RewardBatch, rows: Sequence[int]) -> RewardBatch:
    """Some rows of a batch, in lists of their own."""

    def of(values: Sequence) -> list:
        return [values[row] for row in rows]

    columns: Mapping[str, list] = {name: of(values) for name, values in batch.columns.items()}
    names = ("prompts", "queries", "responses", "query_ids", "response_ids", "conversations")
    return replace(batch, **{name: of(getattr(batch, name)) for name in names}, columns=columns)


def _first(output: RewardOutput, count: int) -> RewardOutput:
    """What is said of the first answers."""
    tokens = output.token_scores
    return RewardOutput(
        output.scores[:count],
        {name: values[:count] for name, values in output.components.items()},
        None if tokens is None else tokens[:count],
    )
