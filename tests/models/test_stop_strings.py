"""Where strings end answers, against the text of every prefix of the whole answer; what is read of such answers."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from tests.tiny import EOS, VOCABULARY, tiny_bpe_tokenizer, tiny_tokenizer
from tether.models.stop_strings import StopStrings, answer_text
from tether.types import Sampling

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
PIECES = [
    "###", "##", "#:", ".#", "\n", "\n\n", "\nHu", "Human", "man:", " Human:", "Human:\n", " the", " a",
    "xy" * 20 + "#", "漢", "字#", "é", "🙂", " 漢", "|>#", ", ", ".", "'s", "n't", "<|", "user", "|>",
]  # fmt: skip


def finished(backend, **options):
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **options)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def letters(text):
    """The bytes of a text as byte-level tokenizers write them."""
    return "".join(part for part, _ in BYTES.pre_tokenize_str(text))


def byte_level():
    """Every byte, pieces of text, and pieces that begin or end within a character."""
    whole = [letters(piece) for piece in PIECES]
    broken = [piece[1:] for piece in whole] + [piece[:-1] for piece in whole] + [piece[2:] for piece in whole]
    tokens = dict.fromkeys([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *whole, *filter(None, broken)])
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = BYTES, decoders.ByteLevel()
    return finished(backend)


def byte_fallback():
    """Pieces as in Llama 2's tokenizer: a mark for blanks, and a token for every byte of what has no piece."""
    pieces = [piece.replace(" ", "▁") for piece in PIECES]
    tokens = dict.fromkeys([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "▁", "▁▁", "#", ":", "a"])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return finished(backend)


def word_pieces():
    """Words and parts of words, with blanks that are cleaned up."""
    words = [
        "do", "n't", "'", "s", "##ing", "##s", "run", ".", ",", "!", "human", ":", "#", "the", "m", "'s", "ve", "漢",
    ]  # fmt: skip
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate([*SPECIAL, *words])}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return finished(backend, clean_up_tokenization_spaces=True)


TOKENIZERS = {
    "words": tiny_tokenizer, "byte-pair": tiny_bpe_tokenizer, "byte level": byte_level, "byte fallback": byte_fallback,
    "word pieces": word_pieces,
}  # fmt: skip


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def readings(tokenizer, ids):
    return [tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(ids)]


def end_by_prefixes(tokenizer, strings, ids):
    """Number of tokens of the shortest beginning whose text contains a string; None if there is none."""
    return next(
        (
            end
            for end in range(1, len(ids) + 1)
            if any(string in text for text in readings(tokenizer, ids[:end]) for string in strings)
        ),
        None,
    )


def end_by_tail(ends, ids):
    return next((end for end in range(1, len(ids) + 1) if ends.ends(ids[:end])), None)


SPELLED = ("漢字", "🙂é", "#漢#")
"""Texts that are drawn byte for byte."""


def has_every_byte(tokenizer):
    return tokenizer.get_vocab().keys() >= set(pre_tokenizers.ByteLevel.alphabet())


def cleans_up(tokenizer):
    """Whether a text may read differently once more is behind it."""
    return tokenizer.clean_up_tokenization_spaces


def drawn_ids(draw, tokenizer, count):
    """Any tokens, byte for byte characters among them, and few special ones."""
    usual = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    vocabulary, spelled = tokenizer.get_vocab(), []
    if "<0x00>" in vocabulary:
        spelled = [[vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()] for text in SPELLED]
    elif has_every_byte(tokenizer):
        spelled = [[vocabulary[letter] for letter in letters(text)] for text in SPELLED]
    if "<0x00>" in vocabulary:  # and few bytes that are no character
        usual = [*range(len(SPECIAL) + 256, len(tokenizer)), *range(30, 300, 30)]
    ids = []
    while len(ids) < count:
        if spelled and draw.random() < 0.4:
            ids += draw.choice(spelled)
        elif draw.random() < 0.1:
            ids.append(draw.choice(tokenizer.all_special_ids))
        else:
            ids.append(draw.choice(usual))
    return ids[:count]


def drawn_strings(draw, text):
    """Parts of a text in which every character is one."""
    strings = []
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(text))
        strings.append(text[start : start + draw.randint(1, 9)])
    return [string for string in strings if "\ufffd" not in string]


def test_an_answer_ends_where_the_text_of_its_prefixes_says(tokenizer):
    draw, ended, late = random.Random(0), 0, 0
    for _ in range(400):
        ids = drawn_ids(draw, tokenizer, draw.choice([3, 20, 90]))
        other = drawn_ids(draw, tokenizer, 90)
        text = draw.choice([*readings(tokenizer, ids), *readings(tokenizer, other)])
        strings = drawn_strings(draw, text or "#")
        if not strings:
            continue
        wanted = end_by_prefixes(tokenizer, strings, ids)
        assert end_by_tail(StopStrings(tokenizer, strings), ids) == wanted, (strings, ids)
        ended += wanted is not None
        late += wanted is not None and wanted > 20
    assert ended > 150 and late > 20, "the case needs answers that end, also far from their beginning"


def test_text_and_closed_tokens_are_those_before_the_first_string(tokenizer):
    draw, cut = random.Random(1), 0
    for _ in range(300):
        ids = drawn_ids(draw, tokenizer, 30)
        plain, shown = readings(tokenizer, ids)
        strings = drawn_strings(draw, draw.choice([plain, shown]) or "#")
        if not strings or (end := end_by_prefixes(tokenizer, strings, ids)) is None:
            continue
        ids, ends = ids[:end], StopStrings(tokenizer, strings)
        plain, shown = readings(tokenizer, ids)
        got = ends.text(ids)
        assert cleans_up(tokenizer) or plain.startswith(got)
        assert not any(string in got for string in strings)
        starts = [plain.find(string) for string in strings if string in plain]
        if starts:
            assert got == plain[: min(starts)]
        elif "\ufffd" not in shown and not cleans_up(tokenizer):
            start = min(shown.find(string) for string in strings if string in shown)
            count = max(count for count in range(end) if len(tokenizer.decode(ids[:count])) <= start)
            before, beyond = (readings(tokenizer, ids[:each])[0] for each in (count, count + 1))
            assert got.startswith(before) and ("\ufffd" in beyond or beyond.startswith(got))
        closed = ends.closed(ids)
        assert closed[-1] == tokenizer.eos_token_id
        if has_every_byte(tokenizer) and "\ufffd" not in got:
            assert tokenizer.decode(closed, skip_special_tokens=True) == got, "every byte can be encoded"
        limited = StopStrings(tokenizer, strings, longest=len(ids)).closed(ids)
        assert len(limited) <= len(ids) and limited in (closed, [*ids[: len(limited) - 1], closed[-1]])
        cut += got != plain
    assert cut > 100


def test_no_string_ends_nothing_and_leaves_the_answer_as_it_was(tokenizer):
    ids = drawn_ids(random.Random(2), tokenizer, 50)
    ends = StopStrings(tokenizer, ["no answer says this"])
    assert end_by_tail(ends, ids) is None
    assert ends.text(ids) == tokenizer.decode(ids, skip_special_tokens=True) and ends.closed(ids) == ids


def ids_of(tokenizer, *tokens):
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def test_a_string_may_begin_within_a_token():
    tokenizer = byte_level()
    ids, ends = ids_of(tokenizer, "a", ".#", "##", "b"), StopStrings(tokenizer, ["###"])
    assert end_by_tail(ends, ids) == 3 and ends.text(ids[:3]) == "a."
    assert tokenizer.convert_ids_to_tokens(ends.closed(ids[:3])) == ["a", ".", "</s>"]


def test_text_behind_a_string_in_its_last_token_is_lost():
    tokenizer = byte_level()
    ids, ends = ids_of(tokenizer, "a", "ĊHu", "man:", "b"), StopStrings(tokenizer, ["\nHuma"])
    assert end_by_tail(ends, ids) == 3 and ends.text(ids[:3]) == "a"
    assert ends.closed(ids[:3]) == ids_of(tokenizer, "a", "</s>")


def test_of_two_strings_the_one_that_begins_first_counts():
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "a", "ĊĊ", "Human", ":")
    assert StopStrings(tokenizer, ["Human:", "\nHuman:"]).text(ids) == "a\n"


@pytest.mark.parametrize("strings", [["<|user|>"], ["a<|us"], ["|>"]])
def test_names_of_special_tokens_end_answers_too(strings):
    tokenizer = byte_level()
    ids, ends = ids_of(tokenizer, "b", "a", "<|user|>", "c"), StopStrings(tokenizer, strings)
    assert end_by_tail(ends, ids) == 3
    assert ends.text(ids[:3]) == ("b" if strings == ["a<|us"] else "ba")
    assert ends.closed(ids[:3]) == ids_of(tokenizer, *ends.text(ids[:3]), "</s>")


def test_a_special_token_within_a_string_hides_nothing():
    tokenizer = byte_level()
    ids, ends = ids_of(tokenizer, "b", "##", "<|user|>", "#"), StopStrings(tokenizer, ["###"])
    assert end_by_tail(ends, ids) == 4 and ends.text(ids) == "b"


def test_an_end_token_is_no_part_of_the_text_whatever_strings_its_name_holds():
    tokenizer = byte_level()
    ids, ends = ids_of(tokenizer, "b", "a", "</s>"), StopStrings(tokenizer, ["s"])
    assert ends.text(ids) == "ba" and ends.closed(ids) == ids


def test_what_is_spelled_like_a_special_token_is_not_closed_as_one():
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "<|", "user", "|>#")
    assert StopStrings(tokenizer, ["#"]).closed(ids) == ids_of(tokenizer, "<|", "user", "|", ">", "</s>")


def test_an_empty_answer_is_closed_all_the_same():
    tokenizer = tiny_tokenizer()
    ends = StopStrings(tokenizer, ["cat"])
    ids = ids_of(tokenizer, "cat")
    assert ends.ends(ids) and ends.text(ids) == "" and ends.closed(ids) == [EOS]


def test_answers_are_closed_as_the_chat_template_closes_them():
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|user|>{% endfor %}"
    ids = ids_of(tokenizer, "a", "###")
    assert StopStrings(tokenizer, ["###"]).closed(ids) == ids_of(tokenizer, "a", "<|user|>")


def noted(tokenizer, monkeypatch):
    """A list that fills with the numbers of tokens that are decoded."""
    counts, decode = [], tokenizer.decode

    def decoded(ids, **options):
        counts.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", decoded)
    return counts


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_token_costs_the_same_however_long_the_answer_is(make, monkeypatch):
    tokenizer = make()
    ids = drawn_ids(random.Random(3), tokenizer, 1500)
    counts = noted(tokenizer, monkeypatch)
    ends = StopStrings(tokenizer, ["\nHuman: no", "### END"])
    assert end_by_tail(ends, ids) is None
    assert max(counts) <= 4 * (10 + 8 + 41) + 3, "the longest string, what may read differently, the longest token"
    usual = ids_of(tokenizer, "a") * 3000
    ends.ends(usual[:1])
    del counts[:]
    assert end_by_tail(ends, usual) is None and not counts, "a token that completes no string is not decoded again"


def test_nothing_is_kept_of_an_answer():
    """One judge of ends for all answers of a batch, in any order."""
    tokenizer, draw = byte_level(), random.Random(4)
    answers = [drawn_ids(draw, tokenizer, 40) for _ in range(20)]
    strings = ["#", "man", "漢"]
    shared = StopStrings(tokenizer, strings)
    ends = {}
    for length in range(1, 41):
        for i in draw.sample(range(20), 20):
            if i not in ends and shared.ends(answers[i][:length]):
                ends[i] = length
    assert {i: end_by_prefixes(tokenizer, strings, ids) for i, ids in enumerate(answers)} == {
        i: ends.get(i) for i in range(20)
    }


def test_without_strings_an_answer_is_all_of_its_text():
    tokenizer = tiny_tokenizer()
    ids = [VOCABULARY.index("the"), VOCABULARY.index("cat"), EOS]
    assert answer_text(ids, tokenizer, Sampling(5)) == "the cat"
    assert answer_text(ids, tokenizer, Sampling(5, text_ends=StopStrings(tokenizer, ["at"]))) == "the c"


def test_a_stop_token_that_is_no_special_token_is_not_read():
    tokenizer = tiny_tokenizer()
    the, cat, end = tokenizer.convert_tokens_to_ids(["the", "cat", "and"])
    for ends in (None, StopStrings(tokenizer, ["dog"])):
        sampling = Sampling(5, stop_token_ids=frozenset({end, EOS}), text_ends=ends)
        assert answer_text([the, cat, end], tokenizer, sampling) == "the cat"
        assert answer_text([the, end, cat, EOS], tokenizer, sampling) == "the and cat"
        assert answer_text([the, cat], tokenizer, sampling) == "the cat"
        assert answer_text([end], tokenizer, sampling) == answer_text([], tokenizer, sampling) == ""


def test_a_judge_is_given_no_more_tokens_than_it_has_room_for():
    """What stands before the string in its token is a token of its own, beside that of the end."""
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "a", ".#")
    for longest, wanted in ((None, ["a", ".", "</s>"]), (3, ["a", ".", "</s>"]), (2, ["a", "</s>"])):
        ends = StopStrings(tokenizer, ["#"], longest=longest)
        assert ends.text(ids) == "a." and tokenizer.convert_ids_to_tokens(ends.closed(ids)) == wanted


def test_a_string_that_the_stop_token_completes_is_cut_as_a_whole():
    tokenizer = tiny_tokenizer()
    the, cat, end = tokenizer.convert_tokens_to_ids(["the", "cat", "and"])
    for strings, ids in ((["cat and"], [the, cat, end]), ([f" cat {tokenizer.eos_token}"], [the, cat, EOS])):
        ends = StopStrings(tokenizer, strings)
        sampling = Sampling(5, stop_token_ids=frozenset({end, EOS}), text_ends=ends)
        assert answer_text(ids, tokenizer, sampling).strip() == "the"
        assert ends.closed(ids)[0] == the and cat not in ends.closed(ids)
