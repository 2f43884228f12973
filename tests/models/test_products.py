"""Linear layers whose float32 products are oneDNN's or the other way round: the same numbers and gradients, and nothing
else is changed."""

import copy

import pytest
import torch
from torch import nn

from tests.tiny import tiny_causal_lm
from tether.models import products
from tether.models.products import (
    FEW_ROWS,
    LEAST,
    LEAST_OF_FEW,
    FewRowsLinear,
    QuickLinear,
    few_rows_are_slow,
    onednn_is_faster,
    with_quick_products,
)

ROWS, K, N = 96, 128, 160
assert ROWS * K * N >= LEAST

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def layer(bias=True, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return quick(nn.Linear(K, N, bias=bias))


def quick(linear):
    linear.__class__ = QuickLinear
    return linear


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the products that are oneDNN's."""
    seen, real = [], products.product

    def counted(x, weight, bias=None):
        seen.append((x.shape, weight.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(products, "product", counted)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(ROWS, K), (4, ROWS // 4, K)])
def test_values_and_gradients_are_those_of_float64(calls, bias, shape):
    linear, x, weights = layer(bias), data(*shape).requires_grad_(), data(*shape[:-1], N, seed=2)
    (linear(x) * weights).sum().backward()
    assert len(calls) == 3
    exact = nn.Linear(K, N, bias=bias).double()
    exact.load_state_dict(linear.state_dict())
    x64 = x.detach().double().requires_grad_()
    (exact(x64) * weights).sum().backward()
    torch.testing.assert_close(linear(x).double(), exact(x64), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip((x, *linear.parameters()), (x64, *exact.parameters()), strict=True):
        assert ours.grad.dtype == torch.float32 and ours.grad.is_contiguous()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=5e-5, rtol=1e-5)


def test_rows_do_not_depend_on_their_neighbours():
    linear, x = layer(), data(4 * ROWS, K)
    with torch.no_grad():
        assert torch.equal(linear(x)[:ROWS], linear(x[:ROWS]))
        assert torch.equal(linear(x).view(4, ROWS, N), linear(x.view(4, ROWS, K)))


def test_the_same_with_and_without_gradients():
    linear, x = layer(), data(ROWS, K)
    with torch.no_grad():
        without = linear(x)
    assert torch.equal(linear(x), without)


@pytest.mark.parametrize(("weight", "of_input"), [(False, True), (True, False)])
def test_what_a_frozen_operand_alone_would_need_is_neither_kept_nor_computed(calls, weight, of_input):
    linear, x = layer(bias=False), data(ROWS, K).requires_grad_(of_input)
    linear.weight.requires_grad_(weight)
    y = linear(x)
    kept = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None]
    assert [tensor.shape for tensor in kept] == [torch.Size([ROWS, K]) if weight else torch.Size([N, K])]
    y.sum().backward()
    assert len(calls) == 2
    assert (linear.weight.grad is not None, x.grad is not None) == (weight, of_input)


@pytest.mark.parametrize("case", ["few rows", "bfloat16", "float64", "autocast", "switched off"])
def test_all_else_is_the_plain_layer(calls, monkeypatch, case):
    linear, x = layer(), data(ROWS, K)
    if case == "switched off":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    if case == "few rows":
        x = x[:8]
    elif case in ("bfloat16", "float64"):
        linear, x = linear.to(getattr(torch, case)), x.to(getattr(torch, case))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
        got, wanted = linear(x), nn.functional.linear(x, linear.weight, linear.bias)
    assert torch.equal(got, wanted) and got.dtype == wanted.dtype and calls == []


@pytest.mark.parametrize(
    ("onednn", "few_rows", "kind"),
    [(True, False, QuickLinear), (False, True, FewRowsLinear), (False, False, nn.Linear)],
)
def test_a_model_keeps_all_but_the_class_of_its_layers(monkeypatch, onednn, few_rows, kind):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: onednn)
    monkeypatch.setattr(products, "few_rows_are_slow", lambda: few_rows)
    model = tiny_causal_lm("llama", tied=True)
    before, names = copy.deepcopy(model.state_dict()), [name for name, _ in model.named_parameters()]
    assert with_quick_products(model) is model
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in layers} == {kind}
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    twin = copy.deepcopy(model)
    nn.init.zeros_(model.get_output_embeddings().weight)
    assert twin(input_ids=torch.tensor([[8, 9]])).logits.abs().max() > 0


@pytest.mark.parametrize(
    ("capability", "intel", "mkl", "faster", "few_rows"),
    [
        ("AVX512", False, True, True, False),
        ("AVX512", True, True, False, False),
        ("AVX2", False, True, False, True),
        ("AVX2", True, True, False, False),
        ("AVX512", False, False, False, False),
        ("AVX2", False, False, False, False),
    ],
)
def test_where_it_is_faster(monkeypatch, capability, intel, mkl, faster, few_rows):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(products, "is_intel", lambda: intel)
    assert (onednn_is_faster.__wrapped__(), few_rows_are_slow.__wrapped__()) == (faster, few_rows)


def test_another_or_no_product_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(products, "is_intel", lambda: False)
    assert onednn_is_faster.__wrapped__()
    monkeypatch.setattr(products, "product", lambda x, weight: x @ weight.t() + 1)
    assert not onednn_is_faster.__wrapped__()

    def missing(x, weight):
        raise AttributeError("no such operator")

    monkeypatch.setattr(products, "product", missing)
    assert not onednn_is_faster.__wrapped__()


def few(bias=True):
    linear = layer(bias)
    linear.__class__ = FewRowsLinear
    return linear


@pytest.fixture
def turned(monkeypatch):
    """The shapes of the products that are made the other way round."""
    seen, real = [], torch.mm

    def counted(weight, x):
        seen.append((weight.shape, x.shape))
        return real(weight, x)

    monkeypatch.setattr(torch, "mm", counted)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(FEW_ROWS, K), (FEW_ROWS, 1, K), (4, 5, K)])
def test_few_rows_the_other_way_round_have_the_values_and_gradients_of_float64(turned, bias, shape):
    linear, x, weights = few(bias), data(*shape).requires_grad_(), data(*shape[:-1], N, seed=2)
    y = linear(x)
    assert turned == [((N, K), (K, x[..., 0].numel()))] and y.is_contiguous()
    (y * weights).sum().backward()
    with torch.no_grad():
        assert torch.equal(linear(x), y)
    exact = nn.Linear(K, N, bias=bias).double()
    exact.load_state_dict(linear.state_dict())
    x64 = x.detach().double().requires_grad_()
    (exact(x64) * weights).sum().backward()
    torch.testing.assert_close(y.double(), exact(x64), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip((x, *linear.parameters()), (x64, *exact.parameters()), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["a row too many", "little to multiply", "bfloat16", "autocast", "no rows"])
def test_all_else_of_few_rows_is_the_plain_layer(turned, case):
    linear, x = few(), data(FEW_ROWS, K)
    if case == "a row too many":
        x = data(FEW_ROWS + 1, K)
    elif case == "little to multiply":
        x = x[: (LEAST_OF_FEW - 1) // (K * N)]
    elif case == "bfloat16":
        linear, x = linear.bfloat16(), x.bfloat16()
    elif case == "no rows":
        x = x[:0]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
        got, wanted = linear(x), nn.functional.linear(x, linear.weight, linear.bias)
    assert torch.equal(got, wanted) and got.dtype == wanted.dtype and turned == []
