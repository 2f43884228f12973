"""Frozen weights that wait on the CPU while they are not in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def has_own_memory(device: torch.device) -> bool:
    """Whether the device has memory separate from the CPU's."""
    return device.type not in ("cpu", "mps")


class Offloaded:
    """Modules whose weights are on the CPU, and on the device inside ``with offloaded.fetched():``.

    The weights must not change, as they are only copied to the device: afterwards, the modules use the original tensors
    on the CPU again.
    """

    def __init__(self, *modules: nn.Module, device: torch.device) -> None:
        tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
        self._device, self._depth = device, 0
        self._waiting = [(tensor, self._kept(tensor.data)) for tensor in tensors.values()]
        self._send_back()

    @contextmanager
    def fetched(self) -> Iterator[None]:
        """Keeps the weights on the device. May be nested: they are copied only once."""
        self._depth += 1
        try:
            if self._depth == 1:
                for tensor, kept in self._waiting:
                    tensor.data = kept.to(self._device, non_blocking=True, copy=True)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._send_back()

    def _send_back(self) -> None:
        for tensor, kept in self._waiting:
            tensor.data = kept

    def _kept(self, tensor: Tensor) -> Tensor:
        """The tensor on the CPU, in pinned memory if the device is CUDA."""
        tensor = tensor.cpu()
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
