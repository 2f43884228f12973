"""The layers of a model, in the order in which hidden states pass through them, and the size of its embeddings."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

LAST = ("final_layer_norm", "project_out")
"""Modules that OPT registers before its layers and runs after them."""


def transformer_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers, first to last; empty for a model without such layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def num_rows(model: PreTrainedModel) -> int:
    """Number of tokens that the model has embeddings for; to be called before an engine shards them."""
    return model.get_input_embeddings().weight.shape[0]


def parameters_above(model: PreTrainedModel, num_layers: int) -> dict[str, nn.Parameter]:
    """The parameters that come after the first ``num_layers`` layers, by name; all of them for 0.

    Layers are those of the text model; a vision tower comes before them. Embeddings come before the first layer, final
    norm and language model head after the last. A head that is tied to the embeddings counts as part of them.

    Args:
        num_layers: from 0 to one less than the model has.
    """
    named = dict(model.named_parameters())
    if num_layers == 0:
        return named
    decoder = model.get_decoder()
    first = next(transformer_layers(decoder)[num_layers].parameters())
    names = list(named)
    start = next(i for i, name in enumerate(names) if named[name] is first)
    late = {p for name in LAST if getattr(decoder, name, None) is not None for p in getattr(decoder, name).parameters()}
    return {name: named[name] for i, name in enumerate(names) if i >= start or named[name] in late}
