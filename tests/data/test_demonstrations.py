"""Demonstrations: every form of a row as the tokens before and the tokens that are trained on, and their batches."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from tests.data.loading import load_demonstrations, load_prompts
from tests.tiny import BOS, EOS, VOCABULARY, tiny_bpe_tokenizer, tiny_tokenizer
from tether.data.demonstrations import Demonstration, demonstration_batches
from tether.data.stream import PromptStream
from tether.errors import ConfigError, DataError


def write(folder, rows):
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def load(tmp_path):
    """Loads rows through a .jsonl file."""

    def load(rows, tokenizer=None, **options):
        return load_demonstrations(write(tmp_path, rows), tokenizer, key="data.ptx", **options)

    return load


def ids(text):
    return tuple(VOCABULARY.index(word) for word in text.split())


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


ONE_ANSWER = {
    "text": {"prompt": "the cat", "completion": "a dog"},
    "messages": {"prompt": [user("the cat")], "completion": [assistant("a dog")]},
    "messages and text": {"prompt": [user("the cat")], "completion": "a dog"},
    "text and messages": {"prompt": "the cat", "completion": [assistant("a dog")]},
    "already closed": {"prompt": "the cat", "completion": "a dog <eos>"},
    "a conversation": {"messages": [user("the cat"), assistant("a dog")]},
    "a prompt before messages": {"prompt": "the cat", "completion": "a dog", "messages": [user("x")], "text": "x"},
    "messages before text": {"prompt": "x", "messages": [user("the cat"), assistant("a dog")], "text": "x"},
}


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("form", ONE_ANSWER)
def test_a_form_is_the_policys_query_and_an_answer_closed_by_the_end_token(load, tmp_path, form, bos):
    (demonstration,) = load([ONE_ANSWER[form]], tiny_tokenizer(bos=bos)).demonstrations
    assert demonstration.query_ids == ((BOS,) if bos else ()) + ids("<user> the cat <eos> <assistant>")
    assert demonstration.response_ids == ids("a dog <eos>")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the cat"}))
    prompts = load_prompts(str(tmp_path / "prompts.jsonl"), tiny_tokenizer(bos=bos)).prompts
    assert demonstration.query_ids == prompts[0].token_ids


TURNS = [user("the cat"), assistant("a dog"), user("very good"), assistant("is it")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"prompt": "the cat", "completion": TURNS[1:]},
        {"prompt": "the cat", "chosen": TURNS[1:], "rejected": "x"},
        {"prompt": "the cat", "chosen": TURNS, "rejected": "x"},
    ],
    ids=["messages", "three to come", "one to come", "three to come after text", "chosen", "chosen, the whole"],
)
def test_of_a_conversation_the_last_turn_is_trained_on(load, row):
    (demonstration,) = load([row]).demonstrations
    assert demonstration.query_ids == ids(
        "<user> the cat <eos> <assistant> a dog <eos> <user> very good <eos> <assistant>"
    )
    assert demonstration.response_ids == ids("is it <eos>")


def test_text_is_taken_as_it_is_without_a_template(load):
    row = {"prompt": "the cat", "completion": "a dog"}
    for tokenizer, mode in [(tiny_tokenizer(chat_template=False), "auto"), (tiny_tokenizer(), "none")]:
        (demonstration,) = load([row], tokenizer, chat_template=mode).demonstrations
        assert (demonstration.query_ids, demonstration.response_ids) == (ids("the cat"), ids("a dog <eos>"))


@pytest.mark.parametrize("system_prompt", [None, "you nice"])
def test_plain_text_is_trained_on_but_for_its_first_token(load, system_prompt):
    rows = [{"text": "the cat sees a dog"}, {"text": "rain <eos>"}]
    first, second = load(rows, system_prompt=system_prompt).demonstrations
    assert (first.query_ids, first.response_ids) == (ids("the"), ids("cat sees a dog")), "no template and no end token"
    assert (second.query_ids, second.response_ids) == (ids("rain"), ids("<eos>")), "an end token that is written there"


def test_the_first_token_of_plain_text_is_the_bos_where_there_is_one(load):
    tokenizer = tiny_tokenizer(bos=True)
    for demonstration in load([{"text": "the cat"}, {"text": "<bos> the cat"}], tokenizer).demonstrations:
        assert (demonstration.query_ids, demonstration.response_ids) == ((BOS,), ids("the cat"))
    (one,) = load([{"text": "cat"}], tokenizer).demonstrations
    assert one.response_ids == ids("cat"), "one token is enough after a BOS"


def test_a_byte_pair_tokenizer(load):
    tokenizer = tiny_bpe_tokenizer()
    rows = [{"messages": [user("the cat"), assistant("a dog")]}]
    (demonstration,) = load(rows, tokenizer, end_ids={tokenizer.eos_token_id}).demonstrations
    assert tokenizer.decode(demonstration.query_ids) == "<user> the cat <eos> <assistant>"
    assert tokenizer.decode(demonstration.response_ids) == " a dog<eos>", "with the blank that the template writes"


def test_a_system_prompt_is_for_prompts_that_bring_none(load):
    rows = [{"messages": [user("dog"), assistant("is")]}, {"messages": [{"role": "system", "content": "we"}, *TURNS]}]
    first, second = load(rows, system_prompt="you").demonstrations
    assert first.query_ids == ids("<system> you <eos> <user> dog <eos> <assistant>")
    assert second.query_ids[:6] == ids("<system> we <eos> <user> the cat")
    with pytest.raises(ConfigError, match=r"data\.system_prompt needs a chat template"):
        load([{"prompt": "dog", "completion": "is"}], chat_template="none", system_prompt="you")


def test_an_answer_is_closed_by_the_end_token_of_the_template(load):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "<system>")
    rows, (turn_end,) = [{"prompt": "the cat", "completion": "a dog"}], ids("<system>")
    assert load(rows, tokenizer, end_ids={EOS, turn_end}).demonstrations[0].response_ids == (*ids("a dog"), turn_end)
    assert load(rows, tokenizer, end_ids={EOS}).demonstrations[0].response_ids == (*ids("a dog"), EOS)


def test_demonstrations_over_the_limit_are_dropped_and_counted(load):
    rows = [{"text": text} for text in ("the cat", "the cat sees a dog", "rain or sun", "a dog and a cat")]
    data = load(rows, limit=3)
    assert [each.row for each in data.demonstrations] == [0, 2], "the limit itself is allowed"
    assert (data.num_rows, data.num_too_long) == (4, 2)
    rows = [{"prompt": "cat", "completion": "is"}, {"prompt": "cat", "completion": "is not"}]
    data = load(rows, limit=6)  # <user> cat <eos> <assistant> is <eos>
    assert [each.row for each in data.demonstrations] == [0]


def test_nothing_within_the_limit(load):
    told = r"data\.ptx: every demonstration of .* \(2 demonstrations\) .*max_ptx_length 2; the shortest has 3"
    with pytest.raises(DataError, match=told):
        load([{"text": "the cat is"}, {"text": "the cat is red"}], limit=2)


def test_no_rows(tmp_path):
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(DataError, match=r"^data\.ptx: .*none\.json has no rows$"):
        load_demonstrations(str(tmp_path / "none.json"), key="data.ptx")


@pytest.mark.parametrize("names", [("prompt",), ("completion", "label"), ("better", "rejected")])
def test_no_column_to_train_on(load, names):
    message = rf"jsonl has neither the columns prompt and completion, .*; its columns are: {', '.join(names)}\. Rename"
    with pytest.raises(DataError, match=message):
        load([dict.fromkeys(names, "cat")])


GOOD = {"completion": {"prompt": "cat", "completion": "is"}, "messages": {"messages": TURNS}, "text": {"text": "a cat"}}
REFUSED = {
    "no answer": ({"prompt": "cat"}, r", completion: got None, wanted text or a list of chat messages"),
    "blank answer": ({"prompt": "cat", "completion": " "}, r", completion: got ' ', wanted text"),
    "a number": ({"prompt": "cat", "completion": 3}, r", completion: got 3, wanted text or a list"),
    "half a pair": ({"prompt": "cat", "completion": "a \ud800"}, r", completion: got '\\ud800' at character 2, half"),
    "no prompt": ({"completion": "is"}, r" has no prompt: got None"),
    "blank prompt": ({"prompt": "", "completion": "is"}, r" has no prompt: got ''"),
    "the user's completion": (
        {"prompt": "cat", "completion": [user("is")]}, r", completion: the last message is .*user.*wanted the"
    ),
    "no conversation": ({"messages": None}, r", messages: got None, wanted text or a list of chat messages"),
    "an empty conversation": ({"messages": []}, r", messages: got \[\], wanted text or a list of chat messages"),
    "an open conversation": ({"messages": TURNS[:3]}, r", messages: the last message is .*wanted the assistant's"),
    "a lone answer": ({"messages": TURNS[3:]}, r", messages: got the assistant's message alone, wanted the conv"),
    "two answers": ({"messages": [*TURNS, assistant("is")]}, r": the prompt already ends its answer: .*assistant's"),
    "an empty answer": ({"messages": [*TURNS[:3], assistant("")]}, r", messages: got '', wanted text"),
    "no role": ({"messages": [{"content": "cat"}, assistant("is")]}, r", message 0: role is None, wanted text"),
    "parts": ({"messages": [user("cat"), assistant(["is"])]}, r", messages: the last message is .*text as content"),
    "no text": ({"text": None}, r", text: got None, wanted text"),
    "a list": ({"text": ["cat", "is"]}, r", text: got \['cat', 'is'\], wanted text"),
    "half a pair of text": ({"text": "\udfff"}, r", text: got '\\udfff' at character 0, half of a surrogate pair"),
    "one token": ({"text": "cat"}, r", text: wanted at least 2 tokens, as the first is not trained on; got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows_are_named(load, name):
    row, message = REFUSED[name]
    form = next(form for form in GOOD if form in row or (form == "completion" and "prompt" in row))
    with pytest.raises(DataError, match=rf"^data\.ptx: .*demonstrations\.jsonl, row 1 \(line 2\){message}"):
        load([GOOD[form], row])


def test_messages_without_a_template(load):
    with pytest.raises(DataError, match=r"row 0 \(line 1\): .*list of chat messages, .*no chat template"):
        load([{"messages": TURNS}], tiny_tokenizer(chat_template=False))


def test_answers_need_an_end_token_and_plain_text_does_not(load):
    tokenizer = tiny_tokenizer(chat_template=False)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end token"):
        load([{"prompt": "cat", "completion": "is"}], tokenizer)
    assert load([{"text": "a cat"}], tokenizer).demonstrations[0].response_ids == ids("cat")


# Batches


def numbered(count):
    """Demonstrations that are told by their tokens: number n has the query n + 1 and n % 3 + 1 tokens of response."""
    return [Demonstration(n, (n + 1,), (n + 1,) * (n % 3 + 1)) for n in range(count)]


def drawn(batches):
    """Numbers of the demonstrations in a step's micro-batches, in the order of the step."""
    found = {row: int(ids[mask][0]) - 1 for batch in batches
             for row, ids, mask in zip(batch.rows, batch.token_ids, batch.attention_mask, strict=True)}  # fmt: skip
    return [found[row] for row in range(len(found))]


def batches(step, count=5, batch_size=3, seed=0, max_rows=2, **options):
    options = {"batch_size": batch_size, "seed": seed, "max_rows": max_rows} | options
    return demonstration_batches(numbered(count), step, **options)


def test_a_micro_batch_trains_on_the_response():
    rows = [Demonstration(0, (7, 8, 9), (4, 5)), Demonstration(1, (6,), (1, 2, 3))]
    (batch,) = demonstration_batches(rows, 0, batch_size=2, seed=0, max_rows=2)
    longest = next(i for i, ids in enumerate(batch.token_ids.tolist()) if ids[0] == 7)
    assert batch.token_ids[longest].tolist() == [7, 8, 9, 4, 5]
    assert batch.response_mask[longest].tolist() == [True, True, False]
    assert batch.token_ids[1 - longest].tolist() == [6, 1, 2, 3, 0]
    assert batch.attention_mask[1 - longest].tolist() == [True, True, True, True, False]
    assert batch.num_response_tokens == 5


def test_each_epoch_draws_each_demonstration_once_in_an_order_of_its_own():
    stream = [number for step in range(10) for number in drawn(batches(step))]
    epochs = [stream[start : start + 5] for start in range(0, 30, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs), "batches of 3 straddle epochs of 5"
    assert len({tuple(epoch) for epoch in epochs}) > 3


def test_a_step_depends_on_its_number_and_the_seed_alone():
    forwards, backwards = ([drawn(batches(step)) for step in steps] for steps in (range(8), range(7, -1, -1)))
    assert forwards == backwards[::-1]
    assert forwards != [drawn(batches(step, seed=1)) for step in range(8)]
    for one, two in zip(batches(3), batches(3), strict=True):
        assert one.rows == two.rows and torch.equal(one.token_ids, two.token_ids)


def test_order_is_not_that_of_as_many_prompts():
    prompts = [i for i, _ in PromptStream(50, 50, seed=0).batch(0)]
    assert drawn(batches(0, count=50, batch_size=50)) != prompts


def test_fewer_demonstrations_than_a_batch_are_cycled():
    assert Counter(drawn(batches(0, count=2, batch_size=6))) == {0: 3, 1: 3}


@pytest.mark.parametrize(
    ("options", "sizes"), [({"max_rows": 2}, [2, 2, 2, 1]), ({"max_rows": 9, "max_tokens": 9}, [4, 3])]
)
def test_micro_batches_keep_within_rows_and_tokens(options, sizes):
    pairs = [Demonstration(n, (n + 1,), (n + 1,)) for n in range(9)]
    found = demonstration_batches(pairs, 1, batch_size=7, seed=0, **options)
    assert [len(batch.rows) for batch in found] == sizes
    assert sorted(row for batch in found for row in batch.rows) == list(range(7))
