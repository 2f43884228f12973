"""The toy languages against their published figures, and their exact sums against a loop over every answer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from benchmarks.toys.language import END, random_language, toy

SMALL = random_language(3, 3, 3, seed=4, end_bias=0.0)


def every_answer(language):
    """Every answer as token ids, with whether it ended by itself."""
    for length in range(1, language.max_length + 1):
        for tokens in itertools.product(range(language.vocab_size), repeat=length):
            ended = tokens[-1] == END
            if END not in tokens[:-1] and (ended or length == language.max_length):
                yield tokens, ended


def number_of(tokens, language):
    """Breadth-first index of a text, by counting."""
    texts = [
        text
        for length in range(language.max_length + 1)
        for text in itertools.product(range(1, language.vocab_size), repeat=length)
    ]
    return texts.index(tuple(tokens))


def summed(language, logprobs):
    """E[r], KL, length and share of ended answers, by a loop over prompts, answers and tokens."""
    totals = {"reward": 0.0, "kl": 0.0, "length": 0.0, "ended": 0.0, "mass": 0.0}
    for x in range(language.num_prompts):
        for tokens, ended in every_answer(language):
            states = [number_of(tokens[:t], language) for t in range(len(tokens))]
            log_p = sum(logprobs[x, s, a].item() for s, a in zip(states, tokens, strict=True))
            log_ref = sum(language.ref_logprobs[x, s, a].item() for s, a in zip(states, tokens, strict=True))
            p = math.exp(log_p) / language.num_prompts
            text = tokens[:-1] if ended else tokens
            cut = None if ended else language.cut_score
            score = language.scores[x, number_of(text, language)].item() if cut is None else cut
            totals["reward"] += p * score
            totals["kl"] += p * (log_p - log_ref)
            totals["length"] += p * len(tokens)
            totals["ended"] += p * ended
            totals["mass"] += p
    return totals


@pytest.mark.parametrize(
    ("name", "start", "best", "reward", "kl", "length", "ended"),
    [("A", -0.2460, 0.2726, 0.580, 1.023, 3.09, 0.992), ("B", 0.3159, 1.2042, 1.747, 1.808, 7.95, None)],
)
def test_figures_are_the_published_ones(name, start, best, reward, kl, length, ended):
    language = toy(name)
    optimum = language.figures(language.optimum())
    assert language.start == pytest.approx(start, abs=5e-5)
    assert language.best == pytest.approx(best, abs=5e-5)
    assert float(optimum.reward) == pytest.approx(reward, abs=6e-4)
    assert float(optimum.kl) == pytest.approx(kl, abs=5e-4)
    assert float(optimum.length) == pytest.approx(length, abs=5e-3)
    if ended is not None:
        assert float(optimum.ended) == pytest.approx(ended, abs=5e-4)


@pytest.mark.parametrize("cut_score", [-1.0, None])
def test_exact_figures_equal_a_loop_over_every_answer(cut_score):
    language = replace(SMALL, cut_score=cut_score)
    noise = torch.randn(language.ref_logprobs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logprobs = (language.ref_logprobs + noise).log_softmax(-1)
    looped = summed(language, logprobs)
    assert looped["mass"] == pytest.approx(1.0, abs=1e-12)
    figures = language.figures(logprobs)
    assert float(figures.reward) == pytest.approx(looped["reward"], abs=1e-12)
    assert float(figures.kl) == pytest.approx(looped["kl"], abs=1e-12)
    assert float(figures.length) == pytest.approx(looped["length"], abs=1e-12)
    assert float(figures.ended) == pytest.approx(looped["ended"], abs=1e-12)
    assert float(figures.objective) == pytest.approx(looped["reward"] - 0.3 * looped["kl"], abs=1e-12)


@pytest.mark.parametrize("cut_score", [-1.0, None])
def test_the_optimum_is_the_partition_function_over_every_answer(cut_score):
    """J* = β E_x[log Σ_y π_ref(y|x) exp(r(x, y) / β)], and π* gives each answer its share of that sum."""
    language, beta = replace(SMALL, cut_score=cut_score), 0.3
    best, optimum = 0.0, language.optimum()
    for x in range(language.num_prompts):
        weights, shares = [], []
        for tokens, ended in every_answer(language):
            text = tokens[:-1] if ended else tokens
            score = language.scores[x, number_of(text, language)].item()
            if not ended and cut_score is not None:
                score = cut_score
            states = [number_of(tokens[:t], language) for t in range(len(tokens))]
            log_ref = sum(language.ref_logprobs[x, s, a].item() for s, a in zip(states, tokens, strict=True))
            weights.append(math.exp(log_ref + score / beta))
            shares.append(math.exp(sum(optimum[x, s, a].item() for s, a in zip(states, tokens, strict=True))))
        assert shares == pytest.approx([w / sum(weights) for w in weights], abs=1e-12)
        best += beta * math.log(sum(weights)) / language.num_prompts
    assert language.best == pytest.approx(best, abs=1e-12)


def test_regret_is_the_kl_to_the_optimum_in_units_of_the_gain():
    """J* − J(π) = β KL(π ‖ π*), whatever π."""
    noise = torch.randn(SMALL.ref_logprobs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logprobs = (SMALL.optimum() + noise).log_softmax(-1)
    to_optimum = summed(replace(SMALL, ref_logprobs=SMALL.optimum()), logprobs)["kl"]
    assert SMALL.regret(logprobs) == pytest.approx(0.3 * to_optimum / (SMALL.best - SMALL.start), abs=1e-12)
    assert SMALL.regret(SMALL.optimum()) == pytest.approx(0.0, abs=1e-12)
    assert SMALL.regret(SMALL.ref_logprobs) == pytest.approx(1.0, abs=1e-12)


def test_texts_are_numbered_breadth_first():
    counted = [SMALL.letters(n) for n in range(15)]
    in_order = [text for length in range(4) for text in itertools.product((1, 2), repeat=length)]
    assert counted == in_order
    assert [SMALL.number(text) for text in in_order] == list(range(15))


def test_reading_follows_queries_and_answers_through_padding():
    """Padding on either side is not a token, though it has the end token's id."""
    language = random_language(3, 3, 4, seed=0, end_bias=0.0)
    queries = [language.query(x) for x in range(4)]
    assert queries == [(1, 0, 1), (2, 0, 1), (1, 1, 0, 1), (1, 2, 0, 1)]
    token_ids = torch.tensor([[0, 2, 0, 1, 1, 2, 0, 0], [1, 2, 0, 1, 2, 2, 2, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    reading = language.read(token_ids, mask)
    assert reading.prompts[:, 3:].tolist() == [[1] * 5, [3] * 5]
    assert reading.texts[:, 3:].tolist() == [
        [0, number_of((1,), language), number_of((1, 2), language), number_of((1, 2), language), 4],
        [0, 2, number_of((2, 2), language), number_of((2, 2, 2), language), 14],
    ]
    assert reading.ended.tolist() == [[False] * 6 + [True] * 2, [False] * 8]
