"""Frozen copies whose weights are stored as they are used.

Under autocast a linear layer rounds its float32 weights to half precision each time it is called. Those of a frozen
model are rounded once instead: they take half the memory, no pass has to convert them, and the products are the same
bit for bit. Embeddings and norms stay in float32, in which autocast uses them.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from tether.models.products import QUICK


def frozen_copy(model: PreTrainedModel, autocast_dtype: torch.dtype | None) -> PreTrainedModel:
    """A copy of the model for forward passes under autocast.

    Args:
        autocast_dtype: the dtype that its ``rounded_weights`` get; None without autocast, where they are not rounded.
    """
    copied = copy.deepcopy(model)
    for weight in rounded_weights(copied) if autocast_dtype is not None else ():
        if weight.dtype == torch.float32:
            weight.data = weight.data.to(autocast_dtype)
    return copied


def rounded_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights and biases that autocast rounds: those of linear layers, unless another kind of module uses them too,
    as embeddings use those of a tied head."""
    by_layers: dict[nn.Parameter, None] = {}
    elsewhere: set[nn.Parameter] = set()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if type(module) in (*QUICK, *QUICK.values()):
            by_layers |= dict.fromkeys(own)
        else:
            elsewhere.update(own)
    return [weight for weight in by_layers if weight not in elsewhere]
