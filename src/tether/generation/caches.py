"""What a model's cache allows, and caches that save work in decoding."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

CUTTABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that hold keys and values alone, so that padding can be masked; a recurrent state has already read the
padding and cannot be masked."""
ROOM = 64
"""Least number of tokens that a layer has room for when it moves into larger tensors."""
WIDTHS = 64
"""Widths of fixed-size caches are multiples of this, so that few sizes have to be compiled for."""


class RoomyLayer(DynamicLayer):
    """Keys and values with spare room behind them; ``DynamicLayer`` copies everything it holds for every token.

    Args:
        layer: a layer that has read something, whose tensors are taken over.
    """

    def __init__(self, layer: DynamicLayer) -> None:
        super().__init__()
        self.device, self.is_initialized = layer.device, True
        self._move(layer.keys, layer.values)

    def update(
        self, key_states: Float[Tensor, "M H Q D"], value_states: Float[Tensor, "M H Q E"], *args: Any, **kwargs: Any
    ) -> tuple[Float[Tensor, "M H K D"], Float[Tensor, "M H K E"]]:
        """Appends keys and values; returns all of them."""
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._places[0].shape[-2]:
            self._move(self.keys, self.values, more=end - start)
        for place, states in zip(self._places, (key_states, value_states), strict=True):
            place[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Int[Tensor, " N"]) -> None:
        """Keeps these rows, in this order."""
        self._move(self.keys[beam_idx], self.values[beam_idx])

    def _move(self, *held: Float[Tensor, "M H K _"], more: int = 0) -> None:
        length = held[0].shape[-2]
        room = length + more + max(ROOM, length // 4)
        self._places = [x.new_empty(*x.shape[:2], room, x.shape[-1]) for x in held]
        for place, x in zip(self._places, held, strict=True):
            place[:, :, :length] = x
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = (place[:, :, :length] for place in self._places)


def give_room(cache: Any) -> None:
    """Replaces those layers of a cache that would copy everything they hold for every token by ``RoomyLayer``."""
    if isinstance(cache, Cache) and hasattr(cache, "layers"):
        cache.layers = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]


def cuttable(cache: Any) -> bool:
    """Whether a cache holds keys and values alone, so that padding can be masked."""
    layers = getattr(cache, "layers", None)  # an encoder-decoder cache has two caches in place of layers
    return isinstance(cache, Cache) and layers is not None and all(type(layer) in CUTTABLE_LAYERS for layer in layers)


class StaticCaches:
    """Caches of fixed size, one at a time. The last one is reused where it has room, as CUDA graphs are bound to its
    address.

    Args:
        compiles: whether the forward of one token is compiled.
    """

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles
        self._last: tuple[tuple[int, int], StaticCache] | None = None

    def width(self, rows: int, longest: int) -> int:
        """The width of a cache for ``rows`` texts of up to ``longest`` tokens: the last one's where that has room."""
        if self._last is not None:
            (last_rows, last_width), _ = self._last
            if last_rows == rows and last_width >= longest:
                return last_width
        return -(-longest // WIDTHS) * WIDTHS

    def empty(self, model: PreTrainedModel, rows: int, width: int) -> StaticCache:
        """A cache for ``rows`` texts, as wide as ``width`` said, that has read nothing."""
        size = (rows, width)
        if self._last is None or self._last[0] != size:
            self._last = None  # before there is another
            self._last = (size, StaticCache(config=model.config, max_cache_len=width))
        else:
            self._last[1].reset()
        return self._last[1]
