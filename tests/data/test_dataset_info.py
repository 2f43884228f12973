"""LLaMA-Factory's dataset_info.json: what its entries' rows become, and what is refused with which words."""

import json
import re

import pytest

from tests.data.loading import load_demonstrations, load_pairs, load_prompts
from tests.tiny import tiny_tokenizer
from tether.config.chat import DataSource
from tether.data.dataset_info import check_entry, read_entry
from tether.data.joined import check_datasets, read_datasets
from tether.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


@pytest.fixture
def entry(tmp_path):
    """Writes a dataset and its entry, called ``d``; returns the folder."""

    def write(rows, **settings):
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        info = {"d": {"file_name": "rows.json"} | settings, "other": {"nonsense": True}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        return str(tmp_path)

    return write


def test_alpaca_columns_by_default(entry):
    rows = [
        {"instruction": "the cat", "input": "sees", "output": "a dog", "other": 1},
        {"instruction": "you", "input": "", "output": "run"},
    ]
    first, second = read_entry(entry(rows), "d", "k").rows
    assert first == {
        "prompt": [user("the cat\nsees")],
        "messages": [user("the cat\nsees"), assistant("a dog")],
        "other": 1,
    }
    assert second["prompt"] == [user("you")]


@pytest.mark.parametrize(("part", "column"), [("query", "context"), ("response", "output"), ("system", "s")])
def test_a_column_that_no_row_has_is_told(entry, part, column):
    """Prompts would lose their input, or all answers be left out."""
    rows = [{"instruction": "the cat", "input": "sees", "completion": "a dog"}]
    columns = {"prompt": "instruction", part: column}
    told = rf"^k: d in .*: columns\.{part} is {column}, which no row of .*rows\.json has; its columns are: inst"
    with pytest.raises(DataError, match=told):
        read_entry(entry(rows, columns=columns), "d", "k")


def test_one_row_may_lack_what_others_have(entry):
    rows = [{"instruction": "the cat", "context": "sees", "output": "a dog"}, {"instruction": "you", "output": "run"}]
    columns = {"prompt": "instruction", "query": "context", "response": "output"}
    assert read_entry(entry(rows, columns=columns), "d", "k").rows[1]["prompt"] == [user("you")]


@pytest.mark.parametrize("formatting", ["alpaca", "sharegpt"])
def test_the_answer_is_that_of_the_column_that_the_entry_names(entry, formatting):
    """Not that of a column that has our own name for answers."""
    row = {"instruction": "the cat", "output": "a dog", "completion": "is nice"}
    if formatting == "sharegpt":
        turns = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "a dog"}]
        row = {"conversations": turns, "completion": "is nice"}
    tokenizer = tiny_tokenizer()
    folder = entry([row], formatting=formatting)
    (made,) = load_demonstrations("d", tokenizer, dataset_dir=folder).demonstrations
    assert tokenizer.decode(made.response_ids, skip_special_tokens=True) == "a dog"


def test_a_dataset_that_the_file_describes_twice_is_told(tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "a.json"}, "d": {"file_name": "b.json"}}')
    with pytest.raises(DataError, match=r"^data\.dataset_dir: .*dataset_info\.json has 'd' several times"):
        check_entry(str(tmp_path), "d", "k")


def test_alpaca_columns_under_their_own_names_with_history_and_system(entry):
    rows = [{"q": "the cat", "a": "a dog", "s": "be nice", "h": [["one", "two"], ["red", "blue"]]}]
    columns = {"prompt": "q", "response": "a", "system": "s", "history": "h"}
    (row,) = read_entry(entry(rows, columns=columns), "d", "k").rows
    before = [system("be nice"), user("one"), assistant("two"), user("red"), assistant("blue"), user("the cat")]
    assert row == {"prompt": before, "messages": [*before, assistant("a dog")]}


def test_alpaca_pairs(entry):
    rows = [{"instruction": "the cat", "input": "", "chosen": "is good", "rejected": "is bad"}]
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    (row,) = read_entry(entry(rows, ranking=True, columns=columns), "d", "k").rows
    assert row == {"prompt": [user("the cat")], "chosen": "is good", "rejected": "is bad"}


@pytest.mark.parametrize("columns", [None, {"prompt": "instruction", "response": "output", "query": "input"}])
def test_alpaca_pairs_in_one_list_with_the_better_answer_first(entry, columns):
    rows = [{"instruction": "the cat", "input": "", "output": ["is good", "is bad"]},
            {"instruction": "a", "input": "b", "output": '["c", "d"]'}]  # fmt: skip
    named = {} if columns is None else {"columns": columns}
    first, second = read_entry(entry(rows, ranking=True, **named), "d", "k").rows
    assert first == {"prompt": [user("the cat")], "chosen": "is good", "rejected": "is bad"}
    assert second == {"prompt": [user("a\nb")], "chosen": "c", "rejected": "d"}


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ({"output": "is good"}, "got 'is good'"), ({"output": ["is good"]}, r"got \['is good'\]"),
        ({"output": ["a", "b", "c"]}, r"got \['a', 'b', 'c'\]"), ({"output": ["a", None]}, r"got \['a', None\]"),
        ({"chosen": "a"}, "there is no column output; the columns are instruction, chosen"),
    ],
)  # fmt: skip
def test_lists_that_are_no_pair_are_told_with_their_row(entry, row, got):
    good = {"instruction": "the dog", "output": ["a", "b"]}
    table = read_entry(entry([good, {"instruction": "the cat"} | row], ranking=True), "d", "k")
    (bad,) = table.bad.values()
    assert len(table.rows) == 1
    assert re.search(rf"row 1, output: {got}, wanted a list of two texts, the better answer first; or name", str(bad))


TURNS = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "is good"}]
TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "person", "assistant_tag": "machine", "system_tag": "sys",
}  # fmt: skip


def test_sharegpt_turns_by_default(entry):
    (row,) = read_entry(entry([{"conversations": TURNS}], formatting="sharegpt"), "d", "k").rows
    assert row == {"prompt": [user("the cat")], "messages": [user("the cat"), assistant("is good")]}


def test_sharegpt_turns_under_their_own_tags(entry):
    turns = [("sys", "be nice"), ("person", "the cat"), ("machine", "is"), ("person", "and"), ("machine", "good")]
    rows = [{"talk": [{"role": role, "content": content} for role, content in turns]}]
    folder = entry(rows, formatting="sharegpt", columns={"messages": "talk"}, tags=TAGS)
    (row,) = read_entry(folder, "d", "k").rows
    assert row["prompt"] == [system("be nice"), user("the cat"), assistant("is"), user("and")]
    assert row["messages"] == [*row["prompt"], assistant("good")]


def test_sharegpt_pairs_and_a_column_for_the_system_message(entry):
    rows = [{"conversations": TURNS[:1], "better": TURNS[1], "worse": {"from": "gpt", "value": "is bad"}, "s": "you"}]
    columns = {"messages": "conversations", "chosen": "better", "rejected": "worse", "system": "s"}
    (row,) = read_entry(entry(rows, formatting="sharegpt", ranking=True, columns=columns), "d", "k").rows
    assert row == {"prompt": [system("you"), user("the cat")], "chosen": "is good", "rejected": "is bad"}


def test_the_turns_own_system_message_goes_before_that_of_a_column(entry):
    rows = [{"conversations": [{"from": "system", "value": "be nice"}, *TURNS], "s": "you"}, {"conversations": TURNS}]
    columns = {"messages": "conversations", "system": "s"}
    table = read_entry(entry([*rows, rows[1] | {"s": "you"}], formatting="sharegpt", columns=columns), "d", "k")
    assert [row["prompt"] for row in table.rows] == [
        [system("be nice"), user("the cat")], [user("the cat")], [system("you"), user("the cat")],
    ]  # fmt: skip


@pytest.mark.parametrize("formatting", ["alpaca", "sharegpt"])
def test_a_column_system_is_read_only_if_its_entry_names_it(entry, caplog, formatting):
    row = {"instruction": "the cat", "output": "good", "conversations": TURNS}
    rows = [row | {"system": "you"}, row | {"system": ""}]
    named = {"prompt": "instruction", "messages": "conversations", "system": "system"}
    del named["messages" if formatting == "alpaca" else "prompt"]
    plain, told = (
        load_prompts("d", dataset_dir=entry(rows, formatting=formatting, **columns))
        for columns in ({}, {"columns": named})
    )
    query = "<user> the cat <eos> <assistant>"
    assert [prompt.text for prompt in plain.prompts] == [query, query]
    assert [prompt.text for prompt in told.prompts] == [f"<system> you <eos> {query}", query]
    (record,) = caplog.records
    assert "d in " in record.getMessage() and "the column system is not read" in record.getMessage()


def test_broken_conversations_are_left_out_with_one_warning(entry, caplog):
    good, bad = {"conversations": TURNS}, {"conversations": [*TURNS, {"from": "bot", "value": "x"}]}
    folder = entry([good, bad, {"conversations": []}, good, bad], formatting="sharegpt")
    table = read_entry(folder, "d", "data.prompts")
    assert [table.where(i).rpartition(", ")[2] for i in range(len(table.rows))] == ["row 0", "row 3"]
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith("3 of 5 rows are left out; the first: ")
    assert record.getMessage().endswith(
        "row 1, conversations, turn 2: from is 'bot', wanted one of human, gpt, observation, system"
    )
    with pytest.raises(DataError, match=r"row 0, conversations, turn 0: role is 'user', wanted one of human, gpt"):
        tags = {"role_tag": "role", "content_tag": "content"}
        read_entry(entry([{"conversations": [user("x")]}] * 2, formatting="sharegpt", tags=tags), "d", "k")


def test_messages_of_the_api(entry):
    called = {"function": {"name": "look", "arguments": '{"at": "cat"}'}, "type": "function", "id": "1"}
    turns = [
        system("be nice"), user("the cat"), {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "red"}, {"role": "tool", "content": "blue"}, assistant("it is red"),
    ]  # fmt: skip
    (row,) = read_entry(entry([{"talk": turns}], formatting="openai", columns={"messages": "talk"}), "d", "k").rows
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}
    assert row["messages"] == [*turns[:2], {"role": "assistant", "content": "", "tool_calls": [call]}, *turns[3:]]
    assert row["prompt"] == row["messages"][:-1]
    turns[2] = turns[2] | {"tool_calls": json.dumps([called])}
    folder = entry([{"talk": turns}], formatting="openai", columns={"messages": "talk"})
    assert read_entry(folder, "d", "k").rows == [row]
    tags = {"role_tag": "who", "content_tag": "text", "user_tag": "person"}
    rows = [{"talk": [{"who": "person", "text": "the cat"}, {"who": "assistant", "text": "is good"}]}]
    folder = entry(rows, formatting="openai", columns={"messages": "talk"}, tags=tags)
    assert read_entry(folder, "d", "k").rows[0]["messages"] == [user("the cat"), assistant("is good")]


def test_turns_answers_and_history_may_be_json_text_and_content_may_be_in_parts(entry):
    """As columns of CSV and of text are."""
    columns = {"messages": "talk", "chosen": "better", "rejected": "worse"}
    rows = [{"talk": json.dumps(TURNS[:1]), "better": json.dumps(TURNS[1]), "worse": "{bad}"}]
    (row,) = read_entry(entry(rows, formatting="sharegpt", ranking=True, columns=columns), "d", "k").rows
    assert row == {"prompt": [user("the cat")], "chosen": "is good", "rejected": "{bad}"}
    turns = [user([{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]), assistant("is good")]
    folder = entry([{"talk": turns}], formatting="openai", columns={"messages": "talk"})
    assert read_entry(folder, "d", "k").rows[0]["prompt"] == [user("the cat")]
    rows = [{"instruction": "you", "output": "run", "h": json.dumps([["one", "two"]])}]
    folder = entry(rows, columns={"prompt": "instruction", "response": "output", "history": "h"})
    assert read_entry(folder, "d", "k").rows[0]["prompt"] == [user("one"), assistant("two"), user("you")]


def test_calls_of_functions_are_handed_to_the_template(entry):
    call = {"name": "look", "arguments": {"at": "cat"}}
    turns = [
        {"from": "human", "value": "the cat"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "red"},
        {"from": "gpt", "value": "it is red"},
    ]
    rows = [{"conversations": turns, "tools": '[{"name": "look"}]'}]
    folder = entry(rows, formatting="sharegpt", columns={"messages": "conversations", "tools": "tools"})
    (row,) = read_entry(folder, "d", "k").rows
    assert row["prompt"][1] == {
        "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}],
    }  # fmt: skip
    assert row["prompt"][2] == {"role": "tool", "content": "red"}
    tokenizer = tiny_tokenizer()
    options = {"key": "data.prompts", "dataset_dir": folder}
    with pytest.raises(DataError, match=r"row 0, tools: the chat template does not use tools"):
        load_prompts("d", tokenizer, **options)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.name }} {% endfor %}{% for m in messages %}<{{ m.role }}> "
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }}{% endfor %}{{ m.content }} {% endfor %}"
    )
    (prompt,) = load_prompts("d", tokenizer, **options).prompts
    assert prompt.text == "look <user> the cat <assistant> cat <tool> red "
    (demonstration,) = load_demonstrations("d", tokenizer, every_turn=True, dataset_dir=folder).demonstrations
    assert tokenizer.decode(demonstration.response_ids) == "it is red <eos>", "and not the call"


def test_rows_without_an_answer_are_dropped_and_counted_where_an_entry_describes_them(entry, tmp_path):
    answers = ("is good", "", None, " ", "is bad")
    rows = [{"instruction": "the cat", "output": out} for out in answers]
    same = {"key": "k", "dataset_dir": entry(rows)}
    data = load_demonstrations("d", **same)
    assert [each.row for each in data.demonstrations] == [0, 4]
    assert (data.num_rows, data.num_unanswered, data.num_too_long) == (5, 3, 0)
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"prompt": "the cat", "completion": out}) + "\n" for out in answers))
    with pytest.raises(DataError, match=r"row 1 \(line 2\), completion: got '', wanted text"):
        load_demonstrations(str(own))
    entry(rows[1:3])
    with pytest.raises(DataError, match=r"k: no row of .* \(2 rows\) has an answer; wanted some to train on"):
        load_demonstrations("d", **same)


def test_every_stage_reads_an_entry(entry):
    tokenizer = tiny_tokenizer()
    query = "<user> the cat <eos> <assistant>"
    folder = entry([{"instruction": "the cat", "output": "is good"}])
    same = {"key": "k", "dataset_dir": folder}
    (prompt,) = load_prompts("d", tokenizer, **same).prompts
    assert prompt.text == query and prompt.columns["messages"][-1] == assistant("is good")
    (demonstration,) = load_demonstrations("d", tokenizer, **same).demonstrations
    assert tokenizer.decode(demonstration.query_ids) == query
    assert tokenizer.decode(demonstration.response_ids) == "is good <eos>"
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    rows = [{"instruction": "the cat", "chosen": "is good", "rejected": "is bad"}]
    entry(rows, ranking=True, columns=columns)
    (pair,) = load_pairs("d", tokenizer, **same).pairs
    assert tokenizer.decode(pair.chosen_ids) == f"{query} is good <eos>"
    (prompt,) = load_prompts("d", tokenizer, **same).prompts
    assert prompt.text == query


def test_a_number_of_samples_is_drawn_and_keeps_the_rows_own_numbers(entry):
    rows = [{"instruction": str(i), "output": "x"} for i in range(20)]
    table = read_entry(entry(rows, num_samples=5), "d", "k")
    numbers = [int(row["prompt"][0]["content"]) for row in table.rows]
    assert len(set(numbers)) == 5 and numbers != list(range(5))
    assert [table.where(i).rpartition("row ")[2] for i in range(5)] == list(map(str, numbers))
    assert read_entry(entry(rows, num_samples=5), "d", "k").rows == table.rows
    more = [row["prompt"][0]["content"] for row in read_entry(entry(rows, num_samples=50), "d", "k").rows]
    assert len(more) == 50 and set(more) == {str(i) for i in range(20)}


def test_no_more_rows_are_read_than_are_asked_for(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a"}\n{"instruction": "b"}\n{broken\n')
    info = {"d": {"file_name": "rows.jsonl", "file_sha1": "0a1b"}, "e": {"file_name": "rows.jsonl", "num_samples": 1}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    assert len(read_datasets(DataSource("d", key="k", dataset_dir=str(tmp_path), max_samples=2)).rows) == 2
    with pytest.raises(DataError, match="line 3"):  # a share of all rows is drawn, so all are read
        read_datasets(DataSource("e", key="k", dataset_dir=str(tmp_path), max_samples=1))


def test_hub_ids_without_a_file_are_in_alpaca_format(monkeypatch):
    import datasets

    rows = [{"instruction": "the cat", "input": "sees", "output": "a dog"}]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", lambda path, split: datasets.Dataset.from_list(rows))
    check_datasets(DataSource("org/alpaca", "data.prompts", dataset_dir="ONLINE"))
    (row,) = read_datasets(DataSource("org/alpaca", key="data.prompts", dataset_dir="ONLINE")).rows
    assert row == {"prompt": [user("the cat\nsees")], "messages": [user("the cat\nsees"), assistant("a dog")]}


def test_a_hub_dataset_with_its_subset_and_split(entry, monkeypatch, tmp_path):
    import datasets

    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        return datasets.Dataset.from_list([{"instruction": "a", "input": "", "output": "b"}])

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, config_name, **within: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = {"hf_hub_url": "org/data", "subset": "en", "folder": "v2", "split": "test", "revision": "main"}
    info = {"d": settings | {"file_name": "a copy that the hub goes before.json"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    check_entry(str(tmp_path), "d", "k")
    assert read_entry(str(tmp_path), "d", "k").rows[0]["prompt"] == [user("a")]
    assert asked == [("org/data", {"split": "test", "name": "en", "data_dir": "v2", "revision": "main"})]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"formatting": "chatml"}, "formatting is 'chatml', wanted alpaca, sharegpt or openai"),
        ({"columns": {"images": "images"}}, r"columns\.images: only text is supported"),
        ({"columns": {"respons": "a"}}, r"unknown key columns\.respons; did you mean columns\.response\?"),
        ({"tags": {"usertag": "a"}}, r"unknown key tags\.usertag; did you mean tags\.user_tag\?"),
        ({"ranking": True, "columns": {"prompt": "a", "chosen": "b", "response": "c"}},
         r"ranking needs columns\.chosen and columns\.rejected, or columns\.response alone, with both in a list"),
        ({"ranking": True, "formatting": "sharegpt"}, r"ranking needs columns\.chosen and columns\.rejected$"),
        ({"num_samples": 0}, "num_samples is 0, wanted a whole number above 0"),
        ({"formating": "sharegpt"}, r"unknown key formating; did you mean formatting\?"),
        ({"file_name": "none.json"}, "no such file"),
    ],
)
def test_entries_that_cannot_be_read(entry, settings, message):
    with pytest.raises(DataError, match=f"^data.prompts: d in .*dataset_info.json.*{message}"):
        check_entry(entry([], **settings), "d", "data.prompts")


def test_what_llamafactory_does_not_read_either_is_passed_over_with_a_warning(entry, caplog):
    rows = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    more = {"stage": "sft", "columns": {"messages": "conversations", "content": "value"}, "tags": {"user": "human"}}
    (row,) = read_entry(entry(rows, formatting="sharegpt", **more), "d", "k").rows
    assert row["messages"] == [user("a"), assistant("b")]
    assert caplog.messages == [
        f"k: d in {entry(rows)}/dataset_info.json: passed over, as LLaMA-Factory does not read it either: "
        "stage, columns.content, tags.user"
    ]


def test_answers_with_a_verdict_have_prompts_and_no_demonstrations(entry):
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}]
    columns = {"messages": "messages", "kto_tag": "label"}
    folder = entry([{"messages": turns, "label": True}], formatting="openai", columns=columns)
    (row,) = read_entry(folder, "d", "k").rows
    assert row == {"prompt": [user("the cat")]}
    columns = {"prompt": "instruction", "response": "output", "kto_tag": "label"}
    alpaca = [{"instruction": "the cat", "output": "a dog", "label": False}]
    (row,) = read_entry(entry(alpaca, columns=columns), "d", "k").rows
    assert row == {"prompt": [user("the cat")]}


@pytest.mark.parametrize("key", ["script_url", "ms_hub_url"])
def test_origins_that_are_refused(tmp_path, key):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": {key: "x"}}))
    with pytest.raises(DataError, match=rf"{key}: "):
        check_entry(str(tmp_path), "d", "k")


def test_names_and_folders_that_are_not_there(entry, tmp_path):
    with pytest.raises(DataError, match=r"^k: .*dataset_info\.json has no dataset e; it has d, other$"):
        check_datasets(DataSource(["d", "e"], "k", dataset_dir=entry([])))
    with pytest.raises(DataError, match=r"^data\.dataset_dir: .*none/dataset_info\.json cannot be read"):
        check_datasets(DataSource("d", "k", dataset_dir=str(tmp_path / "none")))
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        check_datasets(DataSource("d", "k", dataset_dir=str(tmp_path)))


ALPACA = {"instruction": "a", "output": "b"}


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"output": "b"}, {}, "instruction: there is no column instruction; the columns are output, wanted text"),
        ({"instruction": 3, "output": "b"}, {}, "instruction: got 3, wanted text"),
        ({"instruction": "a", "output": 3}, {}, "output: got 3, wanted text"),
        (
            {"instruction": "a", "h": [["a"]]},
            {"columns": {"prompt": "instruction", "history": "h"}},
            r"h, entry 0: got \['a'\], wanted a question and its answer",
        ),
        (
            {"instruction": "a", "h": "5"},
            {"columns": {"prompt": "instruction", "history": "h"}},
            "h: got 5, wanted a list of questions and their answers",
        ),
        ({"conversations": None}, {"formatting": "sharegpt"}, "conversations: got None, wanted a list of turns"),
        (
            {"conversations": [{"from": "human", "value": "a", "tool_calls": 5}]},
            {"formatting": "openai", "tags": {"role_tag": "from", "content_tag": "value"}},
            "turn 0: got the tool_calls 5, wanted a list of calls",
        ),
        (
            {"conversations": [{"role": "user", "content": "x"}]},
            {"formatting": "sharegpt"},
            "turn 0: got .*, wanted text under from and value",
        ),
        ({"conversations": "[{"}, {"formatting": "sharegpt"}, "conversations: not JSON: "),
        (
            {"conversations": [{"from": "human", "value": [{"type": "image"}]}]},
            {"formatting": "sharegpt"},
            "turn 0: content is .*: part 0 is of type 'image'",
        ),
        (
            {"conversations": [*TURNS, {"from": "function_call", "value": "look"}]},
            {"formatting": "sharegpt"},
            "turn 2: the function call is not JSON",
        ),
    ],
)
def test_rows_that_do_not_fit_are_named(entry, row, settings, message):
    good = {"conversations": TURNS} if settings.get("formatting") else ALPACA
    with pytest.raises(DataError, match=f"row 1, {'conversations, ' if 'turn ' in message[:5] else ''}{message}"):
        load_prompts("d", key="k", dataset_dir=entry([good, row], **settings))


def test_several_datasets_are_joined_and_each_is_cut(tmp_path):
    for name, count in (("a", 3), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": f"{name}{i}"}) for i in range(count)))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    table = read_datasets(DataSource(files, key="k", max_samples=2))
    assert [row["prompt"] for row in table.rows] == ["a0", "a1", "b0", "b1"]
    assert table.where(2) == f"{files[1]}, row 0 (line 1)"
    assert [row["prompt"] for row in read_datasets(DataSource(files[1], key="k")).rows] == ["b0", "b1"]
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"none\.jsonl has no rows"):
        read_datasets(DataSource([*files, str(tmp_path / "none.jsonl")], key="k"))
