"""torch.compile over the layers of a model, in passes alone: decoding has shapes of its own."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tether.errors import ConfigError, ModelError
from tether.models.layers import transformer_layers

_COMPILED: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
"""The compiled forward of each layer that is to have one."""


def check_compile(key: str, device: torch.device | str) -> None:
    """Raises ``ConfigError`` if torch.compile has not here what it compiles with.

    Args:
        key: the configuration key that asks for it, for the message.
        device: where the model is to be.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        usual = ["cl"] if sys.platform == "win32" else ["g++", "clang++"]
        names = [os.environ["CXX"]] if "CXX" in os.environ else usual
        if not any(shutil.which(name) for name in names):
            raise ConfigError(f"{key}: no C++ compiler is there ({' or '.join(names)}): install one, or leave it out")
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            raise ConfigError(
                f"{key}: Python's headers are missing, which compiled code includes: install them (python3-dev on "
                "Debian and Ubuntu), or leave it out"
            )
    elif kind in ("cuda", "xpu") and "triton" not in packages_distributions():
        raise ConfigError(f"{key}: torch.compile needs the package triton on {kind}: install it, or leave it out")


def compile_layers(model: nn.Module) -> None:
    """Makes passes of the model go through torch.compile from now on, each layer for itself: layers that are alike
    share what is compiled, which the first passes of an update and of a rollout batch wait for.

    Raises:
        ModelError: the model has no layers that can be told apart.
    """
    layers = transformer_layers(model)
    if not layers:
        raise ModelError(f"train.compile: {type(model).__name__} is not built of layers; set it to false")
    for layer in layers:
        if layer not in _COMPILED:
            _COMPILED[layer] = torch.compile(layer.forward, dynamic=True)


def forward_of(layer: nn.Module) -> Callable[..., Any]:
    """What a pass calls of a layer: its compiled forward, where it is to have one."""
    return _COMPILED.get(layer, layer.forward)


@contextmanager
def compiled_layers(model: nn.Module) -> Iterator[None]:
    """Inside, forwards of the model go through the compiled layers that ``compile_layers`` was asked for, but for those
    whose forward is somebody else's by now. A backward pass may run after it."""
    layers = [layer for layer in transformer_layers(model) if layer in _COMPILED and "forward" not in vars(layer)]
    try:
        for layer in layers:
            layer.forward = _COMPILED[layer]
        yield
    finally:
        for layer in layers:
            del layer.forward
