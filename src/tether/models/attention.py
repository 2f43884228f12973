"""Attention in half precision on a CPU, with a gradient computed in float32, which is faster there.

torch computes the gradient of attention as many small matrix products, one after the other. In half precision each of
them costs more to start than it takes to multiply. On an Intel Xeon with AMX, whose large bfloat16 products are six
times as fast as those in float32, the gradient for 8 texts of 73 tokens takes 21 ms in bfloat16; computing attention
anew in float32 and then its gradient takes 6. Without AVX-512 the same is true of texts of any length.

The output itself is torch's own, so that passes with and without a gradient give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tether.errors import ConfigError
from tether.models.compiled import is_compiled
from tether.models.device import HALF, half_is_slow, is_x86

LONGEST = 192
"""Maximum number of keys up to which the gradient is faster in float32 on every processor."""


def check_kernel(kernel: str | None, device: torch.device) -> None:
    """Raises ``ConfigError`` if ``model.attn_implementation`` names a kernel without a gradient on the device."""
    if kernel == "flex_attention" and device.type == "cpu":
        raise ConfigError(
            "model.attn_implementation: got flex_attention, which torch does not train on a CPU; wanted sdpa or eager, "
            "or an accelerator"
        )


def wide_gradients(module: nn.Module) -> AbstractContextManager:
    """A context in which the attention of a model or layer has its gradient computed in float32, if that is faster.

    A layer that is recomputed during the backward pass has to run in it as well. Compiled layers are left alone.
    """
    is_wanted = torch.is_grad_enabled() and is_x86() and _is_half(module) and not is_compiled(module)
    return _WideGradients() if is_wanted else nullcontext()


def _is_half(module: nn.Module) -> bool:
    """Whether a module computes in half precision on the CPU: elsewhere, watching every call would only take time."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is None or first.device.type != "cpu":
        return False
    return first.dtype in HALF or (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in HALF)


class _WideGradients(TorchFunctionMode):
    """Replaces torch's attention where ``_attend`` may."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return _attend(*args, **kwargs) if func is scaled_dot_product_attention else func(*args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """torch's ``scaled_dot_product_attention``, whose parameters these are."""
    inputs = (query, key, value)
    if torch.is_autocast_enabled("cpu") and query.device.type == "cpu" and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
        inputs = tuple(x.to(dtype) for x in inputs)
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    is_plain = dropout_p == 0.0 and (attn_mask is None or not attn_mask.requires_grad)
    if needs_gradient and is_plain and all(map(_is_slow, inputs)):
        return _Attention.apply(*inputs, attn_mask, {"is_causal": is_causal, **options})
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _is_slow(x: Tensor) -> bool:
    """Whether torch is slow at the gradient of attention with this operand."""
    return x.device.type == "cpu" and x.dtype in HALF and (x.shape[-2] <= LONGEST or half_is_slow(x.dtype))


class _Attention(torch.autograd.Function):
    """Attention in the type of its operands, without dropout."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.options = options
        with torch.autocast("cpu", enabled=False):
            return scaled_dot_product_attention(query, key, value, mask, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mask = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            wide = [x.detach().float().requires_grad_(needs) for x, needs in zip(inputs, needed, strict=True)]
            mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
            output = scaled_dot_product_attention(*wide, mask, **ctx.options)
        found = iter(torch.autograd.grad(output, [x for x in wide if x.requires_grad], grad.float()))
        return (*(next(found).to(grad.dtype) if needs else None for needs in needed), None, None)
