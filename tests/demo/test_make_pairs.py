"""How answers become pairs."""

import pytest

from tether.demo.make_pairs import Candidate, first_sentence, warmest_over_coldest


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" I love it! Really.", "I love it!"),
        ("It is 3.5 percent of all. More", "It is 3.5 percent of all."),
        ('He said "go now." And left.', 'He said "go now."'),
        ("Wow, that is it!!", "Wow, that is it!!"),
        ("No. Not at all.", None),
        ("Half a sentence that", None),
        ("A title\nand a sentence.", None),
        ("", None),
    ],
)
def test_first_sentence(text, sentence):
    assert first_sentence(text) == sentence


def candidate(prompt: int, text: str) -> Candidate:
    return Candidate(prompt, (1, 2), text)


def test_warmest_over_coldest():
    warm = [(candidate(0, "a"), 1.0), (candidate(0, "b"), 3.0), (candidate(0, "c"), 2.0), (candidate(1, "d"), -5.0)]
    warm.append((candidate(0, "b"), 2.5))  # the same text again
    cold = [(candidate(0, "e"), 0.0), (candidate(0, "f"), -2.0), (candidate(0, "g"), 1.5), (candidate(1, "h"), -4.0)]
    # prompt 1 has its sides the wrong way round, prompt 2 has only one
    cold.append((candidate(2, "i"), -9.0))
    pairs = [(a.prompt, a.text, b.text) for a, b in warmest_over_coldest(warm, cold, most=3)]
    assert pairs == [(0, "b", "f"), (0, "c", "e")]  # "a" over "g" would be the colder over the warmer
    assert [(a.text, b.text) for a, b in warmest_over_coldest(warm, cold, most=1)] == [("b", "f")]
