"""Rows of a dataset as queries: chat template, BOS, limits, and rows that are refused by name."""

import json

import pytest

from tests.data.loading import load_demonstrations, load_pairs, load_prompts
from tests.tiny import BOS, EOS, VOCABULARY, tiny_bpe_tokenizer, tiny_tokenizer
from tether.compat.trl.data import prompts_of
from tether.errors import ConfigError, DataError


@pytest.fixture
def load(tmp_path):
    """Loads rows through a .jsonl file."""

    def load(rows, tokenizer=None, **options):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(str(path), tokenizer, key="data.prompts", **options)

    return load


def ids(text):
    return tuple(VOCABULARY.index(word) for word in text.split())


def user(content):
    return {"role": "user", "content": content}


CHAT = [{"role": "system", "content": "we"}, user("the cat"), {"role": "assistant", "content": "is"}, user("good")]


def test_text_for_a_chat_model_is_a_user_turn(load):
    (prompt,) = load([{"prompt": "the cat"}]).prompts
    assert prompt.source == "the cat"
    assert prompt.text == "<user> the cat <eos> <assistant>"
    assert prompt.token_ids == ids(prompt.text)


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_chat_messages_go_through_the_template(load, column):
    (prompt,) = load([{column: CHAT}]).prompts
    assert prompt.source == CHAT
    assert prompt.token_ids == ids(
        "<system> we <eos> <user> the cat <eos> <assistant> is <eos> <user> good <eos> <assistant>"
    )


@pytest.mark.parametrize("template", [True, False])
def test_text_is_taken_as_it_is_if_told_so_or_without_a_template(load, template):
    mode = "none" if template else "auto"
    (prompt,) = load([{"prompt": "the cat"}], tiny_tokenizer(chat_template=template), chat_template=mode).prompts
    assert prompt.text == "the cat" and prompt.token_ids == ids("the cat")


def test_exactly_one_bos(load):
    rows = [{"prompt": "the cat"}, {"prompt": "<bos> the cat"}]
    for prompt in load(rows, tiny_tokenizer(chat_template=False, bos=True)).prompts:
        assert prompt.token_ids == (BOS, *ids("the cat"))
        assert prompt.text.replace(" ", "") == "<bos>thecat"
    (prompt,) = load([{"prompt": CHAT[1:2]}], tiny_tokenizer(bos=True)).prompts
    assert prompt.token_ids == (BOS, *ids("<user> the cat <eos> <assistant>"))


def test_padding_side_and_pad_token_do_not_matter(load):
    rows = [{"prompt": text} for text in ("cat", "the cat sees a dog", "rain")]
    wanted = [prompt.token_ids for prompt in load(rows).prompts]
    for pad in ("own", "eos", None):
        tokenizer = tiny_tokenizer(pad=pad)
        tokenizer.padding_side = "right"
        assert [prompt.token_ids for prompt in load(rows, tokenizer).prompts] == wanted


def test_a_byte_pair_tokenizer(load):
    (prompt,) = load([{"prompt": "the cat"}], tiny_bpe_tokenizer()).prompts
    assert tiny_bpe_tokenizer().decode(prompt.token_ids) == "<user> the cat <eos> <assistant>" == prompt.text


def test_a_system_prompt_is_for_prompts_that_bring_none(load):
    rows = [{"prompt": "dog"}, {"prompt": CHAT[1:2]}, {"prompt": CHAT[:2]}]
    texts = [prompt.text for prompt in load(rows, system_prompt="you").prompts]
    assert texts == [
        "<system> you <eos> <user> dog <eos> <assistant>",
        "<system> you <eos> <user> the cat <eos> <assistant>",
        "<system> we <eos> <user> the cat <eos> <assistant>",
    ]


@pytest.mark.parametrize(
    ("template", "mode", "why"), [(False, "auto", "the tokenizer has none"), (True, "none", "chat_template is none")]
)
def test_a_system_prompt_needs_a_template(load, template, mode, why):
    with pytest.raises(ConfigError, match=rf"data\.system_prompt needs a chat template .*{why}"):
        load([{"prompt": "dog"}], tiny_tokenizer(chat_template=template), chat_template=mode, system_prompt="you")


def test_other_columns_reach_the_prompt(load):
    data = load([{"prompt": "cat", "answer": 3, "messages": [user("x")]}, {"tags": ["a"], "prompt": "dog"}])
    assert data.columns == ["answer", "messages", "tags"]
    assert data.prompts[0].columns == {"answer": 3, "messages": [user("x")], "tags": None}
    assert data.prompts[1].columns == {"answer": None, "messages": None, "tags": ["a"]}


def test_prompts_over_the_limit_are_dropped_and_counted(load):
    rows = [{"prompt": text} for text in ("cat", "the cat sees a dog", "dog", "a dog and a cat")]
    data = load(rows, limit=4)
    assert [prompt.row for prompt in data.prompts] == [0, 2]
    assert (data.num_rows, data.num_too_long) == (4, 2)
    assert data.note.endswith("prompts.jsonl: 2 of 4 prompts, 2 dropped as longer than 4 tokens")
    assert load(rows, limit=8).note.endswith("prompts.jsonl: 4 of 4 prompts")


def test_nothing_within_the_limit(load):
    told = r"data\.prompts: every prompt of .* \(2 prompts\) .*max_prompt_length 3; the shortest has 4"
    with pytest.raises(DataError, match=told):
        load([{"prompt": "cat"}, {"prompt": "a cat"}], limit=3)


REFUSED = {
    "no prompt": ({"prompt": None}, r"has no prompt: got None"),
    "missing": ({"other": 1}, r"has no prompt: got None"),
    "blank": ({"prompt": " \n"}, r"has no prompt: got ' \\n'"),
    "no messages": ({"prompt": []}, r"has no prompt: got \[\]"),
    "number": ({"prompt": 3}, r"the prompt is a int, wanted text or a list of chat messages"),
    "object": ({"prompt": user("cat")}, r"the prompt is a dict, wanted text or a list"),
    "texts": ({"prompt": ["the", "cat"]}, r"message 0: got str, wanted an object with role and content"),
    "no role": ({"prompt": [{"content": "cat"}]}, r"message 0: role is None, wanted text"),
    "parts": ({"prompt": [user("cat"), user([{"type": "image"}])]}, r"message 1: content is \[.*\], wanted text"),
    "empty turn": ({"prompt": [user(" ")]}, r"has no prompt: the content of its last message is empty"),
    "half a surrogate pair": ({"prompt": "a \ud800 cat"}, r"got '\\ud800' at character 2, half of a surrogate pair"),
    "the same in a turn": ({"prompt": [user("\udfff")]}, r"message 0: got '\\udfff' at character 0"),
    "answered": ({"prompt": [user("cat"), {"role": "assistant", "content": "is"}]}, r"ends its answer: .*assistant's"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows_are_named(load, name):
    row, message = REFUSED[name]
    with pytest.raises(DataError, match=rf"^data\.prompts: .*prompts\.jsonl, row 1 \(line 2\).*{message}"):
        load([{"prompt": "cat"}, row])


def test_plain_text_that_ends_its_answer(load):
    with pytest.raises(DataError, match=r"row 1 \(line 2\): the prompt already ends its answer: .* end token <eos>"):
        load([{"prompt": "cat"}, {"prompt": "a dog <eos>"}], chat_template="none")
    assert load([{"prompt": "cat <eos> dog"}], chat_template="none").prompts[0].token_ids[1] == EOS


def test_a_template_that_ends_every_turn_and_opens_none(load):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}"
    with pytest.raises(DataError, match=r"row 0 \(line 1\): .*end token <eos>.*end of the chat template"):
        load([{"prompt": "cat"}], tokenizer)


def test_text_that_the_tokenizer_knows_nothing_of(load):
    with pytest.raises(DataError, match=r"row 0 \(line 1\) has no prompt: .*the tokenizer returns no tokens"):
        load([{"prompt": "ÄÖ"}], tiny_bpe_tokenizer(chat_template=False))


def test_messages_without_a_template(load):
    with pytest.raises(DataError, match=r"row 0 \(line 1\): .*list of chat messages, .*no chat template"):
        load([{"prompt": [user("cat")]}], tiny_tokenizer(chat_template=False))


@pytest.mark.parametrize("content", ["{% for part in m.content %}{{ part.text }}{% endfor %}", "hello"])
def test_a_template_that_leaves_out_what_users_say(load, content):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}<user> {content} <eos>{{% endfor %}} <assistant>"
    message = r"row 0 \(line 1\): the chat template writes '<user> .* without the user's text\. Set data\.chat_template"
    for prompt in ("the cat", CHAT):
        with pytest.raises(DataError, match=message):
            load([{"prompt": prompt}], tokenizer)


def test_a_template_that_refuses_the_row(load):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('wants user and assistant') }}"
    with pytest.raises(DataError, match=r"row 0 \(line 1\): .*refuses .* roles user: wants user and assistant"):
        load([{"prompt": "cat"}], tokenizer)
    tokenizer.chat_template = "{{ 1 // 0 }}"
    with pytest.raises(DataError, match=r"row 0 \(line 1\): .*refuses .* roles user: .*division"):
        load([{"prompt": "cat"}], tokenizer)


def test_no_rows_and_no_column(load):
    with pytest.raises(DataError, match=r"data\.prompts: .*prompts\.jsonl has no column prompt or messages; .*: text"):
        load([{"text": "cat"}])
    with pytest.raises(DataError, match=r"data\.prompts: .*prompts\.jsonl is empty"):
        load([])


def test_an_empty_dataset(tmp_path):
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(DataError, match=r"none\.json has no rows"):
        load_prompts(str(tmp_path / "none.json"))


def test_nulls_that_parquet_fills_in_are_no_part_of_a_message(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [user("cat")]}, {"messages": [{**user("dog"), "name": "i"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    data = load_prompts(str(tmp_path / "chat.parquet"))
    assert [prompt.source for prompt in data.prompts] == [rows[0]["messages"], rows[1]["messages"]]


TOOLS_TEMPLATE = (
    "{% if tools is not none %}{{ tools | tojson }} {% endif %}{% for m in messages %}<{{ m.role }}> "
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ m.content }} {% endfor %}"
)


def call(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}


def test_nulls_that_parquet_fills_in_are_no_part_of_tools_and_calls(tmp_path):
    import pyarrow
    import pyarrow.parquet

    tokenizer, rows = tiny_tokenizer(), []
    tokenizer.chat_template = TOOLS_TEMPLATE
    for name, other in (("cat", "dog"), ("sea", "sun")):
        tools = [{"name": name, "parameters": {name: {"enum": [name, other], "type": other}}}]
        rows.append({"messages": [user(name), call({name: other}), {"role": "tool", "content": "red"}], "tools": tools})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "calls.parquet")
    first, second = load_prompts(str(tmp_path / "calls.parquet"), tokenizer, limit=256).prompts
    assert first.text == (
        '[{"name": "cat", "parameters": {"cat": {"enum": ["cat", "dog"], "type": "dog"}}}] <user> cat '
        '<assistant> {"arguments": {"cat": "dog"}} <tool> red '
    )
    assert "null" not in second.text and '{"arguments": {"sea": "sun"}}' in second.text


def test_no_tools_are_none_however_they_are_written(load):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    given = [None, [], "[]", "", " ", "null", '[{"name": "cat"}]']
    *none, some = load([{"prompt": "the cat", "tools": tools} for tools in given], tokenizer).prompts
    assert {prompt.text for prompt in none} == {"<user> the cat "}
    assert some.text == '[{"name": "cat"}] <user> the cat '
    without = r"row 0 \(line 1\), tools: the chat template does not use tools; .*data\.chat_template: auto"
    with pytest.raises(DataError, match=without):
        load([{"prompt": "the cat", "tools": given[-1]}])
    assert load([{"prompt": "the cat", "tools": "[]"}]).prompts


def test_calls_that_the_template_does_not_write_are_refused_not_lost(load):
    messages = [user("cat"), call({"at": "dog"}), {"role": "tool", "content": "red"}]
    lost = r"^data\.prompts: .*row 1 \(line 2\): message 1 calls functions .*data\.chat_template: auto.*remove the row"
    with pytest.raises(DataError, match=lost):
        load([{"prompt": "cat"}, {"messages": messages}])


def test_the_conversation_that_the_policy_is_shown_goes_with_the_prompt(load):
    """What a judge with a template of its own is to be shown: with the run's system message, as the query is."""
    system = {"role": "system", "content": "be nice"}
    rows = [{"prompt": "cat"}, {"prompt": [user("dog")]}, {"prompt": [{**system, "content": "own"}, user("sun")]}]
    data = load(rows, system_prompt="be nice")
    assert [prompt.conversation for prompt in data.prompts] == [
        [system, user("cat")], [system, user("dog")], [{**system, "content": "own"}, user("sun")]
    ]  # fmt: skip
    assert [prompt.source for prompt in data.prompts] == [row["prompt"] for row in rows]
    assert [p.conversation for p in load(rows[:2]).prompts] == [[user("cat")], [user("dog")]]
    assert load(rows[:1], chat_template="none").prompts[0].conversation is None
    assert load(rows[:1], tokenizer=tiny_tokenizer(chat_template=False)).prompts[0].conversation is None


TEMPLATED = "<user> the cat <eos> <assistant>"


def read_by(kind, path, tokenizer, **changes):
    """The prompts of a file, as each kind of dataset has them."""
    usual = {"key": f"data.{kind}"} | changes
    if kind == "prompts":
        return [each.token_ids for each in load_prompts(path, tokenizer, **usual).prompts]
    if kind == "pairs":
        return [each.chosen_ids[: each.query_length] for each in load_pairs(path, tokenizer, **usual).pairs]
    return [each.query_ids for each in load_demonstrations(path, tokenizer, **usual).demonstrations]


@pytest.mark.parametrize("kind", ["prompts", "pairs", "ptx"])
def test_prompts_that_are_in_a_template_already_are_not_put_into_it_again(tmp_path, kind):
    answers, path = {"completion": "is", "chosen": "is", "rejected": "runs"}, str(tmp_path / "rows.jsonl")
    templated = [f"<system> we <eos> {TEMPLATED}", f"{TEMPLATED}\n"]

    def write(*prompts):
        rows = [{"prompt": prompt, **answers} for prompt in prompts]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(*templated)
    told = r"rows\.jsonl: its prompts are in a chat template .* ' <eos> <assistant>', .*: set data\.chat_template: none"
    with pytest.raises(DataError, match=rf"data\.{kind}: .*{told}"):
        read_by(kind, path, tiny_tokenizer())
    assert read_by(kind, path, tiny_tokenizer(), chat_template="none") == [ids(text) for text in templated]
    write("the cat", templated[1])  # one of many ends so by itself, and is text like all that is typed
    usual, typed = read_by(kind, path, tiny_tokenizer())
    assert usual == ids(TEMPLATED) and typed.count(EOS) == 1
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
    write("the cat\n")
    assert read_by(kind, path, tokenizer) == [ids("<user> the cat")], "it writes nothing but blanks there"


def test_without_a_configuration_there_is_no_key_to_set(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": TEMPLATED}))
    with pytest.raises(DataError, match=r"^--prompts: .* put into one again: give them without it$"):
        read_by("prompts", str(tmp_path / "rows.jsonl"), tiny_tokenizer(), key="--prompts")
    with pytest.raises(DataError, match=r"^train_dataset: .* put into one again: give them without it$"):
        prompts_of([{"prompt": TEMPLATED}], tiny_tokenizer(), None, "train_dataset")
