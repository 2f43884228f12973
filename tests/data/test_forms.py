"""Forms of prompts, answers and pairs that other systems have: TRL's, ShareGPT's, and HH-RLHF's transcripts."""

import csv
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.loading import load_demonstrations, load_judged, load_pairs, load_prompts
from tests.tiny import tiny_bpe_tokenizer, tiny_tokenizer
from tether.compat.trl.data import prompts_of
from tether.data.forms import transcript_messages, transcript_parts
from tether.data.held_out import split_off
from tether.data.prompts import split_prompts
from tether.errors import DataError

HUMAN = "\n\nHuman: the cat\n\nAssistant: sees\n\nHuman: you\n\nAssistant:"
QUERY = "<user> the cat <eos> <assistant> sees <eos> <user> you <eos> <assistant>"


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / "rows.jsonl")

    return write


def prompts(file, tokenizer=None, **options):
    return load_prompts(file, tokenizer, **options).prompts


def test_transcripts_are_conversations_for_a_model_with_a_template(write):
    file = write({"chosen": f"{HUMAN} runs", "rejected": f"{HUMAN} eats"})
    tokenizer = tiny_tokenizer()
    (pair,) = load_pairs(file, tokenizer).pairs
    assert tokenizer.decode(pair.chosen_ids) == f"{QUERY} runs <eos>"
    assert tokenizer.decode(pair.rejected_ids) == f"{QUERY} eats <eos>"
    assert [prompt.text for prompt in prompts(file)] == [QUERY]
    (demonstration,) = load_demonstrations(file, tokenizer).demonstrations
    assert tokenizer.decode(demonstration.response_ids) == "runs <eos>"
    assert [prompt.text for prompt in prompts(write({"prompt": HUMAN}))] == [QUERY]


@pytest.mark.parametrize("how", ["no template", "template none"])
def test_transcripts_stay_text_for_a_model_without(write, how):
    """The prompt ends with the assistant's name, and the answer is closed."""
    tokenizer = tiny_tokenizer(chat_template=how != "no template")
    options = {"chat_template": "none"} if how == "template none" else {}
    file = write({"chosen": f"{HUMAN} runs", "rejected": f"{HUMAN} eats"})
    (pair,) = load_pairs(file, tokenizer, **options).pairs
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
        load_pairs(write(good, row))


def test_transcripts_with_different_prompts_are_named_without_a_template_too(write):
    file = write({"chosen": f"{HUMAN} runs", "rejected": "\n\nHuman: a\n\nAssistant: b"})
    with pytest.raises(DataError, match=r"row 0 .*different prompts"):
        load_pairs(file, tiny_tokenizer(chat_template=False))
    file = write({"chosen": f"{HUMAN} runs\n\nHuman: a", "rejected": f"{HUMAN} eats"})
    with pytest.raises(DataError, match=r"row 0 .*chosen: the transcript does not end with the assistant's turn"):
        load_pairs(file, tiny_tokenizer(chat_template=False))


def test_sharegpt_columns(write):
    turns = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sees"}]
    (prompt,) = prompts(write({"conversations": turns[:1]}))
    assert prompt.source == [{"role": "user", "content": "the cat"}]
    tokenizer = tiny_tokenizer()
    file = write({"conversations": turns})
    (demonstration,) = load_demonstrations(file, tokenizer).demonstrations
    assert tokenizer.decode(demonstration.response_ids) == "sees <eos>"
    with pytest.raises(DataError, match=r"row 0 .*messages: got the turn .*wanted from and value"):
        prompts(write({"conversations": [turns[0], {"from": "gpt"}]}))


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_folder(path, rows):
    path.mkdir()
    write_csv(path / "train.csv", rows)


FORMATS = {
    "rows.jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows))),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.csv": write_csv,
    "rows.parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
    "folder": write_folder,
    "saved": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(path),
}
ASKED = [{"role": "user", "content": 'the "cat"'}]
ANSWERED = {word: [*ASKED, {"role": "assistant", "content": word}] for word in ("sees", "runs")}
SHARED = [{"from": "human", "value": 'the "cat"'}, {"from": "gpt", "value": "sees"}]
AS_JSON = {
    "prompt": {"prompt": ASKED, "completion": "sees", "chosen": "sees", "rejected": "runs"},
    "messages": {"messages": ANSWERED["sees"]},
    "conversations": {"conversations": SHARED},
    "completion": {"prompt": "x", "completion": ANSWERED["sees"]},
    "pairs": {"chosen": ANSWERED["sees"], "rejected": ANSWERED["runs"]},
    "answers": {"prompt": ASKED, "chosen": ANSWERED["sees"][1:], "rejected": ANSWERED["runs"][1:]},
    "response": {"prompt": ASKED, "response": ANSWERED["sees"][1:]},
}


@pytest.fixture
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def read_every_way(source):
    """What each kind of reader makes of a dataset, or the words in which it refuses it."""
    tokenizer = tiny_tokenizer()
    readers = {
        "prompts": lambda: [p.source for p in prompts(source, tokenizer)],
        "demonstrations": lambda: load_demonstrations(source, tokenizer),
        "pairs": lambda: load_pairs(source, tokenizer),
        "judged": lambda: [
            (r.prompt, r.answers) for r in load_judged(source, key="data.k").rows
        ],
    }
    found = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except DataError as error:
            found[name] = str(error).partition(", row 0")[2].replace(" (line 1)", "").replace(" (line 2)", "")
    return found


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("form", AS_JSON)
def test_messages_that_are_json_text_are_the_messages_in_every_format(tmp_path, form):
    """As CSV has to hold them, and as other tools write them into columns of text."""
    wanted = None
    for name, writer in FORMATS.items():
        for encode in (json.dumps, lambda value: json.dumps(value, indent=1)):
            row = {column: v if isinstance(v, str) else encode(v) for column, v in AS_JSON[form].items()}
            folder = tmp_path / f"{name}_{encode is json.dumps}"
            folder.mkdir()
            writer(folder / name, [row])
            found = read_every_way(str(folder / name))
            if wanted is None:
                (tmp_path / "lists.jsonl").write_text(json.dumps(AS_JSON[form]))
                wanted = read_every_way(str(tmp_path / "lists.jsonl"))
                assert any(not isinstance(each, str) for each in wanted.values())
            assert found == wanted, name


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("name", FORMATS)
def test_tools_and_arguments_of_the_template_may_be_json_text(tmp_path, name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}{{ one }}{{ messages[0].content }}"
    tools = [{"name": "cat"}, {"name": "dog"}]
    row = {"prompt": "you", "tools": json.dumps(tools), "chat_template_kwargs": json.dumps({"one": 3})}
    FORMATS[name](tmp_path / name, [row, row | {"tools": "", "chat_template_kwargs": " "}])
    texts = [prompt.text for prompt in prompts(str(tmp_path / name), tokenizer)]
    assert texts == [f"{json.dumps(tools)}3you", "you"]


def test_each_tool_may_be_json_text(write):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }} {{ messages[0].content }}"
    (prompt,) = prompts(write({"prompt": "you", "tools": ['{"name": "cat"}', {"name": "dog"}]}), tokenizer)
    assert prompt.text == '[{"name": "cat"}, {"name": "dog"}] you'
    with pytest.raises(DataError, match=r"row 0 \(line 1\), tools, tool 0: not JSON: "):
        prompts(write({"prompt": "you", "tools": ["cat"]}), tokenizer)
    with pytest.raises(DataError, match=r"row 0 \(line 1\), chat_template_kwargs: not JSON: "):
        prompts(write({"prompt": "you", "chat_template_kwargs": "{"}), tokenizer)


SYSTEM = "<system> we <eos> "
CAT_QUERY = "<user> the cat <eos> <assistant>"
OWN = {"role": "system", "content": "you"}


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("name", FORMATS)
def test_a_column_system_is_the_system_message_of_its_row(tmp_path, name):
    FORMATS[name](tmp_path / name, [{"prompt": "the cat", "system": text} for text in ("we", " ", "")])
    first, *others = prompts(str(tmp_path / name))
    assert first.text == SYSTEM + CAT_QUERY and [prompt.text for prompt in others] == [CAT_QUERY, CAT_QUERY]
    assert first.source == "the cat" and first.columns == {"system": "we"}  # what reward functions are given
    assert first.conversation == [{"role": "system", "content": "we"}, TURN]


@pytest.mark.parametrize("read", ["prompts", "dataset in memory", "pairs", "demonstrations"])
def test_every_stage_reads_it(write, read):
    """It goes before the run's; the conversation's own goes before it."""
    tokenizer, options = tiny_tokenizer(), {"system_prompt": "dog"}
    asked = [{"prompt": "the cat"}, {"prompt": [TURN]}, {"prompt": [OWN, TURN]}]
    asked = [row | {"system": "we"} for row in asked] + [{"prompt": "the cat", "system": None}]
    rows = [row | {"chosen": "sees", "rejected": "eats"} for row in asked]
    file = write(*rows)
    if read == "prompts":
        found = [prompt.text for prompt in prompts(file, tokenizer, system_prompt="dog")]
    elif read == "pairs":
        found = [pair.query for pair in load_pairs(file, tokenizer, **options).pairs]
    elif read == "demonstrations":
        data = load_demonstrations(file, tokenizer, **options)
        found = [tokenizer.decode(each.query_ids) for each in data.demonstrations]
    else:
        found = [prompt.text for prompt in prompts_of(rows, tokenizer, None, "train_dataset").prompts]
    own = f"<system> you <eos> {CAT_QUERY}"
    runs = CAT_QUERY if read == "dataset in memory" else f"<system> dog <eos> {CAT_QUERY}"  # which has no system prompt
    assert found == [SYSTEM + CAT_QUERY, SYSTEM + CAT_QUERY, own, runs]


def test_the_system_message_of_a_row_goes_before_whole_conversations(write):
    talk = [TURN, {"role": "assistant", "content": "sees"}, TURN, {"role": "assistant", "content": "runs"}]
    file, tokenizer = write({"chosen": talk, "rejected": talk[:2], "messages": talk, "system": "we"}), tiny_tokenizer()
    data = load_demonstrations(file, tokenizer, every_turn=True)
    queries = [tokenizer.decode(each.query_ids) for each in data.demonstrations]
    assert queries == [SYSTEM + CAT_QUERY, f"{SYSTEM}{CAT_QUERY} sees <eos> {CAT_QUERY}"]
    file = write({"chosen": talk[:2], "rejected": [TURN, talk[-1]], "system": "we"})
    (pair,) = load_pairs(file, tokenizer).pairs
    assert pair.query == SYSTEM + CAT_QUERY


def test_a_column_with_another_name_is_the_system_message_if_named(write):
    file = write({"prompt": "the cat", "system_prompt": "we"})
    assert [prompt.text for prompt in prompts(file)] == [CAT_QUERY]
    assert [prompt.text for prompt in prompts(file, columns={"system": "system_prompt"})] == [SYSTEM + CAT_QUERY]


def test_a_system_message_that_has_no_place_is_refused(write):
    row = {"prompt": "the cat", "system": "we"}
    for tokenizer, template, why in [
        (tiny_tokenizer(chat_template=False), "auto", "the tokenizer has none"),
        (tiny_tokenizer(), "none", r"data\.chat_template is none"),
    ]:
        told = rf"row 0 .*, system: a system message needs a chat template .*, and {why}: set data\.chat_template to "
        with pytest.raises(DataError, match=told + ".*, put it into the prompt, leave the column out, or rename it"):
            prompts(write(row), tokenizer, chat_template=template)
        assert prompts(write(row | {"system": ""}), tokenizer, chat_template=template)[0].text == "the cat"
    (talk,) = prompts(write({"prompt": [TURN], "system": "we"}), chat_template="none")  # a conversation always has one
    assert talk.text == SYSTEM + CAT_QUERY
    with pytest.raises(DataError, match=r"row 0 .*, system: .* goes before a prompt, but the row is a whole text: "):
        load_pairs(write({"chosen": "the cat", "rejected": "dog", "system": "we"}))
    with pytest.raises(DataError, match=r"row 0 .*, system: got 3, wanted the text of the row's system message"):
        prompts(write(row | {"system": 3}))
    data = load_demonstrations(write({"text": "the cat", "system": "we"}))
    (text,) = data.demonstrations
    assert tiny_tokenizer().decode([*text.query_ids, *text.response_ids]) == "the cat"


def test_calls_in_a_message_may_be_json_text(write):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    asks = {"role": "assistant", "content": "", "tool_calls": json.dumps(calls)}
    turns = [TURN, asks, {"role": "tool", "content": "b"}]
    (prompt,) = prompts(write({"messages": turns}), tokenizer)
    assert prompt.text == f"the cat{json.dumps(calls)}b"
    with pytest.raises(DataError, match=r"row 0 \(line 1\), messages, tool_calls: not JSON: "):
        prompts(write({"messages": [TURN, {**asks, "tool_calls": "f(x)"}, turns[2]]}), tokenizer)


@pytest.mark.parametrize(
    "text",
    [
        '[{"from": "the sun", "to": "the sea"}]', '[{"value": 3}]', "[a] dog", '[{"role": "cat"}]', "[{", "[]",
        '[{"from": "the sun", "to": "the sea", "value": 3}]', '[{"role": "user", "content": "a"}]\nas YAML, please',
        '[{"name": "cat", "fields": [{"from": "a", "value": "b"}]}]',
    ],
)  # fmt: skip
def test_text_that_is_no_conversation_stays_text(write, text):
    (prompt,) = prompts(write({"prompt": text, "response": text}))
    assert (prompt.source, prompt.columns) == (text, {"response": text})


def test_messages_as_json_text_are_refused_if_they_break_off(write):
    with pytest.raises(DataError, match=r"row 0 \(line 1\), prompt: not JSON: .*wanted text, or a JSON list of chat"):
        prompts(write({"prompt": json.dumps(ASKED)[:-4]}))
    with pytest.raises(DataError, match=r"row 0 \(line 1\), message 1: role is None, wanted text"):
        prompts(write({"prompt": json.dumps([*ASKED, {"content": "cat"}])}))


@pytest.mark.parametrize("column", ["prompt", "messages", "chosen"])
def test_messages_as_python_writes_them_are_refused_by_row(tmp_path, column):
    write_csv(tmp_path / "rows.csv", [{column: str(ASKED)}])
    told = rf"row 0 \(line 2\), {column}: not JSON: .*wanted text, or a JSON list of chat messages"
    with pytest.raises(DataError, match=told):
        prompts(str(tmp_path / "rows.csv"))


ROLES = {
    "user": ("human", "Human", "prompter", "USER"),
    "assistant": ("gpt", "chatgpt", "model", "bot", "Chatbot", "AI", "Assistant"),
}


@pytest.mark.parametrize("names", [("role", "content"), ("from", "value")])
def test_turns_are_known_by_the_names_that_datasets_have_for_their_roles(write, names):
    role, content = names
    for user in ROLES["user"]:
        for assistant in ROLES["assistant"]:
            turns = [{role: user, content: "the cat"}, {role: assistant, content: "sees"}]
            read = load_demonstrations(write({"messages": turns})).demonstrations
            assert tiny_tokenizer().decode(read[0].query_ids) == "<user> the cat <eos> <assistant>"
            with pytest.raises(DataError, match="already ends its answer"):
                prompts(write({"messages": turns}))


@pytest.mark.parametrize("turn", [{"role": "robot", "content": "sees"}, {"from": "robot", "value": "sees"}])
def test_a_role_that_no_one_knows_is_refused_with_the_way_to_map_it(write, turn):
    name, text = turn
    asked = {name: "user", text: "the cat"}
    told = r"the role 'robot' is neither one of system, user, assistant, tool nor .* tags of a dataset_info\.json"
    with pytest.raises(DataError, match=rf"row 0 \(line 1\): message 1: {told}"):
        prompts(write({"messages": [asked, turn, asked]}))
    file, tokenizer = write({"messages": [asked, turn]}), tiny_tokenizer()
    with pytest.raises(DataError, match=rf"row 0 \(line 1\), messages: the last message is .*{told}"):
        load_demonstrations(file, tokenizer)
    tokenizer.chat_template = "{# robot #}" + tokenizer.chat_template
    assert prompts(write({"messages": [asked, turn, asked]}), tokenizer), "a template may have roles of its own"


def test_calls_and_results_of_sharegpt(write):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% for call in m.tool_calls or [] %}{{ call.function | tojson }}"
        "{% endfor %}{{ m.content }} {% endfor %}"
    )
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "b"},
        {"from": "gpt", "value": "c"},
        {"from": "function_response", "value": "d"},
    ]
    (prompt,) = prompts(write({"conversations": turns}), tokenizer)
    assert prompt.text == (
        '<user>a <assistant>{"name": "f", "arguments": {"x": 1}} <tool>b <assistant>c <tool>d '
    )
    with pytest.raises(DataError, match=r"row 0 .*messages: the function call is not JSON"):
        prompts(write({"conversations": [turns[0], {"from": "function_call", "value": "look"}]}), tokenizer)


CALLS = [  # arguments as a dataset has them, and as a template writes them
    ({"x": 1}, '{"x": 1}'), ('{"x": 1}', '{"x": 1}'), ("{}", "{}"), (" ", "{}"), ("look", '"look"'), ("[1]", '"[1]"'),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "written"), CALLS)
def test_arguments_of_calls_that_are_json_text_become_objects(write, arguments, written):
    """The APIs have them as text, which templates such as Qwen's would quote once more."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
        "{{ call.name }}{{ call.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    call, result = {"name": "f", "arguments": arguments}, {"role": "tool", "content": "c"}
    asks = {"role": "assistant", "content": "b"}
    for calls in ([{"id": "1", "type": "function", "function": call}], [call], json.dumps([call])):
        (prompt,) = prompts(write({"messages": [TURN, {**asks, "tool_calls": calls}, result]}), tokenizer)
        assert prompt.text == f"the catf{written}bc"
    turns = [("human", "the cat"), ("function_call", json.dumps(call)), ("observation", "c")]
    (prompt,) = prompts(write({"conversations": [{"from": who, "value": text} for who, text in turns]}), tokenizer)
    assert prompt.text == f"the catf{written}c"


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_content_in_parts_of_text_is_that_text(write):
    turns = [{"role": "user", "content": parts("the ", "cat")}, {"role": "assistant", "content": parts("sees")}]
    (prompt,) = prompts(write({"messages": turns[:1]}))
    assert prompt.source == [{"role": "user", "content": "the cat"}]
    assert prompt.text == "<user> the cat <eos> <assistant>"
    worse = [turns[0], {"role": "assistant", "content": parts("runs", " <eos>")}]
    file, tokenizer = write({"chosen": turns, "rejected": worse}), tiny_tokenizer()
    (pair,) = load_pairs(file, tokenizer).pairs
    assert tokenizer.decode(pair.chosen_ids) == "<user> the cat <eos> <assistant> sees <eos>"
    (demonstration,) = load_demonstrations(file, tokenizer).demonstrations
    assert tokenizer.decode(demonstration.response_ids) == "sees <eos>"


def test_nulls_that_parquet_fills_into_parts_are_passed_over(tmp_path):
    content = [{"type": "text", "text": "the cat", "image": None}]
    table = pyarrow.Table.from_pylist(
        [{"prompt": [{"role": "user", "content": content}]}, {"prompt": [{"role": "user", "content": parts("you")}]}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert [p.source[0]["content"] for p in prompts(str(tmp_path / "rows.parquet"))] == ["the cat", "you"]


def test_parts_that_are_not_text_are_named(write):
    image = {"type": "image_url", "image_url": {"url": "a" * 1000}}
    told = r"content is \[.*\], wanted text, or parts of \{.*\} alone: part 1 is of type 'image_url'"
    with pytest.raises(DataError, match=rf"row 0 \(line 1\), message 0: {told}") as refused:
        prompts(write({"prompt": [{"role": "user", "content": [*parts("the cat"), image]}]}))
    assert "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" not in str(refused.value)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [*parts("b"), image]}]
    with pytest.raises(DataError, match=rf"row 0 .*, messages: the last message is .*: its {told}"):
        load_demonstrations(write({"messages": turns}))


TURN = {"role": "user", "content": "the cat"}
EMPTY = [None, "", " ", []]


@pytest.mark.parametrize("nothing", EMPTY, ids=repr)
def test_of_prompt_and_messages_the_one_that_is_there_is_read(write, nothing):
    tokenizer, says, runs = tiny_tokenizer(), *({"role": "assistant", "content": word} for word in ("sees", "runs"))
    query = "<user> the cat <eos> <assistant>"
    rows = [
        {"prompt": nothing, "messages": [TURN], "id": 1},
        {"prompt": "the cat", "messages": nothing, "id": 2},
        {"prompt": nothing, "messages": nothing, "conversations": [{"from": "human", "value": "the cat"}], "id": 3},
        {"prompt": nothing, "messages": [TURN], "conversations": [{"from": "human", "value": "a dog"}], "id": 4},
    ]
    read = prompts(write(*rows))
    assert [prompt.text for prompt in read] == [query] * 4
    assert [prompt.columns["id"] for prompt in read] == [1, 2, 3, 4] and "prompt" not in read[0].columns
    rows = [
        {"prompt": nothing, "completion": nothing, "messages": [TURN, says]},
        {"prompt": "the cat", "completion": "sees", "messages": nothing},
        {"prompt": nothing, "completion": "sees", "messages": [TURN]},
        {"prompt": "the cat", "completion": "sees", "messages": [{"role": "user", "content": "a dog"}]},
    ]
    shown = load_demonstrations(write(*rows), tokenizer).demonstrations
    whole = [tokenizer.decode([*each.query_ids, *each.response_ids]) for each in shown]
    assert whole == [f"{query} sees <eos>"] * 4
    judged = load_judged(write(*rows)).rows
    assert [(row.prompt, row.answers) for row in judged] == [
        ([TURN], ("sees",)), ("the cat", ("sees",)), ([TURN], ("sees",)), ("the cat", ("sees",)),
    ]  # fmt: skip
    pairs = [
        {"prompt": nothing, "messages": [TURN], "chosen": "sees", "rejected": "runs"},
        {"prompt": "the cat", "messages": nothing, "chosen": "sees", "rejected": "runs"},
        {"prompt": nothing, "messages": nothing, "chosen": [TURN, says], "rejected": [TURN, runs]},
    ]
    read = load_pairs(write(*pairs), tokenizer).pairs
    assert [tokenizer.decode(pair.chosen_ids) for pair in read] == [f"{query} sees <eos>"] * 3


def test_answers_beside_a_finished_conversation_are_no_whole_texts(write):
    row = {"messages": [TURN, {"role": "assistant", "content": "x"}], "chosen": "sees", "rejected": "runs"}
    with pytest.raises(DataError, match=r"are whole texts, but there is a column messages\. Rename it to prompt"):
        load_pairs(write(row))


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
        found = load_demonstrations(file, tokenizer).demonstrations
        assert [tokenizer.decode(each.response_ids[:-1]) for each in found] == [answer, " sees"]


def test_a_share_is_held_out_by_prompt(write):
    data = load_prompts(write(*({"prompt": f"the {word}"} for word in ("cat", "dog", "sun", "day") * 3)))
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
    read = load_demonstrations(sources, tokenizer).demonstrations
    assert [(each.row, tokenizer.decode(each.response_ids)) for each in read] == [
        (0, "eats <eos>"), (1, "runs <eos>"), (2, "sun is red"), (3, "runs <eos>"),
    ]  # fmt: skip
    queries = [prompt.text for prompt in prompts([files["answers"], files["asked"], files["pairs"]])]
    cat = "<user> the cat <eos> <assistant>"
    assert queries == ["<user> you <eos> <assistant>", cat, cat]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_answers_that_all_begin_with_their_prompt_are_refused(write, chat):
    """A model would be taught, or a judge shown, every prompt twice."""
    texts = [("the cat", "is red"), ("you", "run and run")]
    whole = [{"prompt": a, "completion": f"{a} {b}", "chosen": f"{a} {b}", "rejected": f"{a} not"} for a, b in texts]
    some = [*whole, {"prompt": "a", "completion": "it", "chosen": "it", "rejected": "is"}]
    tokenizer, told = tiny_tokenizer(chat_template=chat), r"jsonl: all answers begin with their prompt, .*: remove it"

    def pairs(file):
        return load_pairs(file, tokenizer).pairs

    def demonstrations(file):
        return load_demonstrations(file, tokenizer).demonstrations

    def judged(file):
        return load_judged(file, is_chat=chat).rows

    for read in (pairs, demonstrations, judged):
        with pytest.raises(DataError, match=told):
            read(write(*whole))
        assert len(read(write(*some))) == 3, "one of many repeats its prompt by itself"
        assert len(read(write(whole[0]))) == 1, "and so may a row alone"
    answers = [{"prompt": row["prompt"], "response": row["completion"]} for row in whole]
    assert [row.answers for row in judged(write(*answers))] == [(row["response"],) for row in answers], "of a policy"


@pytest.mark.parametrize("prompt", [[TURN], "the cat"], ids=["messages", "text"])
def test_a_completion_that_is_a_whole_conversation_holds_its_prompt_once(write, prompt):
    says = {"role": "assistant", "content": "sees"}
    tokenizer = tiny_tokenizer()
    for completion in ([says], [TURN, says]):
        file = write({"prompt": prompt, "completion": completion})
        (shown,) = load_demonstrations(file, tokenizer).demonstrations
        assert tokenizer.decode(shown.query_ids + shown.response_ids) == "<user> the cat <eos> <assistant> sees <eos>"
        (row,) = load_judged(file).rows
        assert (row.prompt, row.answers) == (prompt if completion == [says] else [TURN], ("sees",))
