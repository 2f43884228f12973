"""The comparison of held-out answers."""

import math

import pytest

from tether.demo.outcome import Change, answer_table, outcome, result_table


def sample(step, row, *, reward, length=10, finish="stop", kl=0.0, split="eval"):
    return {
        "step": step,
        "split": split,
        "row": row,
        "prompt": f"prompt {row}",
        "response": f"{reward} at {step}",
        "rewards": {"adapter": reward, "other": -99.0},
        "score": -50.0,
        "length": length,
        "finish_reason": finish,
        "kl": kl,
    }


@pytest.fixture
def result():
    samples = [
        sample(0, 0, reward=1.0, length=8, finish="length"),
        sample(0, 1, reward=3.0, length=12),
        sample(2, 0, reward=50.0, split="train"),
        sample(2, 0, reward=77.0),
        # the order of the rows is not that of the start
        sample(4, 1, reward=4.0, length=10, kl=3.0),
        sample(4, 0, reward=4.0, length=14, kl=5.0),
    ]
    return outcome(samples, reward="adapter", judge=lambda texts: [float(text.split()[0]) / 10 for text in texts])


def test_first_and_last_evaluation_prompt_by_prompt(result):
    assert result.reward == Change((1.0, 3.0), (4.0, 4.0))
    assert result.sentiment == Change((0.1, 0.3), (0.4, 0.4))
    assert result.kl == Change((0.0, 0.0), (5.0, 3.0))
    assert result.length == Change((8.0, 12.0), (14.0, 10.0))
    assert result.ended == Change((0.0, 1.0), (1.0, 1.0))
    assert result.answers == (("prompt 0", "1.0 at 0", "4.0 at 4"), ("prompt 1", "3.0 at 0", "4.0 at 4"))


def test_statistics_by_hand(result):
    assert result.reward.means == (2.0, 4.0)
    # differences 3 and 1: standard deviation √2, standard error √2/√2
    assert result.reward.rise == 2.0
    assert result.reward.rise_error == pytest.approx(1.0)
    assert result.reward.errors == pytest.approx((1.0, 0.0))
    # rise 2 over a standard deviation of √2 at the start
    assert result.reward_rise_in_std == pytest.approx(math.sqrt(2))


def test_tables(result):
    header, rows = result_table(result)
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][1:] == ["2.00 ± 1.00", "4.00 ± 0.00", "+2.00 ± 1.00 = +1.41 sd of the start policy's scores"]
    assert [row[1] for row in rows[2:]] == ["0.00 ± 0.00", "10.0 ± 2.0", "0.50 ± 0.50"]
    assert answer_table(result, 1)[1] == [["prompt 0", "1.0 at 0", "4.0 at 4"]]
