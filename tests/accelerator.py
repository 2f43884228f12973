"""An accelerator written in Python, for tests of what a CPU alone never shows: tensors that are on different devices.

Importing this module registers the device with torch for the rest of the process, so only child processes of tests do.
A tensor on it holds an ordinary tensor, with which every operation is computed. As on a real device, an operation on
tensors of two devices raises ``RuntimeError``, except for copies, indices, and numbers without dimensions.

torch has no public way to make a device in Python: this takes an experimental one, and a few names of its dispatcher.
What it does not show: speed, memory, streams, kernels of its own, and generators on the wrong device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "abacus"
GiB = 2**30
_MAY_MIX = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
_MAY_INDEX = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}
_IN_HALF = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm")
"""Operations that autocast computes in half precision."""


class _Module:
    """What torch asks a kind of device."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Placed(Tensor):
    """A tensor on the accelerator."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> Placed:
        return Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, *args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"{self.raw}, on {NAME}"

    def __reduce_ex__(self, protocol):
        return self.raw.__reduce_ex__(protocol)

    def tolist(self):
        return self.raw.tolist()

    def storage(self):
        return self.raw.storage()

    def untyped_storage(self):
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()


def compute(operation, *args, **kwargs):
    """An operation of torch, with tensors on the accelerator among its arguments or asked for as its result.

    Raises:
        RuntimeError: its tensors are on different devices.
    """
    name = operation._schema.name
    tensors: list[Tensor] = []
    mapped(tensors.append, (args, kwargs))
    placed = [x for x in tensors if isinstance(x, Placed)]
    elsewhere = [x for x in tensors if not isinstance(x, Placed) and x.dim() > 0]
    may_index = name in _MAY_INDEX and isinstance(args[0], Placed)
    if placed and elsewhere and name not in _MAY_MIX and not may_index:
        where = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(f"{name}: wanted all tensors on the same device, got {where}")
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    is_placed = bool(placed) if asked is None else torch.device(asked).type == NAME
    if name == "aten::copy_":
        is_placed = isinstance(args[0], Placed)
    own = {id(x.raw): x for x in placed}  # in-place operations return what they were given
    args, kwargs = mapped(raw_of, (args, kwargs))
    with torch.no_grad():
        result = operation(*args, **kwargs)
    return mapped(lambda x: own[id(x)] if id(x) in own else Placed(x), result) if is_placed else result


def raw_of(x: Tensor) -> Tensor:
    """The ordinary tensor that one on the accelerator holds; any other as it is."""
    return x.raw if isinstance(x, Placed) else x


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with each tensor in its lists, tuples and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return type(value)(mapped(change, part) for part in value) if isinstance(value, list | tuple) else value


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    with torch.no_grad():
        raw_of(target).copy_(raw_of(source))
    return target


def _in_half(operation):
    """An operation whose tensors autocast converts first."""

    def computed(*args, **kwargs):
        dtype = torch.get_autocast_dtype(NAME)
        args = mapped(lambda x: x.to(dtype) if x.is_floating_point() else x, args)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operation(*args, **kwargs)

    return computed


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)
_EVERY, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_EVERY.fallback(compute, "PrivateUse1")
_ATEN.impl("_copy_from", _copied, "PrivateUse1")
_EVERY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in _IN_HALF:
    _ATEN.impl(_name, _in_half(getattr(torch.ops.aten, _name).default), "AutocastPrivateUse1")
torch.__future__.set_swap_module_params_on_conversion(True)  # modules keep their parameters, as on other devices


class _IsGenerator(type(torch.Generator)):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, _Generator)


class Generator(metaclass=_IsGenerator):
    """A generator for any device: torch knows none for one that is written in Python."""

    def __new__(cls, device: torch.device | str = "cpu"):
        return _Generator("cpu" if torch.device(device).type == NAME else device)


_Generator, torch.Generator = torch.Generator, Generator
os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)  # Accelerate and transformers look for kinds that they know
Tensor.pin_memory = lambda self, device=None: self
torch.accelerator.empty_cache = lambda: None
torch.accelerator.synchronize = lambda device=None: None
torch.accelerator.get_memory_info = lambda device=None: (8 * GiB, 16 * GiB)
