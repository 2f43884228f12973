"""What torch computes, operator by operator."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile


def operators(run: Callable[[], object], *, inner: bool = True, outside: str | None = None) -> Counter[str]:
    """How often ``run`` calls each of torch's own operators, such as ``aten::mm``, and enters each ``record_function``.

    Args:
        inner: whether those count that are called by other operators.
        outside: name of a ``record_function`` within which none count.
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        run()
    return Counter(
        event.name
        for event in seen.events()
        if (inner or event.cpu_parent is None) and all(each.name != outside for each in _around(event))
    )


def _around(event: Any) -> Iterator[Any]:
    """The event, and those that it happens in."""
    while event is not None:
        yield event
        event = event.cpu_parent
