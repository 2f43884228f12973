"""Attention in half precision on a CPU: torch's own output, with a gradient computed in float32."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from transformers import GraniteConfig, GraniteForCausalLM

from tests.models.build import micro_batch
from tests.tiny import tiny_causal_lm
from tether.models import attention as module
from tether.models import forward
from tether.models.attention import LONGEST, wide_gradients
from tether.models.compiled import compile_layers
from tether.models.recompute import recomputed_layers

HALF = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
MASKS = {
    "causal": {"is_causal": True},
    "all tokens": {},
    "scaled": {"is_causal": True, "scale": 0.3},
    "bool mask": {"attn_mask": torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()},
    "float mask": {"attn_mask": torch.linspace(-3, 0, 49).view(1, 1, 7, 7)},
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A processor that is as fast in half precision as in float32, wherever the tests run."""
    monkeypatch.setattr(module, "is_x86", lambda: True)
    monkeypatch.setattr(module, "half_is_slow", lambda dtype: False)


@pytest.fixture
def widened(monkeypatch):
    """The dtypes of the operands whose gradient is to be computed in float32."""
    seen, real = [], module._Attention.apply
    monkeypatch.setattr(module._Attention, "apply", lambda *inputs: [seen.append(inputs[0].dtype), real(*inputs)][1])
    return seen


def operands(dtype, *, keys=7, heads=4, key_heads=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, 7, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8)]
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(inputs, grad=None, **options):
    output = attention(*inputs, **options)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)) if grad is None else grad
    return output.detach(), torch.autograd.grad(output, inputs, grad.to(output.dtype))


def context():
    return wide_gradients(torch.nn.Linear(1, 1).bfloat16())


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_output_is_torchs_own_and_gradients_are_those_of_float32_rounded_once(dtype, options, widened):
    inputs = operands(dtype)
    options = {key: x.to(dtype) if key == "attn_mask" and x.is_floating_point() else x for key, x in options.items()}
    exact = {key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in options.items()}
    expected, _ = gradients(inputs, **options)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    _, oracle = gradients([x.detach().double().requires_grad_() for x in inputs], grad, **exact)
    with context():
        output, found = gradients(inputs, grad, **options)
    assert widened == [dtype] and torch.equal(output, expected)
    for ours, theirs in zip(found, oracle, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=ROUNDING[dtype], atol=1e-5)


def test_shared_heads_of_keys(widened):
    inputs = operands(torch.bfloat16, key_heads=2)
    with context():
        _, found = gradients(inputs, is_causal=True, enable_gqa=True)
    _, expected = gradients([x.detach().float().requires_grad_() for x in inputs], is_causal=True, enable_gqa=True)
    assert len(widened) == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-6, atol=2e-2)  # the float32 gradient is not rounded


def test_only_wanted_gradients(widened):
    query, key, value = (x.detach() for x in operands(torch.bfloat16))
    with context():
        output = attention(query, key, value.requires_grad_())
    (found,) = torch.autograd.grad(output.sum(), [value])
    assert widened and found.shape == value.shape


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_under_autocast_operands_are_those_of_autocast(widened, options):
    inputs = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = attention(*inputs, **options)
        with context():
            output = attention(*inputs, **options)
    assert widened == [torch.bfloat16] and torch.equal(output, expected)
    (grad, *_) = torch.autograd.grad(output.float().sum(), inputs)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("keys", [LONGEST, LONGEST + 1])
def test_long_texts_only_where_half_precision_is_slow(monkeypatch, widened, keys, slow):
    monkeypatch.setattr(module, "half_is_slow", lambda dtype: slow)
    with context():
        attention(*operands(torch.bfloat16, keys=keys))
    assert len(widened) == (keys == LONGEST or slow)


def test_everything_else_is_left_to_torch(monkeypatch, widened):
    mask = torch.zeros(7, 7, dtype=torch.bfloat16, requires_grad=True)
    with context():
        attention(*operands(torch.float32))
        attention(*(x.detach() for x in operands(torch.bfloat16)))
        attention(*operands(torch.bfloat16), dropout_p=0.5)
        attention(*operands(torch.bfloat16), mask)
        with torch.no_grad():
            attention(*operands(torch.bfloat16))
    with torch.no_grad(), context():
        attention(*operands(torch.bfloat16))
    monkeypatch.setattr(module, "is_x86", lambda: False)
    with context():
        attention(*operands(torch.bfloat16))
    assert not widened


def test_models_in_float32_and_on_accelerators_are_not_watched():
    """Watching takes as long as a third of a small model's calls."""
    single = torch.nn.Linear(1, 1)
    elsewhere = [single, torch.nn.Linear(1, 1, device="meta", dtype=torch.bfloat16), torch.nn.Identity()]
    assert all(isinstance(wide_gradients(each), nullcontext) for each in elsewhere)
    with torch.autocast("cpu", torch.bfloat16):
        assert not isinstance(wide_gradients(single), nullcontext)
    assert not isinstance(context(), nullcontext)


def weights_gradient(model, contexts):
    model.zero_grad()
    ids = torch.arange(12).view(2, 6) % 11
    with contexts[0](model), contexts[1](model):
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    states.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_recomputed_layers_have_the_same_gradient(widened):
    model = tiny_causal_lm("llama").to(torch.bfloat16).eval()
    kept = weights_gradient(model, [wide_gradients, lambda model: torch.enable_grad()])
    count = len(widened)
    recomputed = weights_gradient(model, [wide_gradients, recomputed_layers])
    assert count > 0 and len(widened) == 3 * count  # in the forward pass, and again in the backward pass
    assert all(map(torch.equal, kept, recomputed))


@pytest.mark.parametrize("scaling", [1.0, 3.0])
def test_passes_that_train_have_their_gradients_that_way(widened, scaling):
    """Also where logits are the model's own, as they are not its head's alone."""
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = GraniteConfig(**shape, num_attention_heads=2, logits_scaling=scaling)
    model = GraniteForCausalLM(config).to(torch.bfloat16).eval()
    assert forward.head_matches(model) is (scaling == 1.0)
    widened.clear()
    forward.response_outputs(model, micro_batch(), temperature=1.0)
    assert widened == 2 * [torch.bfloat16]


def test_compiled_layers_are_left_alone(monkeypatch, widened):
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    compile_layers(model)
    with wide_gradients(model):
        attention(*operands(torch.bfloat16))
    assert not widened
