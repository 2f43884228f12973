"""Gradient checkpointing that works in eval mode: dropout stays off, and outputs stay bitwise the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from tether.errors import ModelError
from tether.models.attention import wide_gradients
from tether.models.compiled import forward_of
from tether.models.layers import transformer_layers


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Makes forwards of the model store no activations within its layers; the backward pass recomputes them.

    transformers' own switch only works in train mode, in which layers would apply dropout. The model is left unchanged.
    The backward pass may run after the context has ended, with the adapter that was active inside.

    Raises:
        ModelError: the model has no layers that can be recomputed.
    """
    layers = transformer_layers(model)
    if not layers:
        raise ModelError(f"train.gradient_checkpointing: {type(model).__name__} does not support it; set it to false")
    overridden = {layer: vars(layer)["forward"] for layer in layers if "forward" in vars(layer)}
    try:
        for layer in layers:
            layer.forward = partial(
                checkpoint,
                forward_of(layer),
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=partial(_contexts, layer),
            )
        yield
    finally:
        for layer in layers:
            if layer in overridden:
                layer.forward = overridden[layer]
            else:
                vars(layer).pop("forward", None)


def _contexts(layer: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """What the layer runs in: in the forward pass, and again in the backward pass."""
    return wide_gradients(layer), wide_gradients(layer)
