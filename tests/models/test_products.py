"""Linear layers that multiply in the fastest way of a processor: the same numbers and gradients, and nothing else is
changed."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.tiny import tiny_causal_lm
from tether.models import products
from tether.models.products import (
    BLOCK,
    FEW_ROWS,
    LEAST,
    LEAST_OF_FEW,
    LEAST_ROWS,
    QuickConv1D,
    QuickLinear,
    few_rows_are_slow,
    onednn_is_faster,
    product_of_many,
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


def machine(monkeypatch, *, onednn=False, few_rows=False, slow=()):
    """A processor on which these ways are the faster ones."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: onednn)
    monkeypatch.setattr(products, "few_rows_are_slow", lambda: few_rows)
    monkeypatch.setattr(products, "half_is_slow", lambda dtype: dtype in slow)
    monkeypatch.setattr(products, "least_rows", lambda dtype: LEAST_ROWS)


def counted(monkeypatch, way):
    """The shapes of the products that are made in a way, on a processor that has been told of."""
    seen, real = [], getattr(products, way)

    def count(x, weight, bias=None):
        seen.append((x.shape, weight.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(products, way, count)
    return seen


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the products that are oneDNN's, where it is faster."""
    machine(monkeypatch, onednn=True)
    return counted(monkeypatch, "by_onednn")


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


def test_rows_do_not_depend_on_their_neighbours(calls):
    linear, x = layer(), data(4 * ROWS, K)
    with torch.no_grad():
        assert torch.equal(linear(x)[:ROWS], linear(x[:ROWS]))
        assert torch.equal(linear(x).view(4, ROWS, N), linear(x.view(4, ROWS, K)))


def test_the_same_with_and_without_gradients(calls):
    linear, x = layer(), data(ROWS, K)
    with torch.no_grad():
        without = linear(x)
    assert torch.equal(linear(x), without) and len(calls) == 2


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
    ("ways", "is_quick"),
    [
        ({"onednn": True}, True),
        ({"few_rows": True}, True),
        ({"slow": (torch.bfloat16,)}, True),
        ({"slow": (torch.float16,)}, True),
        ({}, False),
    ],
)
@pytest.mark.parametrize(("name", "plain", "quick"), [("llama", nn.Linear, QuickLinear), ("gpt2", Conv1D, QuickConv1D)])
def test_a_model_keeps_all_but_the_class_of_its_layers(monkeypatch, ways, is_quick, name, plain, quick):
    machine(monkeypatch, **ways)
    model = tiny_causal_lm(name, tied=True)
    before, names = copy.deepcopy(model.state_dict()), [name for name, _ in model.named_parameters()]
    assert with_quick_products(model) is model
    layers = [module for module in model.modules() if isinstance(module, plain)]
    assert {type(module) for module in layers} == {quick if is_quick else plain}
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
    monkeypatch.setattr(products, "by_onednn", lambda x, weight: x @ weight.t() + 1)
    assert not onednn_is_faster.__wrapped__()

    def missing(x, weight):
        raise AttributeError("no such operator")

    monkeypatch.setattr(products, "by_onednn", missing)
    assert not onednn_is_faster.__wrapped__()


@pytest.fixture
def turned(monkeypatch):
    """The shapes of the products that are made the other way round, where that is faster."""
    machine(monkeypatch, few_rows=True)
    return counted(monkeypatch, "transposed")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(FEW_ROWS, K), (FEW_ROWS, 1, K), (4, 5, K)])
def test_few_rows_the_other_way_round_have_the_values_and_gradients_of_float64(turned, bias, shape):
    linear, x, weights = layer(bias), data(*shape).requires_grad_(), data(*shape[:-1], N, seed=2)
    y = linear(x)
    assert turned == [(x.shape, (N, K))] and y.is_contiguous()
    (y * weights).sum().backward()
    assert turned[1:] == [(y.shape, (K, N))]  # the gradient of the weight has many rows
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
    linear, x = layer(), data(FEW_ROWS, K)
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


SLOW = (torch.bfloat16, torch.float16)


@pytest.fixture
def wide(monkeypatch):
    """The shapes of the products that are made in float32, where that is faster."""
    machine(monkeypatch, slow=SLOW)
    return counted(monkeypatch, "widened")


def in_half(dtype, *shape, seed):
    return data(*shape, seed=seed).to(dtype)


@pytest.mark.parametrize("dtype", SLOW)
@pytest.mark.parametrize("kind", ["linear", "without a bias", "of GPT-2"])
@pytest.mark.parametrize("block", [BLOCK, 7 * K])  # of the weight: whole, or seven rows or columns at a time
def test_half_precision_is_multiplied_in_float32_and_rounded_once(monkeypatch, wide, dtype, kind, block):
    monkeypatch.setattr(products, "BLOCK", block)
    linear = quick_conv(dtype) if kind == "of GPT-2" else layer(bias=kind == "linear").to(dtype)
    x, weights = in_half(dtype, 4, 6, K, seed=1).requires_grad_(), in_half(dtype, 4, 6, N, seed=2)
    y = linear(x)
    with torch.no_grad():
        assert torch.equal(linear(x), y)
    (y * weights).sum().backward()
    assert wide == [((4, 6, K), (N, K))] * 2 + [((4, 6, N), (K, N)), ((N, 24), (K, 24))]
    exact, x64 = copy.deepcopy(linear).double(), x.detach().double().requires_grad_()
    exact.zero_grad()
    y64 = exact(x64)
    (y64 * weights.double()).sum().backward()
    for ours, theirs in zip((y, x.grad, *(p.grad for p in linear.parameters())),
                            (y64, x64.grad, *(p.grad for p in exact.parameters())), strict=True):  # fmt: skip
        assert ours.dtype == dtype and ours.shape == theirs.shape
        step = torch.finfo(dtype).eps * theirs.abs() + 1e-4
        assert ((ours.double() - theirs).abs() <= step).all()


def quick_conv(dtype):
    conv = Conv1D(N, K)
    nn.init.normal_(conv.bias)
    conv.__class__ = QuickConv1D
    return conv.to(dtype)


def test_few_rows_and_other_types_of_a_processor_slow_in_half_precision_are_multiplied_as_ever(monkeypatch, wide):
    linear = layer()
    cases = ((torch.bfloat16, LEAST_ROWS - 1), (torch.float16, 0), (torch.float32, ROWS), (torch.float64, 9))
    for dtype, rows in cases:
        x, plain = data(rows, K).to(dtype), copy.deepcopy(linear).to(dtype)
        assert torch.equal(plain(x), nn.functional.linear(x, plain.weight, plain.bias))
    assert wide == []
    machine(monkeypatch)
    linear(data(ROWS, K)), linear.bfloat16()(in_half(torch.bfloat16, ROWS, K, seed=1))
    assert wide == []


def test_what_is_multiplied_in_float32_is_so_by_the_faster_way_for_float32(monkeypatch, wide):
    machine(monkeypatch, onednn=True, slow=SLOW)
    by_onednn = counted(monkeypatch, "by_onednn")
    layer().bfloat16()(in_half(torch.bfloat16, ROWS, K, seed=1))
    assert by_onednn == [((ROWS, K), (N, K))] and len(wide) == 1


@pytest.mark.parametrize("dtype", SLOW)
def test_autocast_multiplies_what_it_rounds(wide, dtype):
    """Operands are rounded as by autocast, and gradients come back in the types of their tensors."""
    linear, x, weights = layer(), data(ROWS, K).requires_grad_(), in_half(dtype, ROWS, N, seed=2)
    with torch.autocast("cpu", dtype=dtype):
        y = linear(x)
    (y * weights).sum().backward()
    assert y.dtype == dtype and len(wide) == 3
    twin, z = copy.deepcopy(linear).to(dtype), x.detach().to(dtype).requires_grad_()
    twin.zero_grad()
    (twin(z) * weights).sum().backward()
    assert torch.equal(y, twin(z))
    for ours, theirs in zip((x, *linear.parameters()), (z, *twin.parameters()), strict=True):
        assert ours.grad.dtype == torch.float32 and torch.equal(ours.grad, theirs.grad.float())
    x64 = x.detach().double()
    with torch.autocast("cpu", dtype=dtype):
        assert copy.deepcopy(linear).double()(x64).dtype == torch.float64  # which autocast leaves alone


def test_many_rows_alone_decide_for_a_pass(monkeypatch):
    machine(monkeypatch, few_rows=True, slow=(torch.bfloat16,))
    assert product_of_many(torch.bfloat16) is products.product
    assert product_of_many(torch.float16) is product_of_many(torch.float32) is nn.functional.linear
    machine(monkeypatch, onednn=True)
    assert product_of_many(torch.float32) is products.product
    assert product_of_many(torch.bfloat16) is product_of_many(torch.float64) is nn.functional.linear


@pytest.mark.parametrize(("units", "least"), [(True, 64), (False, LEAST_ROWS)])
def test_units_for_bfloat16_multiply_few_rows(monkeypatch, units, least):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": units})
    assert products.least_rows.__wrapped__(torch.bfloat16) == least
    assert products.least_rows.__wrapped__(torch.float16) == LEAST_ROWS


@pytest.mark.parametrize("way", [{"onednn": True}, {"few_rows": True}, {"slow": SLOW}])
@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_models_may_change_what_a_layer_returns_in_place(monkeypatch, way, is_frozen, bias):
    """As OLMo clamps queries and Gemma 3n scales its inputs."""
    machine(monkeypatch, **way)
    dtype = torch.bfloat16 if "slow" in way else torch.float32
    linear, x = layer(bias).to(dtype), in_half(dtype, 4, 12, K, seed=1).requires_grad_()
    linear.requires_grad_(not is_frozen)
    got = linear(x).clamp_(-0.5, 0.5).mul_(2)
    got.sum().backward()
    plain, z = copy.deepcopy(linear), x.detach().clone().requires_grad_()
    plain.__class__ = nn.Linear
    wanted = plain(z).clamp(-0.5, 0.5) * 2
    wanted.sum().backward()
    torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(x.grad, z.grad, atol=5e-2, rtol=5e-2)


def test_autocast_leaves_few_rows_to_torch_which_rounds_a_weight_once(monkeypatch, wide):
    linear, x = layer(), data(LEAST_ROWS - 1, K)
    ours = counted(monkeypatch, "product")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
        assert wide == ours == []
        linear(data(LEAST_ROWS, K))
    assert len(wide) == len(ours) - 1 == 1  # the second product is that of the float32 copies


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "k"), [(7, 40), (40, 7), (1, 3), (16, 16)])
def test_blocks_of_rows_and_of_columns_add_up_to_the_whole(monkeypatch, wide, n, k, bias):
    monkeypatch.setattr(products, "BLOCK", 30)
    x, weight = in_half(torch.bfloat16, 2, 5, k, seed=1), in_half(torch.bfloat16, n, k, seed=2)
    shift = in_half(torch.bfloat16, n, seed=3) if bias else None
    wanted = nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    got = products.widened(x, weight, shift)
    assert got.shape == wanted.shape and got.is_contiguous()
    assert ((got.double() - wanted).abs() <= torch.finfo(torch.bfloat16).eps * wanted.abs() + 1e-5).all()
