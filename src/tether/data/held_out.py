"""Holds out a share of a dataset."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def split_off(
    items: Sequence[Item], fraction: float, seed: int, same: Callable[[Item], Hashable]
) -> tuple[list[Item], list[Item]]:
    """Training items and held-out items, both in their original order; items with the same prompt are on the same side.

    Prompts are drawn by ``seed`` until ``fraction`` of the items, rounded up, is held out; at least one prompt stays.

    Args:
        same: key that is equal for items with the same prompt.
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
