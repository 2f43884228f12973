"""Reductions against plain Python, however the entries are split over calls and processes."""

import gc
import math
import statistics
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tether.metrics.reduce import Metrics

NAN = math.nan
A, A_MASK = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[True, True, False], [True, False, False]])
B, B_MASK = torch.tensor([[11.0]]), torch.tensor([[True]])
ENTRIES = [1.0, 2.0, 6.0, 11.0]


def collect(*parts: tuple[torch.Tensor, torch.Tensor]) -> Metrics:
    metrics = Metrics()
    for values, mask in parts:
        metrics.mean("mean", values, mask)
        metrics.var("var", values, mask)
        metrics.max("max", values, mask)
        metrics.sum("sum", values[mask])
    return metrics


def test_reductions_over_uneven_parts_are_those_of_all_entries():
    results = collect((A, A_MASK), (B, B_MASK)).compute()
    assert results["mean"] == 5.0  # the mean of the parts' means would be 7
    assert results["var"] == pytest.approx(statistics.pvariance(ENTRIES), abs=1e-12)
    assert (results["max"], results["sum"]) == (11.0, 20.0)


def over_processes(processes: list[Metrics]) -> list[dict[str, float]]:
    """What each process computes, one thread a process, meeting at every collective."""
    slots: list[torch.Tensor | None] = [None] * len(processes)
    barrier = threading.Barrier(len(processes), timeout=10)

    def meet(rank: int, x: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        slots[rank] = x
        barrier.wait()
        result = combine(torch.stack(slots))
        barrier.wait()
        return result

    def compute(rank: int) -> dict[str, float]:
        return processes[rank].compute(
            reduce=lambda x: meet(rank, x, lambda all_: all_.sum(dim=0)),
            reduce_max=lambda x: meet(rank, x, lambda all_: all_.amax(dim=0)),
        )

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(compute, range(len(processes))))


def test_processes_together_give_what_one_process_gives():
    one = collect((A, A_MASK), (B, B_MASK)).compute()
    for results in over_processes([collect((A, A_MASK)), collect((B, B_MASK))]):
        assert results == pytest.approx(one, abs=1e-12)


def test_a_maximum_over_processes_needs_its_own_reduction():
    with pytest.raises(AssertionError):
        collect((A, A_MASK)).compute(reduce=lambda x: x)


def test_an_empty_part_changes_nothing():
    empty = (A, torch.zeros_like(A_MASK))
    assert collect((A, A_MASK), empty, (B, B_MASK)).compute() == collect((A, A_MASK), (B, B_MASK)).compute()


def test_parts_are_copied_from_the_device_together(monkeypatch):
    copied, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: (copied.append(x.shape[0]), cpu(x))[1])
    metrics = collect(*[(A, A_MASK), (B, B_MASK)] * 10)
    assert collect((A, A_MASK), (B, B_MASK)).compute()["mean"] == metrics.compute()["mean"]
    assert copied == [2] * 4 + [20] * 4


def test_reductions_of_nothing():
    results = collect((A, torch.zeros_like(A_MASK))).compute()
    assert math.isnan(results["mean"]) and math.isnan(results["var"])
    assert (results["max"], results["sum"]) == (-math.inf, 0.0)


def test_nan_among_the_entries_is_not_hidden():
    results = collect((A, torch.ones_like(A_MASK))).compute()
    assert all(math.isnan(x) for x in results.values())


def test_variance_far_from_zero_keeps_its_digits():
    metrics = Metrics()
    metrics.var("v", [1e9 + 1.0, 1e9 + 2.0])
    metrics.var("v", [1e9 + 6.0])
    assert metrics.compute()["v"] == pytest.approx(14 / 3, rel=1e-9)


def test_variance_of_ones_is_exactly_0():
    metrics = Metrics()
    metrics.var("v", torch.ones(3, 7))
    assert metrics.compute()["v"] == 0.0


def test_numbers_lists_bools_and_half_precision():
    metrics = Metrics()
    metrics.mean("number", 1.0)
    metrics.mean("number", 2)
    metrics.mean("list", [1.0, 2.0, 6.0])
    metrics.mean("bool", torch.tensor([True, False, False, True]))
    metrics.sum("half", torch.full((1000,), 0.1, dtype=torch.bfloat16))
    results = metrics.compute()
    assert (results["number"], results["list"], results["bool"]) == (1.5, 3.0, 0.5)
    assert results["half"] == pytest.approx(1000 * torch.tensor(0.1).bfloat16().item(), rel=1e-12)


def test_the_last_value_stands_and_names_keep_their_order():
    metrics = Metrics()
    metrics.value("lr", 3.0)
    metrics.mean("loss", 1.0)
    metrics.value("lr", 2.0)
    metrics.sum("tokens", 4.0)
    assert list(metrics.compute().items()) == [("lr", 2.0), ("loss", 1.0), ("tokens", 4.0)]


def test_a_name_has_one_reduction():
    metrics = Metrics()
    metrics.mean("x", 1.0)
    with pytest.raises(AssertionError, match="x is reduced by mean, not by max"):
        metrics.max("x", 2.0)


def test_history_is_dropped():
    metrics, hidden = Metrics(), torch.ones(3, requires_grad=True).exp()
    alive = weakref.ref(hidden)
    for add in (metrics.mean, metrics.var, metrics.max, metrics.sum):
        add(add.__name__, hidden.double())
    del hidden
    gc.collect()
    assert alive() is None
    assert metrics.compute()["mean"] == pytest.approx(math.e, rel=1e-6)


def test_processes_may_have_collected_in_another_order():
    first, second = Metrics(), Metrics()
    first.sum("a", 1.0), first.mean("b", 2.0), second.mean("b", 4.0), second.sum("a", 10.0)
    for each in over_processes([first, second]):
        assert (each["a"], each["b"]) == (11.0, 3.0)
