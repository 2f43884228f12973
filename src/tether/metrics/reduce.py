"""Metrics that carry their reduction over micro-batches and processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Values = Tensor | Sequence[float] | float
"""Entries of one metric: a tensor of any shape and dtype, a list, or one number."""
Reduce = Callable[[Tensor], Tensor]
"""Combines a float64 tensor over all processes, elementwise."""


class Metrics:
    """Collects what happens in one update and reduces each name once, at the end.

    A name has one reduction. Means weight every entry equally, however the entries were split into calls: a mean over
    micro-batches is the mean over their tokens. Entries outside ``mask`` are ignored, NaN or not. Nothing is read back
    from an accelerator before ``compute``.

    Several processes collect the same names, each its own entries; entries known to all of them go in ``known``.
    """

    def __init__(self) -> None:
        self._reductions: dict[str, str] = {}
        self._parts: dict[str, list[Tensor]] = {}
        self._known: set[str] = set()
        self._is_known = False

    def mean(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Adds entries of a mean: Σ x / count; NaN if there are none."""
        self._add(name, "mean", _moments(values, mask))

    def var(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Adds entries of a biased variance: Σ (x − mean)² / count; NaN if there are none."""
        self._add(name, "var", _moments(values, mask))

    def max(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Adds entries of a maximum: −∞ if there are none, NaN if one is NaN."""
        self._add(name, "max", _largest(wide(values), mask))

    def sum(self, name: str, x: Values) -> None:
        """Adds entries of a sum, which is also summed over processes."""
        self._add(name, "sum", wide(x).sum())

    def value(self, name: str, x: float) -> None:
        """Sets a number that every process knows; the last call counts."""
        self._add(name, "value", wide(x))

    def slowest(self, name: str, x: float) -> None:
        """Adds to a sum whose maximum over processes is reported; with several processes also ``NAME_spread``, the
        maximum minus the minimum."""
        self._add(name, "slowest", wide(x))

    @contextmanager
    def known(self) -> Iterator[None]:
        """A context whose entries are known to every process: they count once, not once per process."""
        before, self._is_known = self._is_known, True
        try:
            yield
        finally:
            self._is_known = before

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context whose entries count only if nothing is raised."""
        reductions, lengths = dict(self._reductions), {name: len(parts) for name, parts in self._parts.items()}
        try:
            yield
        except BaseException:
            self._reductions = reductions
            self._parts = {name: self._parts[name][:length] for name, length in lengths.items()}
            raise

    def compute(self, reduce: Reduce | None = None, reduce_max: Reduce | None = None) -> dict[str, float]:
        """Every metric as one number, in order of first appearance.

        Args:
            reduce: sums over processes, which must all have collected the same names. Default: a single process.
            reduce_max: takes the maximum over processes; needed with ``reduce`` if there is a maximum or a ``slowest``.
        """
        parts = {name: _on_cpu(parts) for name, parts in self._parts.items()}
        sums = self._over({n: parts[n].sum(dim=0) for n in self._named("mean", "var", "sum")}, reduce)
        means = {n: sums[n][1] / sums[n][0] for n in self._named("mean", "var")}
        # A second round, since squares around the mean of all entries do not cancel as Σ x² − n · mean² does.
        squares = self._over({n: _squares_around(means[n], parts[n]) for n in self._named("var")}, reduce)
        maxima, timed = self._named("max"), self._named("slowest")
        assert reduce is None or reduce_max is not None or not (maxima or timed)
        own = {n: parts[n].sum(dim=0) for n in timed}
        both = {n: torch.stack([x, -x]) for n, x in own.items()}
        largest = self._over({n: parts[n].max() for n in maxima} | both, reduce_max)
        results = {
            "slowest": lambda n: largest[n][0],
            "mean": lambda n: means[n],
            "var": lambda n: squares[n] / sums[n][0],
            "sum": lambda n: sums[n],
            "max": lambda n: largest[n],
            "value": lambda n: parts[n][-1],
        }
        numbers = {name: results[reduction](name).item() for name, reduction in self._reductions.items()}
        spread = {f"{n}_spread": largest[n].sum().item() for n in timed} if reduce is not None else {}
        return numbers | spread

    def _over(self, numbers: Mapping[str, Tensor], reduce: Reduce | None) -> dict[str, Tensor]:
        """The same numbers over all processes, in one call of ``reduce``; numbers known to all stay as they are."""
        own = {name: x for name, x in numbers.items() if name not in self._known}
        return {**numbers, **_combined(own, reduce)}

    def _add(self, name: str, reduction: str, part: Tensor) -> None:
        known = self._reductions.setdefault(name, reduction)
        assert known == reduction, f"{name} is reduced by {known}, not by {reduction}"
        if self._is_known:
            self._known.add(name)
        self._parts.setdefault(name, []).append(part)

    def _named(self, *reductions: str) -> list[str]:
        return [name for name, reduction in self._reductions.items() if reduction in reductions]


def wide(values: Values) -> Tensor:
    """The entries in float64, detached; in float32 on a device without float64."""
    if not isinstance(values, Tensor):
        return torch.tensor(values, dtype=torch.float64)
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


def _on_cpu(parts: Sequence[Tensor]) -> Tensor:
    """The parts of one metric in float64 on the CPU: one copy for all of them, as each copy waits for the device."""
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu().double() for part in parts]
    return torch.stack(list(parts)).cpu().double()


def _moments(values: Values, mask: Tensor | None) -> Tensor:
    """(count, Σ x, Σ (x − mean)²) of the entries."""
    x = wide(values)
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    zero = torch.zeros_like(x)
    count, total = mask.sum().to(x), torch.where(mask, x, zero).sum()
    return torch.stack([count, total, torch.where(mask, x - total / count, zero).square().sum()])


def _squares_around(mean: Tensor, parts: Tensor) -> Tensor:
    """Σ (x − mean)² over the entries of all parts: each part's own squares, moved from its own mean to ``mean``."""
    counts, totals, squares = parts.unbind(dim=1)
    return (squares + counts * (totals / counts.clamp(min=1) - mean).square()).sum()


def _largest(x: Tensor, mask: Tensor | None) -> Tensor:
    """The largest entry, −∞ if there is none."""
    nothing = x.new_full((1,), -math.inf)
    entries = x if mask is None else torch.where(mask, x, nothing)
    return torch.cat([entries.flatten(), nothing]).max()


def _combined(numbers: Mapping[str, Tensor], reduce: Reduce | None) -> dict[str, Tensor]:
    """The same numbers over all processes, in one call of ``reduce``, whatever their order in each process."""
    if reduce is None or not numbers:
        return dict(numbers)
    names = sorted(numbers)
    flat = reduce(torch.cat([numbers[name].flatten() for name in names]))
    pieces = flat.split([numbers[name].numel() for name in names])
    return {name: piece.reshape(numbers[name].shape) for name, piece in zip(names, pieces, strict=True)}


def improves(value: float, best: float | None, *, greater_is_better: bool) -> bool:
    """Whether an evaluation's metric improves on the best so far; the first one that is not NaN does."""
    if math.isnan(value):
        return False
    return best is None or (value > best if greater_is_better else value < best)
