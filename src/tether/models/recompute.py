"""Gradient checkpointing that works in eval mode: dropout stays off, and outputs stay bitwise what they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from tether.errors import ModelError
from tether.models.compiled import forward_of
from tether.models.layers import transformer_layers


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Inside, forwards of the model keep no activations within its layers; backward computes them again.

    transformers' own switch does nothing outside train mode, where layers would apply their dropout. Leaves no trace on
    the model; a backward pass may run after it, under the adapter that was active inside.

    Raises:
        ModelError: the model has no layers that can be recomputed.
    """
    layers = transformer_layers(model)
    if not layers:
        raise ModelError(f"train.gradient_checkpointing: {type(model).__name__} does not support it; set it to false")
    overridden = {layer: vars(layer)["forward"] for layer in layers if "forward" in vars(layer)}
    try:
        for layer in layers:
            layer.forward = partial(checkpoint, forward_of(layer), use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for layer in layers:
            if layer in overridden:
                layer.forward = overridden[layer]
            else:
                vars(layer).pop("forward", None)
