"""What counts as one finite score an answer."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from tether.errors import RewardResponseError
from tether.rewards.base import checked, score_sequences


@pytest.mark.parametrize(
    "scores",
    [
        [1, 0],
        (1.0, 0.0),
        [True, False],
        [np.float32(1), np.int64(0)],
        [np.bool_(True), np.array(0)],
        np.array([1, 0]),
        torch.tensor([1.0, 0.0], requires_grad=True),
        [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(False)],
        iter([1, 0]),
    ],
    ids=lambda scores: type(scores).__name__,
)
def test_accepts_numbers_of_any_library(scores):
    got = checked(scores, 2, "judge")
    assert got == [1.0, 0.0]
    assert all(type(score) is float for score in got)


@pytest.mark.parametrize(
    "bad",
    [None, math.nan, -math.inf, np.float32("nan"), torch.tensor(math.inf), "1.0", [1.0], 1j, Decimal(1), 10**400,
     np.zeros(1), torch.zeros(1, 1)],
    ids=repr,
)  # fmt: skip
def test_names_source_row_and_value_of_what_is_no_finite_number(bad):
    with pytest.raises(RewardResponseError, match=r"judge returned .* for answer 1 of 3") as caught:
        checked([0.5, bad, 0.5], 3, "judge")
    assert type(bad).__name__ in str(caught.value)


@pytest.mark.parametrize("size", [1e16, -1e39, 1e300])
def test_a_score_whose_square_float32_could_not_hold_is_refused(size):
    assert checked([1e15, -1e15], 2, "judge") == [1e15, -1e15]
    with pytest.raises(RewardResponseError, match=r"judge returned .*e\+.* for answer 1 of 2 .*between -1e\+15"):
        checked([0.5, size], 2, "judge")


@pytest.mark.parametrize("scores", [[1.0], [1.0, 2.0, 3.0], [], np.zeros(3), torch.zeros(0)])
def test_counts_must_match(scores):
    with pytest.raises(RewardResponseError, match=rf"judge returned {len(scores)} scores? for 2 answers"):
        checked(scores, 2, "judge")


@pytest.mark.parametrize("scores", [None, 1.0, "ab", {"a": 1, "b": 2}, {1, 2}, torch.tensor(1.0)], ids=repr)
def test_something_else_than_a_list_is_refused(scores):
    with pytest.raises(RewardResponseError, match="wanted a list of 2 numbers"):
        checked(scores, 2, "judge")


def test_a_sparse_tensor_is_refused():
    with pytest.raises(RewardResponseError, match="wanted a list of 2 numbers"):
        checked(torch.tensor([1.0, 0.0]).to_sparse(), 2, "judge")


def test_two_dimensional_scores_are_refused():
    with pytest.raises(RewardResponseError, match="answer 0 of 2"):
        checked(torch.zeros(2, 1), 2, "judge")


def test_sequences_are_scored_in_batches_of_like_lengths_and_returned_in_order():
    shapes = []

    def token_sum(ids, mask, position_ids):
        shapes.append(tuple(ids.shape))
        return torch.where(mask, ids, 0).sum(dim=1).float()

    sequences = [[1], [2, 2, 2, 2], [3, 3], [4, 4, 4], [5]]
    assert score_sequences(sequences, token_sum, batch_size=2, device="cpu") == [1.0, 8.0, 6.0, 12.0, 5.0]
    assert shapes == [(2, 4), (2, 2), (1, 1)]
