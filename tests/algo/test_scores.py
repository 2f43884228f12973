"""What becomes of a score: by hand, by definition in exact fractions, and whatever the parts in which scores come."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algo.ragged import examples
from tether.algo import (
    ScoreMoments,
    merged_moments,
    missing_eos_scores,
    normalised_scores,
    overlong_penalties,
    score_scale,
    whitening_scale,
)

SCORES, ENDED = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([True, False, False])
NUMBERS = st.lists(st.floats(-100, 100, allow_subnormal=False), max_size=8)


@pytest.mark.parametrize(
    ("penalty", "replacement", "wanted"),
    [
        (None, None, [1.0, -2.0, 3.0]),
        (0.5, None, [1.0, -2.5, 2.5]),
        (None, -1.0, [1.0, -1.0, -1.0]),
        (None, 0.0, [1.0, 0.0, 0.0]),
        (0.0, None, [1.0, -2.0, 3.0]),
    ],
)
def test_only_answers_that_did_not_end_are_touched(penalty, replacement, wanted):
    before = SCORES.clone()
    assert missing_eos_scores(SCORES, ENDED, penalty=penalty, replacement=replacement).tolist() == wanted
    assert torch.equal(SCORES, before)


def test_both_rules_at_once_are_a_bug():
    with pytest.raises(AssertionError):
        missing_eos_scores(SCORES, ENDED, penalty=0.5, replacement=-1.0)


@pytest.mark.parametrize(("max_length", "buffer"), [(20, 4), (20, 1), (20, 20), (7, 3)])
def test_overlong_penalty_by_its_definition(max_length, buffer):
    def oracle(length: int) -> float:
        free = max_length - buffer
        return 0.0 if length <= free else -1.0 if length > max_length else (free - length) / buffer

    lengths = range(max_length + 5)
    penalties = overlong_penalties(torch.tensor(lengths), max_length=max_length, buffer=buffer)
    assert penalties.tolist() == pytest.approx([oracle(length) for length in lengths], abs=1e-7)


def test_overlong_penalty_at_its_knots():
    lengths = torch.tensor([0, 12_000, 16_384, 16_385, 18_432, 20_479, 20_480, 30_000])
    penalties = overlong_penalties(lengths, max_length=20_480, buffer=4_096)
    assert penalties.tolist() == [0.0, 0.0, 0.0, -1 / 4096, -0.5, -4095 / 4096, -1.0, -1.0]


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_a_buffer_that_is_none_is_a_bug(buffer):
    with pytest.raises(AssertionError):
        overlong_penalties(torch.tensor([3]), max_length=20, buffer=buffer)


def moments_of(numbers: list[float]) -> tuple[float, float, float]:
    """Count, mean and biased variance, in exact arithmetic until the end."""
    exact = [Fraction(number) for number in numbers]
    mean = sum(exact) / len(exact)
    return float(len(exact)), float(mean), float(sum((x - mean) ** 2 for x in exact) / len(exact))


def merged(*parts: list[float]) -> tuple[float, float, float]:
    moments = ScoreMoments()
    for part in parts:
        moments = merged_moments(moments, torch.tensor(part, dtype=torch.float64))
    return moments.count, moments.mean, moments.var


@examples
@given(st.lists(NUMBERS, min_size=1, max_size=4).filter(any))
def test_moments_merged_part_by_part_are_those_of_all(parts):
    wanted = moments_of([number for part in parts for number in part])
    assert merged(*parts) == pytest.approx(wanted, rel=1e-12, abs=1e-9)


def test_moments_of_one_score_and_of_none():
    assert merged() == merged([]) == (0.0, 0.0, 0.0)
    assert merged([-3.5]) == merged([], [-3.5], []) == (1.0, -3.5, 0.0)


def test_merge_by_hand():
    # of 1, 3 and 8: mean 4, squares 9 + 1 + 16
    assert merged([1.0, 3.0]) == (2.0, 2.0, 1.0)
    assert merged([1.0, 3.0], [8.0]) == pytest.approx((3.0, 4.0, 26 / 3), abs=1e-15)
    assert merged_moments(ScoreMoments(2.0, 2.0, 1.0), torch.tensor([8.0])).var == pytest.approx(26 / 3, abs=1e-15)


def test_moments_far_from_0_keep_their_digits():
    scores = 1e8 + np.random.default_rng(0).normal(size=1000)
    for parts in (scores.reshape(25, 40).tolist(), [[score] for score in scores.tolist()]):
        count, mean, var = merged(*parts)
        assert count == 1000.0
        assert mean == pytest.approx(scores.mean(), rel=1e-14)
        assert var == pytest.approx(scores.var(), rel=1e-6)


def test_merging_leaves_the_moments_so_far_alone():
    before = ScoreMoments(2.0, 2.0, 1.0)
    merged_moments(before, torch.tensor([8.0]))
    assert before == ScoreMoments(2.0, 2.0, 1.0)


@examples
@given(NUMBERS, st.floats(-50, 50), st.floats(0, 50))
def test_normalised_scores_by_their_definition(numbers, mean, var):
    scores = normalised_scores(torch.tensor(numbers, dtype=torch.float64), ScoreMoments(9.0, mean, var))
    assert scores.tolist() == pytest.approx([(s - mean) / math.sqrt(var + 1e-8) for s in numbers], rel=1e-12, abs=1e-9)


def test_scores_normalised_by_their_own_moments_have_mean_0_and_variance_1():
    numbers = np.random.default_rng(0).normal(5, 3, size=200).tolist()
    white = normalised_scores(torch.tensor(numbers, dtype=torch.float64), ScoreMoments(*moments_of(numbers)))
    assert moments_of(white.tolist()) == pytest.approx((200.0, 0.0, 1.0), abs=1e-8)


def test_frozen_moments_keep_differences_whatever_the_batch():
    frozen = ScoreMoments(256.0, 1.0, 4.0)
    assert normalised_scores(torch.tensor([1.0, 3.0]), frozen).tolist() == pytest.approx([0.0, 1.0], abs=1e-7)
    assert normalised_scores(torch.tensor([3.0, 3.2]), frozen).tolist() == pytest.approx([1.0, 1.1], abs=1e-6)


def test_equal_scores_normalise_to_0():
    moments = merged_moments(ScoreMoments(), torch.full((4,), 0.75))
    assert normalised_scores(torch.full((4,), 0.75), moments).tolist() == [0.0] * 4


def test_half_precision_is_done_in_float32():
    scores, moments = torch.tensor([256.0, 257.0, 259.0]).bfloat16(), ScoreMoments(3.0, 257.3, 1.7)
    assert torch.equal(normalised_scores(scores, moments), normalised_scores(scores.float(), moments))


@pytest.mark.parametrize(("var", "wanted"), [(0.0, 1.0), (1e-8, 1.0), (3e-8, 2e-4), (4.0, 2.0)])
def test_what_does_not_spread_is_scaled_by_1(var, wanted):
    assert whitening_scale(var) == pytest.approx(wanted, rel=1e-6)


@examples
@given(
    own=st.floats(-20, 20),
    weight=st.floats(-5, 5),
    norm=st.none() | st.tuples(st.floats(-10, 10), st.floats(0.1, 10)),
    others=st.lists(st.floats(-20, 20), max_size=2),
    moments=st.none() | st.builds(ScoreMoments, st.just(9.0), st.floats(-10, 10), st.just(0.0) | st.floats(0.1, 50)),
)
def test_the_scale_of_one_source_takes_its_score_to_that_of_the_sum(own, weight, norm, others, moments):
    """By the definition of the sum: each source normalised and weighted, the whole normalised once more."""
    total = weight * (own if norm is None else (own - norm[0]) / norm[1]) + sum(others)
    if moments is not None:
        total = (total - moments.mean) / (math.sqrt(moments.var + 1e-8) if moments.var else 1.0)
    slope, shift = score_scale(weight=weight, norm=norm, beside=sum(others), moments=moments)
    assert slope * own + shift == pytest.approx(total, rel=1e-9, abs=1e-6)


def test_the_scale_of_one_source_by_hand():
    # 3 (s − 1) / 2 + 5, less 4, in halves
    assert score_scale(weight=3.0, norm=(1.0, 2.0), beside=5.0, moments=ScoreMoments(8.0, 4.0, 0.25)) == pytest.approx(
        (3.0, -1.0), rel=1e-7
    )
    assert score_scale(weight=1.0, norm=None, beside=0.0, moments=None) == (1.0, 0.0)
