"""Multiplies matrices on a CPU in the way that is fastest on this processor.

float32: torch uses MKL, which does not use the wide vector units of processors that are not Intel's. oneDNN, which
torch also includes and uses for bfloat16, does use them: on an AMD EPYC (Zen 5), it is 2.2 times as fast. Without such
units, MKL is as fast as oneDNN, but on several cores x Wᵀ takes longer than W xᵀ when x has the few rows of a decoding
step. All of them round to float32 after each addition; only the order of additions differs.

bfloat16 and float16: processors without fast units for a type multiply it more slowly than float32. For bfloat16,
Intel's without AMX take twice as long, those without AVX-512 seven times as long in a forward pass and thirty times in
a backward pass. There, both operands are converted to float32, block by block, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from tether.models.device import HALF, half_is_slow, is_intel

LEAST = 2**20
"""Minimum number of multiplications for using oneDNN; smaller products take less time than calling it."""

FEW_ROWS = 96
"""Maximum number of input rows for which MKL computes the transposed product W xᵀ; with 128 nothing is gained."""

LEAST_OF_FEW = 2**18
"""Minimum number of multiplications for the transposed product."""

LEAST_ROWS, LEAST_ROWS_BESIDE_UNITS = 5, 64
"""Minimum number of input rows for which half precision is converted to float32: on processors without units for it,
and on those with slow ones."""

BLOCK = 2**20
"""Maximum number of weights that are converted to float32 at a time: the copy stays in the processor's cache."""


class QuickLinear(nn.Linear):
    """``nn.Linear`` that multiplies on a CPU in the fastest way; in every other case it is ``nn.Linear``.

        y = x Wᵀ + b        ∂x = ∂y W        ∂W = ∂yᵀ x        ∂b = Σ ∂y

    It gives the same numbers with and without gradients, which cannot be differentiated again. As long as a float32
    product is large enough for oneDNN, a row's result does not depend on the other rows.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        y = _quick(input, self.weight, self.bias)
        return super().forward(input) if y is None else y


class QuickConv1D(Conv1D):
    """The linear layer of GPT-2, whose weight is transposed, in the way of ``QuickLinear``."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        y = _quick(x, self.weight.t(), self.bias)
        return super().forward(x) if y is None else y


QUICK: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuickLinear, Conv1D: QuickConv1D}


def with_quick_products(model: nn.Module) -> nn.Module:
    """Turns the model's linear layers into those of ``QUICK`` if that is faster on this machine.

    Only their class changes: parameters, names, and what is saved stay the same.
    """
    if any(map(has_faster, (torch.float32, *HALF))):
        for module in model.modules():
            if (quick := QUICK.get(type(module))) is not None:
                module.__class__ = quick
    return model


def with_plain_products(model: nn.Module) -> nn.Module:
    """Undoes ``with_quick_products``: some of PEFT's methods take layers of torch's own class alone."""
    plain = {quick: kind for kind, quick in QUICK.items()}
    for module in model.modules():
        if (kind := plain.get(type(module))) is not None:
            module.__class__ = kind
    return model


def has_faster(dtype: torch.dtype) -> bool:
    """Whether this CPU has a faster way than torch's own to multiply some matrices of this dtype."""
    return product_of_many(dtype) is product or (dtype == torch.float32 and few_rows_are_slow())


def product_of_many(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """``product`` if it is faster on a CPU for matrices of many rows and this dtype, otherwise torch's own."""
    is_faster = onednn_is_faster() if dtype == torch.float32 else dtype in HALF and half_is_slow(dtype)
    return product if is_faster else nn.functional.linear


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than torch's default: if that is MKL, and the processor has
    AVX-512 and is not Intel's. Depends only on the machine, not on a measurement, so that every run decides the same.

    Also False if this release of torch has no oneDNN product, or one with different results.
    """
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512" or is_intel():
        return False
    # Sums of small integers are exact in any order.
    x, y = (torch.arange(n * n, dtype=torch.float32).reshape(n, n) % 7 - 3 for n in (40, 56))
    try:
        pairs = [(by_onednn(x, y[:, :40]), x @ y[:, :40].t()), (by_onednn(x.t(), y[:40].t()), x.t() @ y[:40])]
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@cache
def few_rows_are_slow() -> bool:
    """Whether MKL computes W xᵀ faster for few rows: without AVX-512, on processors that are not Intel's.

    On two cores of an AMD EPYC (Zen 3), a decoding step takes 0.6 of the time with 4 rows, 0.85 with 16. Depends only
    on the machine, as above.
    """
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2" and not is_intel()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b in the fastest way, [..., K], [N, K], [N] → [..., N], for any strides and without a gradient."""
    if x.dtype != weight.dtype or x.device.type != "cpu" or weight.device.type != "cpu":
        return nn.functional.linear(x, weight, bias)
    rows, multiplications = x.numel() // max(1, x.shape[-1]), x.numel() * len(weight)
    if x.dtype == torch.float32:
        if onednn_is_faster():
            if multiplications >= LEAST and torch.backends.mkldnn.enabled:
                return by_onednn(x, weight, bias)
        elif few_rows_are_slow() and rows <= FEW_ROWS and multiplications >= LEAST_OF_FEW:
            return transposed(x, weight, bias)
    elif x.dtype in HALF and half_is_slow(x.dtype) and rows >= least_rows(x.dtype):
        return widened(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b in float32 by oneDNN, for any strides, with the operator that torch.compile itself generates."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by way of yᵀ = W xᵀ."""
    y = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().contiguous()
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], len(weight))


def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of operands in half precision: multiplied and added in float32, and rounded once."""
    (n, k), rows = weight.shape, x.reshape(-1, x.shape[-1])
    shift = None if bias is None else bias.float()
    if n >= k or weight.numel() <= BLOCK:
        y, wide, step = rows.new_empty(len(rows), n), rows.float(), max(1, BLOCK // max(1, k))
        for start in range(0, n, step):
            part = slice(start, start + step)
            y[:, part] = product(wide, weight[part].float(), None if shift is None else shift[part])
    else:
        total, step = torch.zeros(len(rows), n), max(1, BLOCK // n)
        for start in range(0, k, step):
            part = slice(start, start + step)
            total += product(rows[:, part].float(), weight[:, part].float())
        y = (total if shift is None else total.add_(shift)).to(x.dtype)
    return y.view(*x.shape[:-1], n)


@cache
def least_rows(dtype: torch.dtype) -> int:
    """Minimum number of input rows for which ``widened`` saves time."""
    has_units = dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("avx512_bf16", False)
    return LEAST_ROWS_BESIDE_UNITS if has_units else LEAST_ROWS


def _quick(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x Wᵀ + b by ``product``, with a gradient, in the dtype that autocast would choose; None if torch's own way is
    the only one."""
    if x.device.type != "cpu" or weight.device.type != "cpu":
        return None
    has_autocast = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if has_autocast else weight.dtype
    if not has_faster(dtype) or not (has_autocast or x.dtype == weight.dtype):
        return None
    if has_autocast and dtype in HALF and x.numel() < least_rows(dtype) * x.shape[-1]:
        return None  # autocast rounds a weight once for many calls
    with torch.autocast("cpu", enabled=False):
        x, weight, bias = (None if each is None else each.to(dtype) for each in (x, weight, bias))
        if torch.compiler.is_compiling():
            return _opaque(x, weight, bias)
        return _Product.apply(x, weight, bias) if torch.is_grad_enabled() else product(x, weight, bias)


class _Product(torch.autograd.Function):
    """x Wᵀ + b. Saves only the operands that the needed gradients depend on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _keep(ctx, (x, weight, bias), None)
        y = product(x, weight, bias)
        return y.new_empty(0).set_(y)  # no view, so that a model may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        with torch.autocast("cpu", enabled=False):
            return _gradients(ctx, grad, product)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor | None) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)


def _gradients(
    ctx: Any, grad: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = of_weight = of_bias = None
    if weight is not None:
        of_x = multiply(grad, weight.t())
    if x is not None:
        of_weight = multiply(rows.t(), x.reshape(-1, x.shape[-1]).t())
    if ctx.needs_input_grad[2]:
        of_bias = rows.sum(dim=0)
    return of_x, of_weight, of_bias


@torch.library.custom_op("tether::product", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def _opaque(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``product`` as a single operator that torch.compile does not change."""
    return product(x, weight, bias)


@_opaque.register_fake
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _differentiated(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return _gradients(ctx, grad, lambda x, weight: _opaque(x, weight, None))


_opaque.register_autograd(_differentiated, setup_context=_keep)
