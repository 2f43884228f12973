"""Selected log-probabilities against sums in plain Python, and what the chunks must not change."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from tether.algo import LinearHead, linear_logprobs, logprobs_from_logits, selected_logprobs
from tether.algo import logprobs as module

N, D, V = 7, 4, 5


def by_any_head(hidden, weight, targets, **how):
    return selected_logprobs(hidden, lambda h: h @ weight.T, targets, **how)


def by_linear_head(hidden, weight, targets, **how):
    return linear_logprobs(hidden, LinearHead(weight), targets, **how)


BOTH = pytest.mark.parametrize("of_head", [by_any_head, by_linear_head])


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=generator)
    return hidden, weight, targets


def softmax(row: list[float], temperature: float) -> list[float]:
    weights = [math.exp(z / temperature) for z in row]
    return [w / sum(weights) for w in weights]


@BOTH
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_by_their_definitions(case, temperature, of_head):
    hidden, weight, targets = case
    logits = (hidden @ weight.T).tolist()
    logprobs, entropy = of_head(hidden, weight, targets, temperature=temperature, with_entropy=True)
    for n in range(N):
        probs = softmax(logits[n], temperature)
        assert logprobs[n].item() == pytest.approx(math.log(probs[targets[n]]), abs=1e-12)
        assert entropy[n].item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-12)


@BOTH
@pytest.mark.parametrize("chunk_size", [1, 3, 256])
def test_gradient_is_one_hot_minus_softmax_over_temperature(case, chunk_size, of_head):
    hidden, weight, targets = case
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, _ = of_head(hidden, weight, targets, temperature=0.7, chunk_size=chunk_size)
    logprobs.sum().backward()
    for n in range(N):
        probs = softmax((hidden[n] @ weight.T).tolist(), 0.7)
        errors = [((v == targets[n].item()) - probs[v]) / 0.7 for v in range(V)]
        for d in range(D):
            wanted = sum(errors[v] * weight[v, d].item() for v in range(V))
            assert hidden.grad[n, d].item() == pytest.approx(wanted, abs=1e-12)
    assert weight.grad.sum(0).abs().max() < 1e-12  # a softmax does not feel a shift of all logits


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_expectations_over_the_vocabulary(temperature):
    """Probabilities add up to 1, the mean surprise is the entropy, the mean gradient of a log-probability is 0."""
    logits = torch.tensor([[0.3, -2.0, 1.1, 0.0]] * 4, dtype=torch.float64, requires_grad=True)
    logprobs, entropy = logprobs_from_logits(logits, torch.arange(4), temperature=temperature, with_entropy=True)
    probs = logprobs.detach().exp()
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-14)
    assert entropy.tolist() == pytest.approx([-(probs * logprobs).sum().item()] * 4, abs=1e-14)
    score = torch.autograd.grad((probs * logprobs).sum(), logits, retain_graph=True)[0].sum(0)
    assert score.tolist() == pytest.approx([0.0] * 4, abs=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_the_entropy_by_its_definition(temperature):
    """∂H / ∂z_v = −π_v (log π_v + H) / temperature"""
    row = [0.3, -2.0, 1.1, 0.0]
    logits = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    _, entropy = logprobs_from_logits(logits, torch.tensor([0]), temperature=temperature, with_entropy=True)
    entropy.sum().backward()
    probs = softmax(row, temperature)
    total = -sum(p * math.log(p) for p in probs)
    wanted = [-p * (math.log(p) + total) / temperature for p in probs]
    assert logits.grad[0].tolist() == pytest.approx(wanted, abs=1e-14)


def test_temperature_1_of_divided_logits_and_shifts_of_all_change_nothing(case):
    hidden, weight, targets = case
    logits = hidden @ weight.T
    wanted = logprobs_from_logits(logits, targets, temperature=0.7, with_entropy=True)
    for same in (logits / 0.7, logits / 0.7 + 30):
        got = logprobs_from_logits(same, targets, temperature=1.0, with_entropy=True)
        assert all(torch.allclose(a, b, atol=1e-13, rtol=0) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("at_once", [1, 2 * V, 3 * V])
def test_chunks_of_given_logits_change_nothing_and_nothing_else_of_their_size_is_kept(
    case, monkeypatch, at_once, with_entropy
):
    """For models that change their logits, whose log-probabilities would take twice the memory of bfloat16 logits."""
    hidden, weight, targets = case
    kept = []

    def outputs():
        logits = (hidden @ weight.T).requires_grad_()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: [kept.append(x), x][1], lambda x: x):
            out = logprobs_from_logits(logits, targets, temperature=0.7, with_entropy=with_entropy)
        assert [x.data_ptr() for x in kept if x is not None and x.numel() >= N * V] == [logits.data_ptr()]
        total = sum((x * torch.linspace(1, 2, N)).sum() for x in out if x is not None)
        return [x for x in out if x is not None] + list(torch.autograd.grad(total, logits))

    whole = outputs()
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    assert all(map(torch.equal, outputs(), whole))


def test_a_uniform_row_by_hand():
    logprobs, entropy = logprobs_from_logits(
        torch.full((1, 8), 3.0, dtype=torch.float64), torch.tensor([5]), temperature=0.5, with_entropy=True
    )
    assert [logprobs.item(), entropy.item()] == pytest.approx([-math.log(8), math.log(8)], abs=1e-14)


@BOTH
def test_a_row_that_is_not_a_number_stays_alone(case, of_head):
    hidden, weight, targets = case
    clean = of_head(hidden, weight, targets, temperature=1.0, with_entropy=True)
    dirty = hidden.clone()
    dirty[2] = math.nan
    got = of_head(dirty, weight, targets, temperature=1.0, with_entropy=True)
    others = [0, 1, 3, 4, 5, 6]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(got, clean, strict=True))


@BOTH
def test_gradient_of_the_entropy_by_finite_differences(case, of_head):
    hidden, weight, targets = case

    def entropy(h):
        options = {"temperature": 0.7, "chunk_size": 3, "with_entropy": True}
        return of_head(h, weight, targets, **options)[1]

    assert torch.autograd.gradcheck(entropy, hidden.requires_grad_())


@BOTH
def test_chunks_change_nothing(case, of_head):
    hidden, weight, targets = case
    whole = logprobs_from_logits(hidden @ weight.T, targets, temperature=1.0, with_entropy=True)
    for chunk_size in (1, 3, N):
        parts = of_head(hidden, weight, targets, temperature=1.0, chunk_size=chunk_size, with_entropy=True)
        assert all(torch.allclose(a, b, atol=1e-14, rtol=0) for a, b in zip(parts, whole, strict=True))


@BOTH
def test_no_tokens_give_no_logprobs(case, of_head):
    hidden, weight, targets = case
    logprobs, entropy = of_head(hidden[:0], weight, targets[:0], temperature=1.0, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)


def test_no_logits_outlive_their_chunk(case):
    hidden, weight, targets = case
    alive, rows, saved = [], [], []

    def head(h):
        assert not any(ref() is not None for ref in alive)
        logits = h @ weight.T
        alive.append(weakref.ref(logits))
        rows.append(len(h))
        return logits

    def record(x):
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        logprobs, _ = selected_logprobs(hidden.requires_grad_(), head, targets, temperature=1.0, chunk_size=3)
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    assert not {(3, V), (2, V)} & set(saved)  # nothing of the vocabulary's width waits for the backward pass
    assert rows == [2, 2, 3]
    logprobs.sum().backward()
    assert sorted(rows) == [2, 2, 2, 2, 3, 3]  # where each chunk is computed once more


@BOTH
def test_with_and_without_grad_agree_bitwise(case, of_head):
    hidden, weight, targets = (x.float() if x.is_floating_point() else x for x in case)
    with torch.no_grad():
        old, _ = of_head(hidden, weight, targets, temperature=0.7, chunk_size=3)
    new, _ = of_head(hidden.requires_grad_(), weight, targets, temperature=0.7, chunk_size=3)
    assert torch.equal(old, new)


@BOTH
def test_entropy_is_left_out_unless_asked_for(case, of_head):
    hidden, weight, targets = case
    assert of_head(hidden, weight, targets, temperature=1.0)[1] is None


def test_huge_and_infinite_logits():
    logits = torch.tensor([[1e4, 1e4, -math.inf]], dtype=torch.float64, requires_grad=True)
    logprobs, entropy = logprobs_from_logits(logits, torch.tensor([0]), temperature=1.0, with_entropy=True)
    assert logprobs.item() == pytest.approx(-math.log(2), abs=1e-12)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-11)
    (logprobs + entropy).sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([0.5, -0.5, 0.0], abs=1e-11)  # the entropy is at its maximum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_reduced_in_float32(dtype):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).to(dtype)
    logprobs, entropy = logprobs_from_logits(logits, torch.tensor([1]), temperature=0.7, with_entropy=True)
    probs = softmax([0.0, 1.0, 2.0, 3.0], 0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.item() == pytest.approx(math.log(probs[1]), abs=1e-6)
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-6)


@pytest.mark.parametrize("chunk_size", [2, 3, 256])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_linear_head_has_the_gradients_of_its_whole_logits(case, chunk_size, with_entropy):
    hidden, weight, targets = case
    bias = torch.linspace(-1, 1, V, dtype=torch.float64)
    factors = torch.linspace(-2, 3, N, dtype=torch.float64)

    def gradients(outputs):
        logprobs, entropy = outputs(*(leaves := [x.clone().requires_grad_() for x in (hidden, weight, bias)]))
        loss = (factors * logprobs).sum()
        if with_entropy:
            loss = loss + (factors.flip(0) * entropy).sum()
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    options = {"temperature": 0.7, "with_entropy": with_entropy}
    whole = gradients(lambda h, w, b: logprobs_from_logits(h @ w.T + b, targets, **options))
    chunks = gradients(lambda h, w, b: linear_logprobs(h, LinearHead(w, b), targets, chunk_size=chunk_size, **options))
    assert all(torch.allclose(a, b, atol=1e-13, rtol=0) for a, b in zip(chunks, whole, strict=True))


def test_a_product_that_cannot_be_written_onto_others_is_added_in_parts(case, monkeypatch):
    hidden, weight, targets = case
    shapes = []

    def multiply(x, weight, bias):
        shapes.append((*x.shape, len(weight)))
        return nn.functional.linear(x, weight, bias)

    def gradient(head):
        logprobs, _ = linear_logprobs(hidden, head, targets, temperature=0.7, chunk_size=N)
        return torch.autograd.grad(logprobs.sum(), head.weight)[0]

    monkeypatch.setattr(module, "SUMMED_AT_ONCE", 2 * D)
    weight.requires_grad_()
    got = gradient(LinearHead(weight, multiply=multiply))
    assert torch.allclose(got, gradient(LinearHead(weight)), atol=1e-14, rtol=0)
    assert shapes == [(N, D, V), (2, N, D), (2, N, D), (1, N, D)]  # logits, then two words of the vocabulary at a time


def test_a_frozen_linear_head_gets_no_gradient(case):
    hidden, weight, targets = case
    products = []

    def multiply(x, weight, bias):
        products.append(x.shape)
        return nn.functional.linear(x, weight, bias)

    logprobs, _ = linear_logprobs(
        hidden.requires_grad_(), LinearHead(weight, multiply=multiply), targets, temperature=1.0, chunk_size=3
    )
    logprobs.sum().backward()
    assert weight.grad is None and hidden.grad is not None
    assert len(products) == 3 + 2 + 3  # logits, those of all chunks but the last again, the gradient of the states


def test_a_second_backward_pass_through_a_linear_head_gives_the_same(case):
    hidden, weight, targets = case
    logprobs, _ = by_linear_head(hidden.requires_grad_(), weight, targets, temperature=0.7, chunk_size=3)
    first, second = (torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.allclose(first, second, atol=1e-14, rtol=0)


def test_a_linear_head_with_impossible_tokens(case):
    hidden, weight, targets = case
    bias = torch.zeros(V, dtype=torch.float64)
    bias[0], targets[:] = -math.inf, 1
    logprobs, entropy = linear_logprobs(
        hidden.requires_grad_(), LinearHead(weight, bias), targets, temperature=0.7, with_entropy=True
    )
    (logprobs + entropy).sum().backward()
    wanted = logprobs_from_logits(hidden @ weight[1:].T, targets - 1, temperature=0.7, with_entropy=True)
    assert all(torch.allclose(a, b, atol=1e-13, rtol=0) for a, b in zip((logprobs, entropy), wanted, strict=True))
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_autocast", [True, False])
def test_a_linear_head_in_half_precision_multiplies_as_the_head_itself_does(case, dtype, by_autocast):
    hidden, weight, targets = (x.float() if x.is_floating_point() else x for x in case)
    if not by_autocast:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    outputs = []
    for of_head in (by_any_head, by_linear_head):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", dtype=dtype, enabled=by_autocast):
            logprobs, entropy = of_head(*leaves, targets, temperature=0.7, chunk_size=3, with_entropy=True)
        (logprobs.sum() + entropy.sum()).backward()
        assert logprobs.dtype == entropy.dtype == torch.float32
        assert [leaf.grad.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]
        outputs.append([logprobs.detach(), entropy.detach(), *(leaf.grad.float() for leaf in leaves)])
    for of_any, of_linear in zip(*outputs, strict=True):
        assert torch.allclose(of_any, of_linear, atol=2e-2, rtol=2e-2)
    for of_any, of_linear in zip(*(o[:2] for o in outputs), strict=True):
        assert torch.allclose(of_any, of_linear, atol=1e-5, rtol=0)


def test_a_linear_head_keeps_the_probabilities_of_one_chunk(case):
    """Nothing of the vocabulary's width is saved for the backward pass but what the last chunk left."""
    hidden, weight, targets = case
    saved = []

    def record(x):
        saved.append(tuple(x.shape))
        return x

    made = []

    def multiply(x, weight, bias):
        made.append(weakref.ref(logits := nn.functional.linear(x, weight, bias)))
        return logits

    head = LinearHead(weight, multiply=multiply)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        logprobs, _ = linear_logprobs(hidden.requires_grad_(), head, targets, temperature=1.0, chunk_size=3)
    gc.collect()
    assert [ref() is None for ref in made] == [True, True, False]
    assert not {(3, V), (2, V)} & set(saved)
    logprobs.sum().backward()
    gc.collect()
    assert all(ref() is None for ref in made)
