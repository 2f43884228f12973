"""The head that maps a hidden state to a scalar, and its names in other projects' checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tether.errors import ModelError
from tether.models.paths import ADAPTER_CONFIG, some_of

VALUE_HEAD_FILES = ("value_head.safetensors", "value_head.bin")
"""Files in which LLaMA-Factory saves the head of a reward model, beside the language model or its adapter."""
BESIDE_ADAPTER = "pytorch_model.bin"
"""The file in which TRL saves the head of a model with a value head, beside the model's adapter."""
HEAD_NAMES = ("score", "v_head", "v_head.summary", "value_head", "value_head.summary", "reward_head")
"""Modules that hold the head in checkpoints of transformers, TRL, LLaMA-Factory, OpenRLHF and others."""


class ScalarHead(nn.Linear):
    """Maps each hidden state to a scalar, in the head's own dtype regardless of the trunk's dtype and autocast.

    A drop-in replacement for the ``score`` module of a transformers sequence classifier.
    """

    def __init__(self, hidden_size: int, *, bias: bool = False) -> None:
        """Initializes the head to always output 0."""
        super().__init__(hidden_size, 1, bias=bias, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows 1"]:
        """Computes the scalar for each hidden state."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def head_from(tensors: Mapping[str, Tensor], hidden_size: int, source: str) -> ScalarHead:
    """The scalar head among the tensors of a checkpoint, including its bias if it has one.

    Args:
        tensors: name → tensor; may include tensors other than the head's.
        source: the checkpoint, for messages.

    Raises:
        ModelError: no tensor or more than one could be the head's weight, or its shape is wrong.
    """
    found = [name for name in HEAD_NAMES if f"{name}.weight" in tensors]
    if len(found) != 1:
        held = some_of(sorted(tensors)) or "nothing"
        got = f"several heads: {', '.join(found)}" if found else f"no head; it holds {held}"
        raise ModelError(
            f"{source}: {got}. Wanted one scalar head under one of the names {', '.join(HEAD_NAMES)}: "
            "a model trained as a sequence classifier with num_labels=1"
        )
    weight, bias = tensors[f"{found[0]}.weight"], tensors.get(f"{found[0]}.bias")
    if weight.shape != (1, hidden_size):
        raise ModelError(
            f"{source}: {found[0]}.weight has shape {list(weight.shape)}, wanted [1, {hidden_size}]: "
            "a reward model has one label and the hidden size of its trunk"
        )
    head = ScalarHead(hidden_size, bias=bias is not None)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head


def with_bias(head: ScalarHead) -> ScalarHead:
    """A head with the same outputs that has a bias."""
    if head.bias is not None:
        return head
    return head_from({"score.weight": head.weight, "score.bias": torch.zeros(1)}, head.in_features, "the head")


def is_head_key(name: str) -> bool:
    """Whether ``name`` is the name of a head's weight or bias."""
    return name.rpartition(".")[0] in HEAD_NAMES


def value_head_file(folder: Path | str) -> Path | None:
    """The file in ``folder`` that holds a value head separately from its model, if there is one."""
    names = (*VALUE_HEAD_FILES, *([BESIDE_ADAPTER] if (Path(folder) / ADAPTER_CONFIG).is_file() else []))
    return next((Path(folder) / name for name in names if (Path(folder) / name).is_file()), None)


def read_value_head(folder: Path | str) -> dict[str, Tensor]:
    """Reads the tensors of the value head beside a model; from a pickle, only tensors are loaded.

    Raises:
        ModelError: there is no such file, or it cannot be read.
    """
    file = value_head_file(folder)
    if file is None:
        raise ModelError(no_value_head(folder))
    try:
        tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        return dict(tensors)
    except (OSError, RuntimeError, TypeError, ValueError, UnpicklingError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from error


def no_value_head(folder: Path | str) -> str:
    """Message that says which file is missing, and what writes it."""
    return (
        f"{folder}: {' or '.join(VALUE_HEAD_FILES)} is missing, so the reward model has no head. "
        "`llamafactory-cli train FILE.yaml` with `stage: rm` writes it into its output_dir and into each "
        "checkpoint-N; name a folder that has it, or train a reward model with `tether reward` and use type model"
    )
