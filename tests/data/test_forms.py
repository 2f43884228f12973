"""Forms of prompts, answers and pairs that other systems have: TRL's, ShareGPT's, and HH-RLHF's transcripts."""

import json

import pytest

from tests.tiny import EOS, tiny_bpe_tokenizer, tiny_tokenizer
from tether.data.demonstrations import load_demonstrations
from tether.data.forms import transcript_messages, transcript_parts
from tether.data.held_out import split_off
from tether.data.pairs import load_pairs
from tether.data.prompts import load_prompts, split_prompts
from tether.errors import DataError

HUMAN = "\n\nHuman: the cat\n\nAssistant: sees\n\nHuman: you\n\nAssistant:"
QUERY = "<user> the cat <eos> <assistant> sees <eos> <user> you <eos> <assistant>"
OPTIONS = {"split": "train", "chat_template": "auto", "system_prompt": None, "key": "data.k"}


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / "rows.jsonl")

    return write


def prompts(file, tokenizer=None, **options):
    return load_prompts(file, tokenizer or tiny_tokenizer(), max_prompt_length=64, **OPTIONS | options).prompts


def test_transcripts_are_conversations_for_a_model_with_a_template(write):
    file = write({"chosen": f"{HUMAN} runs", "rejected": f"{HUMAN} eats"})
    tokenizer = tiny_tokenizer()
    (pair,) = load_pairs(file, tokenizer, max_length=64, end_ids={EOS}, **OPTIONS).pairs
    assert tokenizer.decode(pair.chosen_ids) == f"{QUERY} runs <eos>"
    assert tokenizer.decode(pair.rejected_ids) == f"{QUERY} eats <eos>"
    assert [prompt.text for prompt in prompts(file)] == [QUERY]
    (demonstration,) = load_demonstrations(file, tokenizer, max_length=64, end_ids={EOS}, **OPTIONS).demonstrations
    assert tokenizer.decode(demonstration.response_ids) == "runs <eos>"
    assert [prompt.text for prompt in prompts(write({"prompt": HUMAN}))] == [QUERY]


@pytest.mark.parametrize("how", ["no template", "template none"])
def test_transcripts_stay_text_for_a_model_without(write, how):
    """The prompt ends with the assistant's name, and the answer is closed."""
    tokenizer = tiny_tokenizer(chat_template=how != "no template")
    options = {"chat_template": "none"} if how == "template none" else {}
    file = write({"chosen": f"{HUMAN} runs", "rejected": f"{HUMAN} eats"})
    (pair,) = load_pairs(file, tokenizer, max_length=64, end_ids={EOS}, **OPTIONS | options).pairs
    ids = tokenizer(HUMAN, add_special_tokens=False)["input_ids"]
    assert list(pair.chosen_ids[: pair.query_length]) == ids
    assert tokenizer.decode(pair.chosen_ids[pair.query_length :]) == "runs <eos>"
    assert [prompt.text for prompt in prompts(file, tokenizer, **options)] == [HUMAN]


def test_a_transcript_by_hand():
    assert transcript_messages("\n\nHuman: a\nb \n\nAssistant: c", "w") == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]
    assert transcript_messages("\n\nHuman: a\n\nAssistant:", "w") == [{"role": "user", "content": "a"}]
    assert transcript_parts("\n\nHuman: a\n\nAssistant: b\n\nAssistant: c", "w") == (
        "\n\nHuman: a\n\nAssistant: b\n\nAssistant:",
        " c",
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": f"{HUMAN} runs\n\nHuman: no", "rejected": f"{HUMAN} x"}, "chosen: the last message is .*'no'"),
        ({"chosen": f"{HUMAN} runs", "rejected": "\n\nHuman: a\n\nAssistant: b"}, "answer different prompts"),
        ({"chosen": f"{HUMAN} runs", "rejected": "\n\nHuman: a\n\nAssistant:\n\nHuman: b\n\nAssistant: c"}, "turn 1"),
        ({"chosen": f"{HUMAN} runs", "rejected": "\n\nHuman:\n\nAssistant: a\n\nHuman: b\n\nAssistant: c"}, "turn 0"),
    ],
)
def test_transcripts_that_do_not_fit_are_named(write, row, message):
    good = {"chosen": f"{HUMAN} runs", "rejected": f"{HUMAN} eats"}
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 1 \(line 2\).*{message}"):
        load_pairs(write(good, row), tiny_tokenizer(), max_length=64, end_ids={EOS}, **OPTIONS)


def test_transcripts_with_different_prompts_are_named_without_a_template_too(write):
    file = write({"chosen": f"{HUMAN} runs", "rejected": "\n\nHuman: a\n\nAssistant: b"})
    with pytest.raises(DataError, match=r"row 0 .*different prompts"):
        load_pairs(file, tiny_tokenizer(chat_template=False), max_length=64, end_ids={EOS}, **OPTIONS)
    file = write({"chosen": f"{HUMAN} runs\n\nHuman: a", "rejected": f"{HUMAN} eats"})
    with pytest.raises(DataError, match=r"row 0 .*chosen: the transcript does not end with the assistant's turn"):
        load_pairs(file, tiny_tokenizer(chat_template=False), max_length=64, end_ids={EOS}, **OPTIONS)


def test_sharegpt_columns(write):
    turns = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sees"}]
    (prompt,) = prompts(write({"conversations": turns[:1]}))
    assert prompt.source == [{"role": "user", "content": "the cat"}]
    tokenizer = tiny_tokenizer()
    file = write({"conversations": turns})
    (demonstration,) = load_demonstrations(file, tokenizer, max_length=64, end_ids={EOS}, **OPTIONS).demonstrations
    assert tokenizer.decode(demonstration.response_ids) == "sees <eos>"
    with pytest.raises(DataError, match=r"row 0 .*messages: got the turn .*wanted from and value"):
        prompts(write({"conversations": [turns[0], {"from": "gpt"}]}))


def test_the_prompt_of_a_preferred_conversation(write):
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees"}]
    (prompt,) = prompts(write({"chosen": turns, "rejected": turns, "id": 3}))
    assert prompt.text == "<user> the cat <eos> <assistant>" and prompt.columns == {"rejected": turns, "id": 3}
    with pytest.raises(DataError, match=r"row 0 .*, chosen: got text, but there is no column prompt"):
        prompts(write({"chosen": "the cat sees", "rejected": "the cat"}))


def test_arguments_of_the_template_come_from_the_run_and_from_the_row(write):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{{ ' one' if enable_thinking else ' two' }}"
    file = write({"prompt": "cat"}, {"prompt": "dog", "chat_template_kwargs": {"enable_thinking": True}})
    texts = [prompt.text for prompt in prompts(file, tokenizer, chat_template_kwargs={"enable_thinking": False})]
    assert texts == ["<user> cat <eos> <assistant> two", "<user> dog <eos> <assistant> one"]
    with pytest.raises(DataError, match=r"row 0 .*chat_template_kwargs: got 3, wanted an object"):
        prompts(write({"prompt": "cat", "chat_template_kwargs": 3}), tokenizer)


def test_the_blank_that_a_template_writes_before_an_answer_is_the_answers(write):
    """As the policy writes it; a byte-pair tokenizer has another token for the word without it."""
    file = write({"prompt": "the cat", "completion": "sees"}, {"prompt": "the cat", "completion": " sees"})
    for blank, answer in ((" ", " sees"), ("", "sees")):
        tokenizer = tiny_bpe_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template.replace("> {{", f">{blank}{{{{")
        found = load_demonstrations(file, tokenizer, max_length=64, end_ids={EOS}, **OPTIONS).demonstrations
        assert [tokenizer.decode(each.response_ids[:-1]) for each in found] == [answer, " sees"]


def test_a_share_is_held_out_by_prompt(write):
    data = load_prompts(
        write(*({"prompt": f"the {word}"} for word in ("cat", "dog", "sun", "day") * 3)),
        tiny_tokenizer(), max_prompt_length=64, **OPTIONS,
    )  # fmt: skip
    train, held_out = split_prompts(data, 0.25, seed=1)
    assert (len(train.prompts), len(held_out.prompts)) == (9, 3)
    assert not {p.text for p in train.prompts} & {p.text for p in held_out.prompts}
    assert "9 trained on" in train.note and "3 held out" in held_out.note


def test_the_share_is_drawn_by_the_seed_and_leaves_something():
    halves = [split_off(range(20), 0.5, seed, lambda item: item)[1] for seed in (1, 1, 2)]
    assert halves[0] == halves[1] != halves[2] and len(halves[0]) == 10
    assert split_off([7] * 5, 0.9, 1, lambda item: item) == ([7] * 5, [])
    assert split_off(range(3), 0.0, 1, lambda item: item) == ([0, 1, 2], [])


def test_datasets_of_several_forms_are_joined(tmp_path):
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "runs"}]
    forms = {
        "answers": {"prompt": "you", "completion": "eats"},
        "chats": {"messages": turns},
        "texts": {"text": "the sun is red"},
        "pairs": {"chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "eats"}]},
        "asked": {"messages": turns[:1]},
    }
    files = {}
    for name, row in forms.items():
        files[name] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    sources = [files[name] for name in ("answers", "chats", "texts", "pairs")]
    tokenizer = tiny_tokenizer()
    read = load_demonstrations(sources, tokenizer, max_length=64, end_ids={EOS}, **OPTIONS).demonstrations
    assert [(each.row, tokenizer.decode(each.response_ids)) for each in read] == [
        (0, "eats <eos>"), (1, "runs <eos>"), (2, "sun is red"), (3, "runs <eos>"),
    ]  # fmt: skip
    queries = [prompt.text for prompt in prompts([files["answers"], files["asked"], files["pairs"]])]
    cat = "<user> the cat <eos> <assistant>"
    assert queries == ["<user> you <eos> <assistant>", cat, cat]
