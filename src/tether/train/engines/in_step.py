"""Forward passes of a model with sharded weights, run by all processes together although their numbers differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tether.machine.distributed import Dist
from tether.models.roles import POLICY, ModelRoles
from tether.train.engines.base import all_together


@contextmanager
def forwards_in_step(
    roles: ModelRoles,
    dist: Dist,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Within this context, all processes take part in each forward pass of the policy: those that have none left read
    a dummy token until the last one has finished.

    Before each forward pass, the processes tell each other whether there is one. An error leaves the context at once.

    Args:
        before: called before each forward pass, in every process.
        after: called after it.

    Raises:
        OutOfStep: a forward pass failed. A process that ran out of memory would retry with fewer answers, in a forward
            pass in which the others, still in the middle of theirs, do not take part.
    """
    policy = roles.role(POLICY).model
    own, forward = vars(policy).get("forward"), policy.forward

    @functools.wraps(forward)
    def together(*args: Any, **options: Any) -> Any:
        with all_together("a forward pass", dist.num_processes):
            return forward(*args, **options)

    def begin(*call: Any) -> None:
        dist.any(True)
        before()

    def end(*call: Any) -> None:
        after()

    first = policy.register_forward_pre_hook(begin, prepend=True)  # hooks of engines there must run after it
    last = policy.register_forward_hook(end)
    policy.forward = together
    try:
        yield
    finally:
        del policy.forward
        if own is not None:
            policy.forward = own
        first.remove()
        last.remove()
    _take_part(roles, dist, before, after)


@torch.no_grad()
def _take_part(roles: ModelRoles, dist: Dist, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Reads a dummy token in each forward pass of the other processes, until none has any left."""
    token = torch.zeros(1, 1, dtype=torch.long, device=dist.device)
    with roles.use(POLICY) as model:
        while dist.any(False):
            with all_together("a forward pass", dist.num_processes):
                before()
                model(input_ids=token, use_cache=False)
                after()
