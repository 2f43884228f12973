"""The rule for answers that did not end by themselves, by hand."""

import pytest
import torch

from tether.algo import missing_eos_scores

SCORES, ENDED = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([True, False, False])


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
