"""torch.compile: layers of policy and critic in passes, but not in decoding, which has other shapes; whole judges."""

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
from tether.models.products import has_faster, least_rows

_COMPILED: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
"""The compiled forward of each layer that has one."""


def check_compile(key: str, device: torch.device | str) -> None:
    """Raises ``ConfigError`` if tools that torch.compile needs are missing.

    Args:
        key: the configuration key that asks for it, for the message.
        device: where the model will be.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        usual = ["cl"] if sys.platform == "win32" else ["g++", "clang++"]
        names = [os.environ["CXX"]] if "CXX" in os.environ else usual
        if not any(shutil.which(name) for name in names):
            raise ConfigError(f"{key}: no C++ compiler was found ({' or '.join(names)}): install one, or leave it out")
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            raise ConfigError(
                f"{key}: Python's headers, which compiled code includes, are missing: install them (python3-dev on "
                "Debian and Ubuntu), or leave it out"
            )
    elif kind in ("cuda", "xpu") and "triton" not in packages_distributions():
        raise ConfigError(f"{key}: torch.compile needs the package triton on {kind}: install it, or leave it out")


def compile_layers(model: nn.Module) -> None:
    """Makes passes of the model use torch.compile from now on, for each layer separately. Layers of the same kind share
    compiled code; the first passes of an update and of a rollout batch wait for the compilation.

    Raises:
        ModelError: the model has no distinct layers.
    """
    layers = transformer_layers(model)
    if not layers:
        raise ModelError(f"train.compile: {type(model).__name__} has no layers to compile; set it to false")
    _keep_decisions_out()
    for layer in layers:
        if layer not in _COMPILED:
            _COMPILED[layer] = torch.compile(layer.forward, dynamic=True)


def compile_whole(model: nn.Module) -> None:
    """Makes all forwards of the model use torch.compile from now on."""
    _keep_decisions_out()
    model.compile(dynamic=True)


def _keep_decisions_out() -> None:
    """Lets compiled code take what depends on the machine alone as given, instead of tracing how it is found out."""
    for decision in (has_faster, least_rows):
        torch.compiler.assume_constant_result(decision)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``compile_layers`` has compiled this layer, or layers of this model."""
    return bool(_COMPILED) and any(layer in _COMPILED for layer in transformer_layers(module))


def forward_of(layer: nn.Module) -> Callable[..., Any]:
    """The forward of a layer in a pass: the compiled one, if it has one."""
    return _COMPILED.get(layer, layer.forward)


@contextmanager
def compiled_layers(model: nn.Module) -> Iterator[None]:
    """Makes forwards of the model use the layers compiled by ``compile_layers``, except those whose forward has been
    replaced by other code. The backward pass may run after the context has ended."""
    all_layers = transformer_layers(model) if _COMPILED else ()  # to find them takes as long as a small layer
    layers = [layer for layer in all_layers if layer in _COMPILED and "forward" not in vars(layer)]
    try:
        for layer in layers:
            layer.forward = _COMPILED[layer]
        yield
    finally:
        for layer in layers:
            del layer.forward
