"""Selected log-probabilities against sums in plain Python, and what the chunks must not change."""

import gc
import math
import weakref

import pytest
import torch

from tether.algo import logprobs_from_logits, selected_logprobs

N, D, V = 7, 4, 5


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_by_their_definitions(case, temperature):
    hidden, weight, targets = case
    logits = (hidden @ weight.T).tolist()
    logprobs, entropy = selected_logprobs(
        hidden, lambda h: h @ weight.T, targets, temperature=temperature, with_entropy=True
    )
    for n in range(N):
        probs = softmax(logits[n], temperature)
        assert logprobs[n].item() == pytest.approx(math.log(probs[targets[n]]), abs=1e-12)
        assert entropy[n].item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 3, 256])
def test_gradient_is_one_hot_minus_softmax_over_temperature(case, chunk_size):
    hidden, weight, targets = case
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, _ = selected_logprobs(
        hidden, lambda h: h @ weight.T, targets, temperature=0.7, chunk_size=chunk_size
    )
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


def test_a_uniform_row_by_hand():
    logprobs, entropy = logprobs_from_logits(
        torch.full((1, 8), 3.0, dtype=torch.float64), torch.tensor([5]), temperature=0.5, with_entropy=True
    )
    assert [logprobs.item(), entropy.item()] == pytest.approx([-math.log(8), math.log(8)], abs=1e-14)


def test_a_row_that_is_not_a_number_stays_alone(case):
    hidden, weight, targets = case
    clean = selected_logprobs(hidden, lambda h: h @ weight.T, targets, temperature=1.0, with_entropy=True)
    dirty = hidden.clone()
    dirty[2] = math.nan
    got = selected_logprobs(dirty, lambda h: h @ weight.T, targets, temperature=1.0, with_entropy=True)
    others = [0, 1, 3, 4, 5, 6]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(got, clean, strict=True))


def test_gradient_of_the_entropy_by_finite_differences(case):
    hidden, weight, targets = case

    def entropy(h):
        options = {"temperature": 0.7, "chunk_size": 3, "with_entropy": True}
        return selected_logprobs(h, lambda x: x @ weight.T, targets, **options)[1]

    assert torch.autograd.gradcheck(entropy, hidden.requires_grad_())


def test_chunks_change_nothing(case):
    hidden, weight, targets = case
    whole = logprobs_from_logits(hidden @ weight.T, targets, temperature=1.0, with_entropy=True)
    for chunk_size in (1, 3, N):
        parts = selected_logprobs(
            hidden, lambda h: h @ weight.T, targets, temperature=1.0, chunk_size=chunk_size, with_entropy=True
        )
        assert all(torch.allclose(a, b, atol=1e-14, rtol=0) for a, b in zip(parts, whole, strict=True))


def test_no_tokens_give_no_logprobs(case):
    hidden, weight, targets = case
    logprobs, entropy = selected_logprobs(
        hidden[:0], lambda h: h @ weight.T, targets[:0], temperature=1.0, with_entropy=True
    )
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
    assert not {(3, V), (1, V)} & set(saved)  # nothing of the vocabulary's width waits for the backward pass
    assert rows == [3, 3, 1]
    logprobs.sum().backward()
    assert sorted(rows) == [1, 1, 3, 3, 3, 3]  # where each chunk is computed once more


def test_with_and_without_grad_agree_bitwise(case):
    hidden, weight, targets = (x.float() if x.is_floating_point() else x for x in case)
    with torch.no_grad():
        old, _ = selected_logprobs(hidden, lambda h: h @ weight.T, targets, temperature=0.7, chunk_size=3)
    new, _ = selected_logprobs(hidden.requires_grad_(), lambda h: h @ weight.T, targets, temperature=0.7, chunk_size=3)
    assert torch.equal(old, new)


def test_entropy_is_left_out_unless_asked_for(case):
    hidden, weight, targets = case
    assert selected_logprobs(hidden, lambda h: h @ weight.T, targets, temperature=1.0)[1] is None


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
