"""A share of a dataset that is held out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def split_off(
    items: Sequence[Item], fraction: float, seed: int, same: Callable[[Item], Hashable]
) -> tuple[list[Item], list[Item]]:
    """Items to train on and held-out items, both in their order; items of one prompt are all on the same side.

    Prompts are drawn by ``seed`` until ``fraction`` of the items, rounded up, is held out; at least one prompt stays.

    Args:
        same: what an item's prompt is told from others by.
    """
    sizes = Counter(map(same, items))
    prompts = list(sizes)
    random.Random(seed).shuffle(prompts)
    held_out: set[Hashable] = set()
    num_held_out = 0
    for prompt in prompts[:-1]:
        if num_held_out >= fraction * len(items):
            break
        held_out.add(prompt)
        num_held_out += sizes[prompt]
    train = [item for item in items if same(item) not in held_out]
    return train, [item for item in items if same(item) in held_out]
