"""Multiplies float32 matrices with the library that is faster on this processor.

On a CPU, torch multiplies float32 matrices with MKL, which does not use the wide vector units of processors that are
not Intel's. oneDNN, which torch also includes and uses for bfloat16, does use them: on an AMD EPYC (Zen 5), it is 2.2
times as fast. Without such units, MKL is as fast as oneDNN, but on several cores x Wᵀ takes longer than W xᵀ when x has
the few rows of a decoding step. All of them round to float32 after each addition; only the order of additions differs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tether.models.device import is_intel

LEAST = 2**20
"""Minimum number of multiplications for using oneDNN; smaller products take less time than calling it."""

FEW_ROWS = 96
"""Maximum number of input rows for which MKL computes the transposed product W xᵀ; with 128 nothing is gained."""

LEAST_OF_FEW = 2**18
"""Minimum number of multiplications for the transposed product."""


class QuickLinear(nn.Linear):
    """``nn.Linear`` that computes float32 products on a CPU with oneDNN; in every other case it is ``nn.Linear``.

        y = x Wᵀ + b        ∂x = ∂y W        ∂W = ∂yᵀ x        ∂b = Σ ∂y

    As long as a product is large enough for oneDNN, a row's result does not depend on the other rows.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        if torch.compiler.is_compiling():
            return _compilable(input, self.weight, self.bias)
        if torch.is_grad_enabled() and _is_ours(input, self.weight):
            return _Product.apply(input, self.weight, self.bias)
        return self.multiply(input, self.weight, self.bias)

    @staticmethod
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b, [..., K], [N, K], [N] → [..., N], without a gradient if oneDNN computes it."""
        return (product if _is_ours(x, weight) else nn.functional.linear)(x, weight, bias)


class _Product(torch.autograd.Function):
    """x Wᵀ + b. Saves only the operands that the needed gradients depend on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _gradients(ctx, grad, product)


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


class FewRowsLinear(nn.Linear):
    """``nn.Linear`` that computes products of few rows as yᵀ = W xᵀ, in float32 on a CPU.

    This is done with and without gradients, so that scoring and update passes give the same numbers.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        x, weight, bias = input, self.weight, self.bias
        is_few = x.numel() <= FEW_ROWS * x.shape[-1] and x.numel() * len(weight) >= LEAST_OF_FEW
        if not is_few or torch.compiler.is_compiling() or not _are_float32_on_cpu(x, weight):
            return nn.functional.linear(x, weight, bias)
        y = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().contiguous()
        return (y if bias is None else y + bias).view(*x.shape[:-1], len(weight))


def with_quick_products(model: nn.Module) -> nn.Module:
    """Turns the model's linear layers into ``QuickLinear`` or ``FewRowsLinear`` if that is faster on this machine.

    Only their class changes: parameters, names, and what is saved stay the same.
    """
    if (faster := QuickLinear if onednn_is_faster() else FewRowsLinear if few_rows_are_slow() else None) is not None:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = faster
    return model


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
        pairs = [(product(x, y[:, :40]), x @ y[:, :40].t()), (product(x.t(), y[:40].t()), x.t() @ y[:40])]
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
    """x Wᵀ + b by oneDNN, for any strides, with the operator that torch.compile itself generates."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    is_large = x.numel() * len(weight) >= LEAST
    return is_large and torch.backends.mkldnn.enabled and _are_float32_on_cpu(x, weight)


def _are_float32_on_cpu(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


@torch.library.custom_op("tether::product", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def _opaque(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``product`` as a single operator that torch.compile does not change."""
    return product(x, weight, bias)


@_opaque.register_fake
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)


def _differentiated(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return _gradients(ctx, grad, lambda x, weight: _opaque(x, weight, None))


_opaque.register_autograd(_differentiated, setup_context=_keep)


def _compilable(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b as used in compiled code."""
    is_float32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_float32 and x.device.type == "cpu":
        return _opaque(x, weight, bias)
    return nn.functional.linear(x, weight, bias)
