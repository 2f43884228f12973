"""Products of float32 matrices by the library that is faster on this processor.

torch multiplies float32 matrices on a CPU by MKL, which leaves the wide vector units of processors that are not Intel's
unused. oneDNN, which torch has on board as well and multiplies bfloat16 with, uses them: on an AMD EPYC (Zen 5) it is
2.2 times as fast. Where there are no such units, MKL is as fast as oneDNN, but several cores take longer for x Wᵀ than
for W xᵀ when x has the few rows of a step of decoding. All of them round to float32 after each addition; the order of
additions differs.
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
"""Multiplications of a product that is oneDNN's; smaller ones take less time than it takes to call it."""

FEW_ROWS = 96
"""Rows of an input up to which a product is given to MKL the other way round; with 128 it gains nothing."""

LEAST_OF_FEW = 2**18
"""Multiplications of such a product."""


class QuickLinear(nn.Linear):
    """``nn.Linear`` whose float32 products on a CPU are oneDNN's; in every other case it is ``nn.Linear``.

        y = x Wᵀ + b        ∂x = ∂y W        ∂W = ∂yᵀ x        ∂b = Σ ∂y

    Which rows are multiplied together changes none of them, as long as the product is large enough to be oneDNN's.
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
        """x Wᵀ + b, [..., K], [N, K], [N] → [..., N], without a gradient where it is oneDNN's."""
        return (product if _is_ours(x, weight) else nn.functional.linear)(x, weight, bias)


class _Product(torch.autograd.Function):
    """x Wᵀ + b. What a frozen operand alone would need is not kept."""

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
    """``nn.Linear`` whose products of few rows are made the other way round, yᵀ = W xᵀ, in float32 on a CPU.

    With and without gradients alike, so that a pass and its update get the same numbers.
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
    """The model, its linear layers made ``QuickLinear`` or ``FewRowsLinear`` where that is faster on this machine.

    Their class alone changes: parameters, names, and what is saved stay as they are.
    """
    if (faster := QuickLinear if onednn_is_faster() else FewRowsLinear if few_rows_are_slow() else None) is not None:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = faster
    return model


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than torch's own choice: where that is MKL, and the processor
    has AVX-512 and is not Intel's. A fact of the machine and not a measurement, so that every run finds the same.

    False as well if this release of torch does not give oneDNN's product, or gives another one.
    """
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512" or is_intel():
        return False
    # Sums of small whole numbers are exact in any order.
    x, y = (torch.arange(n * n, dtype=torch.float32).reshape(n, n) % 7 - 3 for n in (40, 56))
    try:
        pairs = [(product(x, y[:, :40]), x @ y[:, :40].t()), (product(x.t(), y[:40].t()), x.t() @ y[:40])]
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@cache
def few_rows_are_slow() -> bool:
    """Whether MKL multiplies few rows faster the other way round: without AVX-512, on processors that are not Intel's.

    On two cores of an AMD EPYC (Zen 3) a step of decoding takes .6 of the time with 4 rows, .85 with 16. A fact of the
    machine, as above.
    """
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2" and not is_intel()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by oneDNN, whatever the strides, by the operator that torch.compile writes into what it compiles."""
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
    """``product`` as one operator that torch.compile leaves as it is."""
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
    """x Wᵀ + b as it is written into what is compiled."""
    is_float32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_float32 and x.device.type == "cpu":
        return _opaque(x, weight, bias)
    return nn.functional.linear(x, weight, bias)
