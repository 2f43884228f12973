"""What torch computes, operator by operator."""

from collections import Counter
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def operators(run: Callable[[], object], *, inner: bool = True) -> Counter[str]:
    """How often ``run`` calls each of torch's own operators, such as ``aten::mm``.

    Args:
        inner: whether those count that are called by other operators.
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        run()
    return Counter(event.name for event in seen.events() if inner or event.cpu_parent is None)
