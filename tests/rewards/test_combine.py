"""The weighted sum against sums by hand."""

import pytest

from tests.rewards.batches import text_batch
from tether.errors import RewardError, RewardResponseError
from tether.rewards.combine import Part, WeightedSum
from tether.rewards.fake import FakeRewards
from tether.types import RewardOutput


class Answers:
    """Returns a fixed output, whatever is asked."""

    def __init__(self, output):
        self.output = output

    def score(self, batch):
        return self.output


def test_weighted_sum_keeps_the_unweighted_parts():
    source = WeightedSum(
        [
            Part("long", 0.5, FakeRewards(lambda query, response: float(len(response)))),
            Part("short", -2.0, FakeRewards(lambda query, response: 1.0 / len(response))),
        ]
    )
    output = source.score(text_batch("a", "bb", "dddd"))
    assert output.scores == [0.5 - 2.0, 1.0 - 1.0, 2.0 - 0.5]
    assert output.components == {"long": [1.0, 2.0, 4.0], "short": [1.0, 0.5, 0.25]}


def test_scores_are_normalised_then_clipped_then_weighted_and_logged_as_they_are():
    source = WeightedSum(
        [
            Part("long", -2.0, FakeRewards(lambda query, response: float(len(response))), bounds=(1.5, 3.0)),
            Part("one", 1.0, FakeRewards(lambda query, response: 5.0), norm=(3.0, 2.0)),
        ]
    )
    output = source.score(text_batch("a", "bb", "dddd"))
    assert output.scores == [1 - 3.0, 1 - 4.0, 1 - 6.0]
    assert output.components == {"long": [1.0, 2.0, 4.0], "one": [5.0, 5.0, 5.0]}
    both = Part("both", 10.0, FakeRewards(lambda query, response: 0.0), norm=(1.0, 0.5), bounds=(-1.0, 3.0))
    assert [both.counted(score) for score in (0.0, 1.0, 1.5, 9.0)] == [-10.0, 0.0, 10.0, 30.0]


def test_one_source_of_weight_one_passes_through():
    scores = [0.1, -0.30000000000000004, 1e-17]
    output = WeightedSum([Part("judge", 1.0, Answers(RewardOutput(scores)))]).score(text_batch("a", "b", "c"))
    assert output.scores == scores
    assert output.components == {"judge": scores}


def test_components_of_a_part_are_kept_under_its_name():
    inner = Answers(RewardOutput([3.0], {"style": [1.0], "facts": [2.0]}))
    output = WeightedSum([Part("judge", 2.0, inner)]).score(text_batch("a"))
    assert output.components == {"judge": [3.0], "judge/style": [1.0], "judge/facts": [2.0]}


def test_weight_zero_only_records():
    parts = [Part("on", 1.0, Answers(RewardOutput([1.0]))), Part("off", 0.0, Answers(RewardOutput([9.0])))]
    output = WeightedSum(parts).score(text_batch("a"))
    assert output.scores == [1.0]
    assert output.components["off"] == [9.0]


def test_a_part_that_answers_wrongly_is_named():
    with pytest.raises(RewardResponseError, match="reward judge returned 1 score for 2 answers"):
        WeightedSum([Part("judge", 1.0, Answers(RewardOutput([1.0])))]).score(text_batch("a", "b"))


def test_a_sum_beyond_floats_is_refused():
    parts = [Part("a", 1e308, Answers(RewardOutput([1e10])))]
    with pytest.raises(RewardError, match="weighted sum"):
        WeightedSum(parts).score(text_batch("x"))
