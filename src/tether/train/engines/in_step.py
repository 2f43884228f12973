"""Forwards of a model whose weights are spread, made by all processes together though they have unequally many."""

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
    """Inside, a forward of the policy in one process is one in all of them: those that have none left read a token
    for nothing, until the last one has finished.

    Before each forward processes tell each other whether there is one. Whoever leaves by an error leaves at once.

    Args:
        before: what comes before each forward, in every process.
        after: what comes after it.

    Raises:
        OutOfStep: a forward failed. Who runs out of memory in one would try fewer answers, in a forward that the
            others, who are in the middle of theirs, do not take part in.
    """
    policy = roles.role(POLICY).model
    own, forward = vars(policy).get("forward"), policy.forward

    @functools.wraps(forward)
    def together(*args: Any, **options: Any) -> Any:
        with all_together("a forward", dist.num_processes):
            return forward(*args, **options)

    def begin(*call: Any) -> None:
        dist.any(True)
        before()

    def end(*call: Any) -> None:
        after()

    first = policy.register_forward_pre_hook(begin, prepend=True)  # engines have hooks there that are to come after it
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
    token = torch.zeros(1, 1, dtype=torch.long, device=dist.device)
    with roles.use(POLICY) as model, torch.no_grad():
        while dist.any(False):
            with all_together("a forward", dist.num_processes):
                before()
                model(input_ids=token, use_cache=False)
                after()
