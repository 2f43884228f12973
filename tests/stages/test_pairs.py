"""Preference pairs as token ids: what PPO would see of the same answers."""

import json

import pytest

from tests.data.loading import load_pairs, load_prompts
from tests.tiny import BOS, EOS, tiny_tokenizer
from tether.data.pairs import Pair, split_pairs
from tether.errors import ConfigError, DataError

USER = {"role": "user", "content": "the cat sees"}


def assistant(text):
    return {"role": "assistant", "content": text}


def load(tmp_path, rows, tokenizer, **options):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return load_pairs(str(file), tokenizer, key="data.pairs", **options)


def ids(text, tokenizer):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "the cat sees", "chosen": "a dog", "rejected": "rain"},
        {"prompt": [USER], "chosen": "a dog", "rejected": "rain"},
        {"prompt": [USER], "chosen": [assistant("a dog")], "rejected": [assistant("rain")]},
        {"chosen": [USER, assistant("a dog")], "rejected": [USER, assistant("rain")]},
        {"prompt": "the cat sees", "chosen": [USER, assistant("a dog")], "rejected": [USER, assistant("rain")]},
        {"prompt": "the cat sees", "chosen": "a dog<eos>", "rejected": "rain"},
    ],
    ids=["text", "messages", "messages all", "conversations", "conversations and a prompt", "already closed"],
)
@pytest.mark.parametrize("bos", [False, True])
def test_every_form_is_the_policys_query_and_answer_closed_by_the_end_token(tmp_path, row, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    (pair,) = load(tmp_path, [row], tokenizer).pairs
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the cat sees"}))
    (prompt,) = load_prompts(str(tmp_path / "prompts.jsonl"), tokenizer).prompts
    assert pair.chosen_ids == (*prompt.token_ids, *ids("a dog", tokenizer), EOS)
    assert pair.rejected_ids == (*prompt.token_ids, *ids("rain", tokenizer), EOS)
    assert pair.query_length == len(prompt.token_ids)
    assert pair.query == prompt.text
    assert pair.chosen_ids.count(BOS) == bos


def test_text_is_taken_as_it_is_without_a_template(tmp_path):
    row = {"prompt": "the cat sees", "chosen": "a dog", "rejected": "rain"}
    for tokenizer, template in [(tiny_tokenizer(chat_template=False), "auto"), (tiny_tokenizer(), "none")]:
        (pair,) = load(tmp_path, [row], tokenizer, chat_template=template).pairs
        assert pair.chosen_ids == (*ids("the cat sees a dog", tokenizer), EOS)
        assert pair.query_length == 3


@pytest.mark.parametrize("bos", [False, True])
def test_whole_texts_are_never_wrapped(tmp_path, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    (pair,) = load(tmp_path, [{"chosen": "the cat is good", "rejected": "the cat is bad"}], tokenizer).pairs
    start = (BOS,) if bos else ()
    assert pair.chosen_ids == (*start, *ids("the cat is good", tokenizer), EOS)
    assert pair.query == ""


def test_the_system_prompt_is_put_before_prompts_that_bring_none(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": "the cat sees", "chosen": "a dog", "rejected": "rain"}]
    (pair,) = load(tmp_path, rows, tokenizer, system_prompt="you nice").pairs
    assert pair.query.startswith("<system> you nice <eos> <user> the cat sees")


def test_an_answer_is_closed_by_the_end_token_of_the_template(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "<system>")
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps([{"prompt": "the cat sees", "chosen": "a dog", "rejected": "rain"}]))
    turn_end = tokenizer.convert_tokens_to_ids("<system>")
    (pair,) = load_pairs(str(file), tokenizer, end_ids={EOS, turn_end}).pairs
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == turn_end
    (pair,) = load_pairs(str(file), tokenizer, end_ids={EOS}).pairs
    assert pair.chosen_ids[-1] == EOS
    # Phi's own templates write their turn's end, and the tokenizer's end token behind the whole conversation
    tokenizer.chat_template += "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    (pair,) = load_pairs(str(file), tokenizer, end_ids={EOS, turn_end}).pairs
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == turn_end


def test_pairs_over_the_limit_and_equal_pairs_are_dropped_and_counted(tmp_path):
    rows = [
        {"prompt": "the", "chosen": "good", "rejected": "bad"},
        {"prompt": "the", "chosen": "good " * 20, "rejected": "bad"},
        {"prompt": "the", "chosen": "good", "rejected": "bad " * 20},
        {"prompt": "the", "chosen": "good", "rejected": "good"},
    ]
    data = load(tmp_path, rows, tiny_tokenizer(), limit=6)
    assert [pair.row for pair in data.pairs] == [0]
    assert (data.num_rows, data.num_too_long, data.num_equal) == (4, 2, 1)
    assert len(data.pairs[0].chosen_ids) == 6, "the limit itself is allowed"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "the", "answer": "good"}], r"no column chosen and rejected; its columns are: prompt, answer"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}, {"chosen": "b"}], r"row 1 \(line 2\), rejected: got None"),
        ([{"prompt": "a", "chosen": 3, "rejected": "bad"}], "row 0 .*chosen: got 3, wanted text or a list"),
        ([{"chosen": [USER], "rejected": [USER]}], "chosen: the last message is .*wanted the assistant's"),
        ([{"chosen": [assistant("a")], "rejected": [assistant("b")]}], "one message and no column prompt"),
        ([{"chosen": [USER, assistant("a")], "rejected": [USER, USER, assistant("b")]}], "answer different prompts"),
        ([{"prompt": "", "chosen": "good", "rejected": "bad"}], "row 0 .* has no prompt"),
        ([{"prompt": "a", "chosen": "good", "rejected": "good"}], r"no row of .* \(1 row\) .* in 1 both answers"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c \ud83d"}], r"rejected: got '\\ud83d' at character 2"),
        ([{"prompt": p, "chosen": "b", "rejected": "c"} for p in ("a", None)], "row 1 .* has no prompt, although "),
        ([{"question": "a", "chosen": "b", "rejected": "c"}], "a column question. Rename it to prompt; leave it out"),
        ([{"prompt": "a " * 99, "chosen": "good", "rejected": "bad"}], "1 are longer than data.max_length 64"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_told_with_its_row(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, rows, tiny_tokenizer())


def test_a_system_prompt_has_no_place_before_whole_texts(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.system_prompt .* whole texts"):
        load(tmp_path, [{"chosen": "good", "rejected": "bad"}], tiny_tokenizer(), system_prompt="you nice")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end token"):
        load(tmp_path, [{"prompt": "a", "chosen": "good", "rejected": "bad"}], tokenizer)


def pair(row, query):
    return Pair(row, query, (1, 2), (1, 3), 1)


def test_pairs_of_one_prompt_stay_on_one_side():
    pairs = [pair(i, f"prompt {i // 3}") for i in range(30)]
    train, held_out = split_pairs(pairs, 0.2, seed=0)
    assert sorted(p.row for p in (*train, *held_out)) == list(range(30))
    assert [p.row for p in held_out] == sorted(p.row for p in held_out)
    assert len(held_out) == 6
    assert not {p.query for p in train} & {p.query for p in held_out}


def test_the_split_is_drawn_by_the_seed():
    pairs = [pair(i, "") for i in range(40)]
    drawn = {seed: [p.row for p in split_pairs(pairs, 0.25, seed)[1]] for seed in (0, 1)}
    assert drawn[0] == [p.row for p in split_pairs(pairs, 0.25, 0)[1]]
    assert drawn[0] != drawn[1]
    assert len(drawn[0]) == len(drawn[1]) == 10


def test_a_share_of_zero_holds_out_none_and_one_prompt_always_stays():
    pairs = [pair(i, "only") for i in range(4)]
    assert split_pairs(pairs, 0.0, 0) == (pairs, [])
    assert split_pairs(pairs, 0.5, 0) == (pairs, [])
