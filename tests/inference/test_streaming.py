"""Answers told while they are written: the bits are the answer, and none is taken back."""

import random

import pytest

from tests.models.test_answer_texts import TOKENIZERS
from tests.models.test_stop_strings import drawn_ids, drawn_strings, ids_of
from tether.inference.streaming import Streamed
from tether.models.stop_strings import StopStrings, answer_text, continued
from tether.types import Sampling


def told(tokenizer, sampling, ids, before=()):
    """The bits, and the answer, of as many tokens as the sampling lets it have."""
    bits = []
    streamed = Streamed(tokenizer, sampling, bits.append)
    for count in range(1, len(ids) + 1):
        if streamed.ends(ids[:count], before):
            ids = ids[:count]
            break
    answer = answer_text(ids, tokenizer, sampling, before).strip()
    streamed.finish(answer)
    return bits, answer


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in ("word pieces", "unigram, cleaned up")])
def test_the_bits_are_the_answer(name):
    tokenizer, draw, early, cut = TOKENIZERS[name](), random.Random(0), 0, 0
    for _ in range(300):
        query, ids = drawn_ids(draw, tokenizer, 5), drawn_ids(draw, tokenizer, 12)
        before = draw.choice([query, []])
        if "\ufffd" in (text := continued(ids, before, tokenizer)):
            continue  # bytes that are no character in the end
        strings = draw.choice([drawn_strings(draw, text or "#"), []])
        sampling = Sampling(12, text_ends=StopStrings(tokenizer, strings) if strings else None)
        bits, answer = told(tokenizer, sampling, ids, before)
        assert "".join(bits) == answer
        early += len(bits) > 2
        cut += answer != text.strip()
    assert early > 20 and cut > 5, "the case needs answers told in several bits, some cut by a string"


def test_what_may_begin_a_stop_string_and_half_a_character_wait():
    tokenizer = TOKENIZERS["byte level"]()
    other = ids_of(tokenizer, "a", "#", "b")
    bits, _ = told(tokenizer, Sampling(9, text_ends=StopStrings(tokenizer, ["##"])), other)
    assert bits == ["a", "#b"]
    whole = [tokenizer.convert_tokens_to_ids(chr(byte)) for byte in "é".encode()]
    assert told(tokenizer, Sampling(9), [*other[:1], *whole])[0] == ["a", "é"]


def test_what_may_be_cleaned_up_waits():
    tokenizer = TOKENIZERS["word pieces"]()
    words = ["human"] * 4
    bits, answer = told(tokenizer, Sampling(20), ids_of(tokenizer, *words, "'", "s", *words))
    assert "".join(bits) == answer == "human human human human's human human human human" and len(bits) > 4


def test_a_text_that_is_read_anew_is_told_as_a_whole_at_last():
    tokenizer = TOKENIZERS["word pieces"]()
    bits, answer = told(tokenizer, Sampling(9), ids_of(tokenizer, "do", "n't", "run", "##s"))
    assert answer == "don't runs" and "".join(bits).endswith(answer)
