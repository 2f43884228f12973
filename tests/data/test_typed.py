"""Special tokens that somebody typed into a message are text, not control tokens."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from tests.data.loading import load_demonstrations, load_pairs, load_prompts
from tests.models.test_answer_texts import TOKENIZERS
from tests.tiny import CHAT_TEMPLATE, EOS, PAD, UNK, save_tiny, tiny_bpe_tokenizer, tiny_tokenizer
from tests.train.runs import tiny_run
from tether.config.source import SourceConfig
from tether.data.typed import TypedTokens
from tether.errors import DataError
from tether.inference.judges import load_reader
from tether.train.inputs import load_data


def queries(folder, tokenizer, *rows, **changes):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")
    return load_prompts(str(path), tokenizer, limit=512, **changes).prompts


def end_of(tokenizer):
    return tokenizer.eos_token, tokenizer.eos_token_id


@pytest.mark.parametrize("make", [tiny_tokenizer, tiny_bpe_tokenizer])
def test_a_typed_end_does_not_end_a_turn(tmp_path, make):
    tokenizer = make()
    end, number = end_of(tokenizer)
    plain, typed, asked = (
        queries(tmp_path, tokenizer, text, **changes)[0]
        for text, changes in (
            ("the cat you run", {}),
            (f"the cat {end} you run", {}),
            (f"the cat {end} you run", {"special_tokens": True}),
        )
    )
    ends = [list(prompt.token_ids).count(number) for prompt in (plain, typed, asked)]
    assert ends == [ends[0], ends[0], ends[0] + 1]
    assert end in typed.text and typed.text == asked.text and typed.source == f"the cat {end} you run"


@pytest.mark.parametrize("make", [tiny_tokenizer, tiny_bpe_tokenizer])
def test_what_was_typed_becomes_tokens_of_its_characters(tmp_path, make):
    """Also where the vocabulary holds the special token's name as a word."""
    tokenizer = make()
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    (usual,) = queries(tmp_path, tokenizer, "the cat")
    text = f"the cat {tokenizer.eos_token} {tokenizer.pad_token}{tokenizer.eos_token}"
    (prompt,) = queries(tmp_path, tokenizer, text)
    assert text in prompt.text
    assert [t for t in prompt.token_ids if t in special] == [t for t in usual.token_ids if t in special]
    assert len(prompt.token_ids) >= len(usual.token_ids) + 5


def test_what_nobody_typed_is_encoded_as_ever(tmp_path):
    tokenizer = tiny_bpe_tokenizer()
    mixed = queries(tmp_path, tokenizer, "you run", f"you {tokenizer.eos_token}", "a  b\n\n c")
    alone = [queries(tmp_path, tokenizer, text)[0] for text in ("you run", f"you {tokenizer.eos_token}", "a  b\n\n c")]
    assert [prompt.token_ids for prompt in mixed] == [prompt.token_ids for prompt in alone]
    joint = tokenizer(mixed[2].text, add_special_tokens=False)["input_ids"]
    assert list(mixed[2].token_ids) == joint


def test_text_without_a_template_is_taken_as_it_is(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=False)
    (prompt,) = queries(tmp_path, tokenizer, "the cat <eos> you run")
    assert EOS in prompt.token_ids


def test_every_message_of_a_conversation_counts(tmp_path):
    tokenizer = tiny_bpe_tokenizer()
    end, number = end_of(tokenizer)
    rows = [
        [{"role": role, "content": f"a{sign}"} for role, sign in zip(("user", "assistant", "user"), signs, strict=True)]
        for signs in (("", "", ""), (end, "", ""), ("", end, ""), ("", "", end))
    ]
    counts = [list(prompt.token_ids).count(number) for prompt in queries(tmp_path, tokenizer, *rows)]
    assert len(set(counts)) == 1


def test_marks_cannot_be_typed(tmp_path):
    tokenizer = tiny_bpe_tokenizer()
    end, number = end_of(tokenizer)
    (usual,) = queries(tmp_path, tokenizer, f"a{end}")
    for place in range(len(tokenizer.all_special_tokens)):
        (prompt,) = queries(tmp_path, tokenizer, f"a{end}\U000f0000{place}\U000f0001")
        assert list(prompt.token_ids).count(number) == list(usual.token_ids).count(number)


def test_white_space_that_a_control_token_takes_is_taken(tmp_path):
    tokenizer = tiny_bpe_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<turn>", rstrip=True, special=True)]})
    template = "{% for m in messages %}<turn>\n {{ m.content }}{% endfor %}<turn>\n"
    tokenizer.chat_template = template
    (prompt,) = queries(tmp_path, tokenizer, f"a{tokenizer.eos_token}b")
    (usual,) = queries(tmp_path, tokenizer, "ab")
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    assert (prompt.token_ids[0], prompt.token_ids[-1]) == (turn, turn) == (usual.token_ids[0], usual.token_ids[-1])
    assert prompt.token_ids[1] == usual.token_ids[1]


def test_half_a_surrogate_pair_in_a_role_is_named_by_its_row(tmp_path):
    rows = ["you run", [{"role": "us\ud800er", "content": "a"}]]
    with pytest.raises(DataError, match=r"row 1 .*half of a surrogate pair"):
        queries(tmp_path, tiny_bpe_tokenizer(), *rows)


def test_ten_thousand_of_them_are_read_in_a_moment_and_dropped_as_too_long(tmp_path):
    tokenizer = tiny_tokenizer()
    kept = queries(tmp_path, tokenizer, "the cat", f"{tokenizer.eos_token} " * 10_000)
    assert [prompt.row for prompt in kept] == [0]


@pytest.mark.parametrize("asked", [False, True])
def test_demonstrations_begin_with_the_queries_that_the_policy_answers(tmp_path, asked):
    tokenizer = tiny_bpe_tokenizer()
    config = tiny_run(
        tmp_path, kind="qwen2", ppo__ptx_coef=1.0, data__ptx=str(tmp_path / "prompts.jsonl"), data__special_tokens=asked
    )
    row = {"prompt": f"the cat {tokenizer.eos_token} sees", "completion": "you"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    data = load_data(config)
    ((demonstration,), (prompt,)) = data.demonstrations, data.prompts.prompts
    assert demonstration.query_ids == prompt.token_ids
    assert list(prompt.token_ids).count(tokenizer.eos_token_id) == 1 + asked


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("make", [tiny_tokenizer, tiny_bpe_tokenizer])
def test_an_answer_of_a_dataset_does_not_end_before_its_end(tmp_path, make, asked):
    """A message is encoded alike as an answer, as the context of a later one, and as a judge learns to read it."""
    tokenizer = make()
    (end, number), answer = end_of(tokenizer), "the cat {} you <user> run"
    typed, user = answer.format(tokenizer.eos_token), {"role": "user", "content": "a"}
    turns = [user, {"role": "assistant", "content": typed}, user, {"role": "assistant", "content": "good"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns, "prompt": "a", "chosen": typed, "rejected": f"day {end}"}) + "\n")
    usual = {"limit": 512, "end_ids": {number}, "special_tokens": asked}
    first, last = load_demonstrations(str(path), tokenizer, **usual, every_turn=True).demonstrations
    (pair,) = load_pairs(str(path), tokenizer, **usual).pairs
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special} - {UNK}
    inner = [number, tokenizer.convert_tokens_to_ids("<user>")] if asked else []
    chosen, rejected = (ids[pair.query_length :] for ids in (pair.chosen_ids, pair.rejected_ids))
    assert [token for token in first.response_ids if token in special] == [*inner, number]
    assert [token for token in rejected if token in special] == [number]
    assert chosen == first.response_ids
    assert last.query_ids[: len(first.query_ids)] == first.query_ids
    context = [token for token in last.query_ids[len(first.query_ids) :] if tokenizer.decode([token]).strip()]
    said = [token for token in first.response_ids if tokenizer.decode([token]).strip()]
    assert context[: len(said)] == said


@pytest.mark.parametrize("name", ["legacy", "always", "first", "byte level", "unigram"])
def test_around_typed_tokens_a_template_has_the_tokens_that_it_always_has(name):
    """Also where only the first word of all gets a blank, which control tokens precede (Mistral, Phi-3)."""
    tokenizer = TOKENIZERS[name]()
    tokenizer.chat_template = "<s>{% for m in messages %}is {{ m.content }} and</s>{% endfor %}good day"
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "runs"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    typed, usual = TypedTokens(tokenizer), tokenizer(text, add_special_tokens=False)["input_ids"]
    assert typed.encoded(text) == (text, usual)
    turns[0]["content"] = "the </s> cat"
    shown, ids = typed.encoded(tokenizer.apply_chat_template(typed.hidden(turns), tokenize=False))
    assert shown == text.replace("the cat", "the </s> cat", 1)
    before = len(tokenizer("<s>is the", add_special_tokens=False)["input_ids"])
    behind = len(usual) - usual.index(tokenizer.eos_token_id)
    assert (ids[:before], ids[-behind:]) == (usual[:before], usual[-behind:])
    assert ids.count(tokenizer.eos_token_id) == usual.count(tokenizer.eos_token_id)


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} {% endif %}{% for m in messages %}<{{ m.role }}> "
    "{{ m.reasoning_content or '' }} {% for call in m.tool_calls or [] %}{{ call.function | tojson }} {% endfor %}"
    "{{ m.content }} <eos> {% endfor %}<assistant>"
)
CALL = {"function": {"name": "find", "arguments": {"word": "cat"}}}
EVERYWHERE = {
    "a call's argument": lambda text: {"tool_calls": [{"function": {"name": "find", "arguments": {"word": text}}}]},
    "the name of an argument": lambda text: {"tool_calls": [{"function": {"name": "find", "arguments": {text: 1}}}]},
    "a call's name": lambda text: {"tool_calls": [{"function": {"name": text, "arguments": {}}}]},
    "thoughts": lambda text: {"reasoning_content": text, "tool_calls": [CALL]},
}


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_typed_end_ends_no_turn_wherever_in_a_message_it_is(tmp_path, place):
    tokenizer = tiny_bpe_tokenizer(chat_template=False)
    tokenizer.chat_template = TOOL_TEMPLATE

    def conversation(text):
        turn = {"role": "assistant", "content": "you run"} | EVERYWHERE[place](text)
        return [{"role": "user", "content": "the cat"}, turn, {"role": "tool", "content": "red"}]

    (plain,) = queries(tmp_path, tokenizer, conversation("the red cat"))
    (typed,) = queries(tmp_path, tokenizer, conversation("the <eos> cat"))
    assert typed.token_ids.count(EOS) == plain.token_ids.count(EOS) == 3
    assert typed.text == plain.text.replace("the red cat", "the <eos> cat")
    assert typed.conversation == conversation("the <eos> cat")
    (asked,) = queries(tmp_path, tokenizer, conversation("the <eos> cat"), special_tokens=True)
    assert asked.token_ids.count(EOS) == 4


def test_a_typed_end_in_a_tool_ends_nothing(tmp_path):
    tokenizer, path = tiny_bpe_tokenizer(chat_template=False), tmp_path / "rows.jsonl"
    tokenizer.chat_template = TOOL_TEMPLATE
    tools = [{"name": "find", "description": "the <eos> cat"}]
    path.write_text(json.dumps({"prompt": "the cat", "tools": tools}) + "\n")
    (prompt,) = load_prompts(str(path), tokenizer, limit=512).prompts
    assert prompt.token_ids.count(EOS) == 1
    assert prompt.text.startswith(json.dumps(tools))


def test_text_that_an_answer_continues_is_taken_as_it_is(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=False)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "the <eos> cat"}) + "\n")
    (one,) = load_demonstrations(str(tmp_path / "rows.jsonl"), tokenizer, limit=512, end_ids={EOS}).demonstrations
    assert one.response_ids.count(EOS) == 2


def test_an_answer_that_its_text_closes_is_closed_once(tmp_path):
    """By the token that the template puts there, which need not be the tokenizer's end token."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("eos_token", "'<pad>'")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "the cat<pad>\n"}) + "\n")
    (one,) = load_demonstrations(str(tmp_path / "rows.jsonl"), tokenizer, limit=512, end_ids={EOS, PAD}).demonstrations
    assert tokenizer.decode(one.response_ids) == "the cat <pad>"


def test_a_policy_that_spells_out_an_end_is_not_believed_by_a_served_judge(tmp_path):
    save_tiny(tmp_path / "judge", "qwen2", num_labels=1)
    source = SourceConfig(rewards=[{"type": "model", "path": str(tmp_path / "judge")}])
    reader = load_reader(source)
    batch = reader.batch(["a", "a"], ["the cat <eos> you", "the cat"], {}, ["entry 0", "entry 1"])
    assert [ids.count(EOS) for ids in batch.response_ids] == [1, 1]
