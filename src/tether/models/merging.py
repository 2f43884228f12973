"""The policy's adapter merged into the weights of its base while answers are generated on a CPU, in float32.

PEFT computes  y = W x + s B A x  for each adapted layer: two small products, a scaling and a sum, a tenth of a decoding
step. For DoRA it also computes the norm of W + s B A anew for every token, which takes twice as long as the rest. While
the policy decodes, its layers multiply by the merged weight instead, computed once for all answers. In float32 the sum
is rounded like any other product, by some 1e-7 of a weight.

bfloat16 is left alone: what an adapter learns is often less than half of the distance between two neighbouring weights
there. It would be lost, and answers would come from another policy than the one that is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from tether.models.adapters import LINEAR

MOST_BYTES = 4 * 2**30
"""Maximum memory of merged weights, which exist beside those of the base; further layers compute as PEFT does."""


class MergedAdapter:
    """An adapter whose layers can be computed with merged weights. The weights of the base never change: those of a
    merged layer are others for a moment.

    Args:
        adapted: the model that has the adapter.
        adapter: PEFT's name for it; it is active whenever ``in_place`` is entered.
    """

    def __init__(self, adapted: PeftModel, adapter: str) -> None:
        self._adapted, self._adapter = adapted, adapter
        self._merged: list[_Merged] = []

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Keeps the merged weights, computed from the adapter as it is now, until the end of the context."""
        try:
            self._merged = [_merged(layer, self._adapter) for layer in _mergeable(self._adapted, self._adapter)]
            yield
        finally:
            self._merged = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Computes with the merged weights; those of the base are back on exit. Outside of ``ready``, does nothing."""
        merged = self._merged
        try:
            for each in merged:
                each.layer.get_base_layer().weight.data = each.weight
                each.layer.merged_adapters = [self._adapter]
            yield
        finally:
            for each in merged:
                each.layer.get_base_layer().weight.data = each.of_base
                each.layer.merged_adapters = []


@dataclass(frozen=True)
class _Merged:
    layer: LoraLinear
    weight: Tensor
    of_base: Tensor


def _mergeable(adapted: PeftModel, adapter: str) -> list[LoraLinear]:
    """The adapted layers whose merged weight gives the same numbers but for rounding in float32, up to ``MOST_BYTES``:
    plain linear layers on a CPU, with LoRA or DoRA, whose weight no other module uses."""
    users = Counter(id(p) for module in adapted.modules() for p in module.parameters(recurse=False))
    layers, size = [], 0
    for layer in adapted.modules():
        if type(layer) is not LoraLinear or adapter not in layer.lora_A or layer.lora_bias[adapter]:
            continue
        if adapter in layer.lora_variant and not layer.use_dora[adapter]:
            continue
        base = layer.get_base_layer()
        if not isinstance(base, LINEAR) or type(base.weight) is not nn.Parameter or users[id(base.weight)] > 1:
            continue
        if base.weight.ndim < 2:  # an engine has it in parts
            continue
        kinds = {(p.dtype, p.device.type) for p in (base.weight, *layer.lora_A[adapter].parameters())}
        size += base.weight.nbytes
        if kinds == {(torch.float32, "cpu")} and size <= MOST_BYTES:
            layers.append(layer)
    return layers


@torch.no_grad()
def _merged(layer: LoraLinear, adapter: str) -> _Merged:
    base = layer.get_base_layer()
    of_base = base.weight.data
    try:
        base.weight.data = of_base.clone()
        layer.merge(adapter_names=[adapter])
        return _Merged(layer, base.weight.data, of_base)
    finally:
        base.weight.data = of_base
        layer.merged_adapters = []
