"""Texts of answers that continue a plain text: joined with their prompts they are the texts of all tokens."""

import json
import random
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from tests.data.loading import load_demonstrations
from tests.models.test_stop_strings import SPECIAL, byte_fallback, byte_level, drawn_ids, finished, word_pieces
from tests.tiny import EOS, save_tiny, tiny_bpe_tokenizer, tiny_causal_lm, tiny_tokenizer
from tests.train.runs import seen_by_models, tiny_run, write
from tether.config.source import QueryConfig
from tether.data.answers import answer_lead, encoded_answers
from tether.generation.fake import FakeGenerator
from tether.generation.hf import HFGenerator
from tether.inference.generate import generate_path
from tether.inference.judges import PolicyReader
from tether.metrics.writers import read_jsonl
from tether.models.stop_strings import StopStrings, answer_text, continued
from tether.rewards.function import FunctionSource
from tether.rewards.tokens import steps
from tether.train.run import train_policy
from tether.types import Request, Sampling

LETTERS = "abcdefghijklmnopqrstuvwxyz.:\n"
WORDS = ("the", "cat", "sees", "good", "day", "is", "runs", "and")


def pieces():
    """A mark for blanks, words behind one and parts of them, as SentencePiece has them."""
    parts = [word[:i] for word in WORDS for i in range(1, len(word) + 1)]
    return list(dict.fromkeys(["▁", *LETTERS, *parts, *(f"▁{part}" for part in parts), "▁▁"]))


def sentence_piece(scheme):
    """Byte-pair encoding with the blank that SentencePiece puts before a text, in transformers' newer form."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    joined = [piece for piece in sorted(pieces(), key=len) if len(piece) > 1 and piece[:-1] in vocabulary]
    merges = [(piece[:-1], piece[-1]) for piece in joined]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme, split=False)]
    backend.decoder = decoders.Sequence(parts)
    return finished(backend)


def legacy():
    """The same in the form of Llama 2's file: a normalizer writes the blank, a decoder strips it."""
    tokenizer = sentence_piece("first")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return tokenizer


def unigram(**options):
    scores = {piece: float(len(piece) - 12) for piece in [*SPECIAL, *pieces()]}
    backend = Tokenizer(Unigram(list(scores.items()), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return finished(backend, **options)


TOKENIZERS = {
    "words": tiny_tokenizer, "byte-pair": tiny_bpe_tokenizer, "byte level": byte_level, "byte fallback": byte_fallback,
    "word pieces": word_pieces, "legacy": legacy, "unigram": unigram,
    "unigram, cleaned up": partial(unigram, clean_up_tokenization_spaces=True),
    "always": partial(sentence_piece, "always"), "first": partial(sentence_piece, "first"),
}  # fmt: skip
WITH_BLANK = ("legacy", "unigram", "always", "first")
"""Those that put a blank before a text."""


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def plain(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_query_and_its_answer_are_the_text_of_both(name):
    tokenizer, draw, differing = TOKENIZERS[name](), random.Random(0), 0
    for _ in range(300):
        query, answer = (drawn_ids(draw, tokenizer, draw.choice(sizes)) for sizes in ((1, 5, 40), (0, 1, 7)))
        before, whole = plain(tokenizer, query), plain(tokenizer, query + answer)
        if not whole.startswith(before):
            continue  # a character across the border, or a blank that is cleaned up
        assert before + continued(answer, query, tokenizer) == whole
        differing += plain(tokenizer, answer) != whole[len(before) :]
    assert differing > 20 or name in ("byte level", "byte-pair"), "the case needs answers that read differently alone"


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "first", "legacy"])
def test_a_character_across_the_border_belongs_to_the_answer(name):
    tokenizer = TOKENIZERS[name]()
    vocabulary = tokenizer.get_vocab()
    bytes_of = (lambda b: f"<0x{b:02X}>") if "<0x00>" in vocabulary else byte_letters
    start = [vocabulary["a"]]
    ids = [vocabulary[bytes_of(byte)] for byte in "漢🙂é".encode()]
    for border in range(1, len(ids)):
        kept = ids[:border]
        whole_characters = bytes(b"\xe6\xbc\xa2\xf0\x9f\x99\x82\xc3\xa9"[:border]).decode(errors="ignore")
        answer = continued([*ids[border:], *start], start + kept, tokenizer)
        assert "\ufffd" not in answer and whole_characters + answer == "漢🙂éa", border
        assert answer_text([*ids[border:], *start], tokenizer, Sampling(9), start + kept) == answer


def byte_letters(byte):
    """The letter by which byte-level tokenizers write a byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in own]
    return chr(byte) if byte in own else chr(256 + others.index(byte))


def test_a_blank_before_special_tokens_that_the_answer_pulls_back_takes_nothing_from_it():
    tokenizer = TOKENIZERS["unigram, cleaned up"]()
    query, answer = (tokenizer.convert_tokens_to_ids(ids) for ids in (["▁cat", "▁", *["<unk>"] * 4], [".", "▁day"]))
    assert (plain(tokenizer, query), plain(tokenizer, query + answer)) == ("cat ", "cat. day")
    assert continued(answer, query, tokenizer) == ". day"


@pytest.mark.parametrize("name", WITH_BLANK)
def test_the_first_blank_stays(name):
    tokenizer = TOKENIZERS[name]()
    query = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    whole = tokenizer("the cat sees the day", add_special_tokens=False)["input_ids"]
    answer = [*whole[len(query) :], tokenizer.eos_token_id]
    sampling = Sampling(9, stop_token_ids=frozenset({tokenizer.eos_token_id}))
    assert answer_text(answer, tokenizer, sampling, query) == " sees the day"
    assert answer_text(answer, tokenizer, sampling) == "sees the day", "in a conversation it is a message of its own"


@pytest.mark.parametrize("name", WITH_BLANK)
def test_a_stop_string_may_begin_with_the_first_blank(name):
    tokenizer = TOKENIZERS[name]()
    query = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    answer = tokenizer("the cat is good day", add_special_tokens=False)["input_ids"][len(query) :]
    for string, text in ((" is", ""), (" good", " is"), ("ood", " is g"), ("the cat is", None)):
        ends = StopStrings(tokenizer, [string])
        stopped = [ends.ends(answer[:count], query) for count in range(1, len(answer) + 1)]
        assert any(stopped) == (text is not None), "a string does not begin in the prompt"
        if text is not None:
            count = stopped.index(True) + 1
            sampling = Sampling(9, text_ends=ends)
            assert answer_text(answer[:count], tokenizer, sampling, query) == text
            closed = ends.closed(answer[:count], query)
            assert closed[-1] == tokenizer.eos_token_id and continued(closed, query, tokenizer) == text
    sampling = Sampling(9, text_ends=StopStrings(tokenizer, [" is"]))
    made = FakeGenerator([answer]).generate([Request(query, 0, query)], sampling)
    assert [completion.finish_reason for _, completion in made] == ["stop"]


@pytest.mark.parametrize("strings", [["good"], [" good"], ["d d"], ["\ufffe"]])
def test_stop_strings_of_continuing_answers_are_those_of_their_text(tokenizer, strings):
    draw = random.Random(1)
    for _ in range(60):
        query, answer = (drawn_ids(draw, tokenizer, count) for count in (6, 12))
        texts = [continued(answer[:count], query, tokenizer) for count in range(1, 13)]
        shown = [continued(answer[:count], query, tokenizer, skip_special_tokens=False) for count in range(1, 13)]
        held = [any(s in a or s in b for s in strings) for a, b in zip(texts, shown, strict=True)]
        ends = StopStrings(tokenizer, strings)
        got = [ends.ends(answer[:count], query) for count in range(1, 13)]
        first = held.index(True) if True in held else None
        assert (got.index(True) if True in got else None) == first


TEXTS = (" sees the day", "sees", ".", " ", "\nis", "  is", "good day ", "", ":", "s and runs")


@pytest.mark.parametrize("name", [*WITH_BLANK, "byte level"])
def test_what_an_answer_is_encoded_as_reads_as_the_answer(name):
    tokenizer = TOKENIZERS[name]()
    query = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    texts = [text for text in TEXTS if name != "unigram" or "\n" not in text]
    for text, ids in zip(texts, encoded_answers(texts, [None] * len(texts), tokenizer, EOS), strict=True):
        assert ids[-1] == EOS
        assert continued(ids[:-1], query, tokenizer) == text
        assert plain(tokenizer, query + ids[:-1]) == f"the cat{text}"
    (alone,) = encoded_answers(["sees"], [""], tokenizer, EOS)
    assert plain(tokenizer, alone[:-1]) == "sees", "a message of a conversation is a text of its own"


@pytest.mark.parametrize("text", [*filter(None, TEXTS), "漢🙂"])
def test_an_answer_goes_on_without_the_blank_that_a_byte_level_tokenizer_puts_before_a_text_and_keeps(text):
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    query = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert plain(tokenizer, query) == " the cat"
    ((*ids, end),) = encoded_answers([text], [None], tokenizer, EOS)
    assert (plain(tokenizer, query + ids), end) == (f" the cat{text}", EOS)


def test_a_template_writes_no_second_blank_before_an_answer_that_gets_one_anyway():
    """Whether the tokenizer writes it in one token with the next letter or not."""
    for name in WITH_BLANK:
        tokenizer = TOKENIZERS[name]()
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        tokenizer.chat_template += "{% if add_generation_prompt %}assistant:{% endif %}"
        assert answer_lead(tokenizer) == "", name


@pytest.mark.parametrize("end", [" ", "\n", " \n "])
@pytest.mark.parametrize("name", [*WITH_BLANK, "byte level", "byte level, with a blank"])
def test_an_answer_gets_no_blank_behind_the_one_that_a_prompt_of_the_template_ends_with(tmp_path, name, end):
    """A text of prompt and answer is the template's, also if the answer holds the name of a special token."""
    tokenizer = TOKENIZERS[name.partition(",")[0]]()
    if name.endswith("with a blank"):
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    if name == "unigram":
        end = end.replace("\n", " ")
    turn = "{{ m.role + ':' + end + m.content + eos_token }}"
    start = "{% if add_generation_prompt %}{{ 'assistant:' + end }}{% endif %}"
    tokenizer.chat_template = f"{{% set end = {end!r} %}}{{% for m in messages %}}{turn}{{% endfor %}}{start}"
    answers = ["sees the day", " sees", "s"]
    if name != "unigram":  # which has no characters for it
        answers.append(f"the cat{tokenizer.eos_token} sees")
    rows = [{"prompt": "the cat", "completion": answer} for answer in answers]
    path = write("".join(json.dumps(row) + "\n" for row in rows), tmp_path / "rows.jsonl")
    data = load_demonstrations(str(path), tokenizer, limit=99)
    for one, answer in zip(data.demonstrations, answers, strict=True):
        read = tokenizer.decode([*one.query_ids, *one.response_ids])
        assert f"assistant:{end}{answer}" in read, "the template's own text"


REWARD = '''
said = []


def letters(prompts, completions, completion_ids, **columns):
    said.extend(zip(prompts, completions))
    return [[[len(text), 1.0]] for text in completions]
'''


@pytest.fixture
def policy(tmp_path):
    """A policy without a chat template whose tokenizer puts a blank before every text."""
    tokenizer, folder = legacy(), tmp_path / "policy"
    tiny_causal_lm(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def test_judges_and_records_read_the_blank_after_the_prompt(policy, tmp_path, monkeypatch):
    folder, tokenizer = policy
    prompts = write(json.dumps({"prompt": "the cat"}) + "\n", tmp_path / "own.jsonl")
    save_tiny(tmp_path / "judge", num_labels=1, chat_template=False)
    judge = {"type": "model", "path": str(tmp_path / "judge"), "name": "judge"}
    function = {"type": "function", "path": str(write(REWARD, tmp_path / "said.py")), "name": "letters"}
    changes = {"model__path": str(folder), "data__prompts": str(prompts), "rewards": [judge, function]}
    query = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    answer = tokenizer("the cat sees the day", add_special_tokens=False)["input_ids"][len(query) :]
    written = FakeGenerator([[*answer, tokenizer.eos_token_id]])
    monkeypatch.setattr(HFGenerator, "generate", lambda self, *asked: written.generate(*asked))
    seen = seen_by_models(monkeypatch)
    config = tiny_run(tmp_path, train__max_steps=1, sampling__response_length=9, **changes)
    train_policy(config)
    assert {row["response"] for row in read_jsonl(config.output_dir / "samples.jsonl")} == {" sees the day"}
    assert set(seen) == {"the cat sees the day"}
    (row,) = generate_path(folder, prompts, response_length=9)
    assert row["response"] == " sees the day"


@pytest.mark.parametrize("name", WITH_BLANK)
def test_an_answer_in_a_file_has_the_tokens_of_its_text_also_step_by_step(name):
    tokenizer = TOKENIZERS[name]()
    reader = PolicyReader(tokenizer, tokenizer.eos_token_id, QueryConfig(), is_stand_in=False)
    batch = reader.batch(["the cat", None], [" sees the day", "the cat sees"], {}, ["row 0", "row 1"])
    assert plain(tokenizer, batch.read_ids(0)) == "the cat sees the day"
    assert plain(tokenizer, batch.read_ids(1)) == "the cat sees"
    ends = [[5, 9, 13], [7, 12]]  # the ends of words
    scores = [[[end, 1.0 + end] for end in each] for each in ends]
    output = FunctionSource(lambda prompts, completions: scores, "parts").score(batch)
    assert [[end for end, _ in row] for row in steps(output, batch)] == ends
