"""Files of answers to be judged, in the forms that they come in."""

import json

import pytest

from tests.data.loading import load_judged
from tether.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def loaded(folder, *rows, is_chat=True):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_judged(str(file), is_chat=is_chat)


PAIRS = {
    "text": ({"prompt": "p", "chosen": "a", "rejected": "b"}, "p", ("a", "b")),
    "messages": ({"prompt": [user("p")], "chosen": [says("a")], "rejected": [says("b")]}, [user("p")], ("a", "b")),
    "conversations": ({"chosen": [user("p"), says("a")], "rejected": [user("p"), says("b")]}, [user("p")], ("a", "b")),
    "whole texts": ({"chosen": "p a", "rejected": "p b"}, None, ("p a", "p b")),
    "transcripts": (
        {"chosen": "\n\nHuman: p\n\nAssistant: a", "rejected": "\n\nHuman: p\n\nAssistant: b"}, [user("p")], ("a", "b"),
    ),
    "ShareGPT's": (
        {
            "chosen": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a"}],
            "rejected": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "b"}],
        },
        [user("p")],
        ("a", "b"),
    ),
    "several messages that go on": (
        {"prompt": "p", **{side: [says("x"), user("y"), says(side[0])] for side in ("chosen", "rejected")}},
        [user("p"), says("x"), user("y")],
        ("c", "r"),
    ),
    "conversations beside their prompt": (
        {"prompt": "p", "chosen": [user("p"), says("a")], "rejected": [user("p"), says("b")]}, [user("p")], ("a", "b"),
    ),
    "the same twice": ({"prompt": "p", "chosen": "a", "rejected": "a"}, "p", ("a", "a")),
    "beside an answer": ({"prompt": "p", "chosen": "a", "rejected": "b", "response": "c"}, "p", ("a", "b")),
}
ANSWERS = {
    "response": ({"prompt": "p", "response": "a"}, "p", ("a",)),
    "completion": ({"prompt": [user("p")], "completion": [says("a")]}, [user("p")], ("a",)),
    "a completion of several messages": (
        {"prompt": [user("p")], "completion": [says("x"), user("y"), says("a")]},
        [user("p"), says("x"), user("y")],
        ("a",),
    ),
    "a completion that begins with the user": (
        {"prompt": [user("p")], "completion": [user("y"), says("a")]}, [user("p"), user("y")], ("a",),
    ),
    "messages": ({"messages": [user("p"), says("a")]}, [user("p")], ("a",)),
    "a transcript": ({"prompt": "\n\nHuman: p\n\nAssistant:", "response": "a"}, [user("p")], ("a",)),
    "conversations": (
        {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a"}]}, [user("p")], ("a",),
    ),
    "an empty answer": ({"prompt": "p", "response": ""}, "p", ("",)),
}


@pytest.mark.parametrize(("row", "prompt", "answers"), PAIRS.values(), ids=PAIRS)
def test_pairs(tmp_path, row, prompt, answers):
    data = loaded(tmp_path, row)
    assert data.is_pairs
    assert (data.rows[0].prompt, data.rows[0].answers) == (prompt, answers)


@pytest.mark.parametrize(("row", "prompt", "answers"), ANSWERS.values(), ids=ANSWERS)
def test_answers(tmp_path, row, prompt, answers):
    data = loaded(tmp_path, row)
    assert not data.is_pairs
    assert (data.rows[0].prompt, data.rows[0].answers) == (prompt, answers)


def test_transcripts_stay_text_without_a_chat_template(tmp_path):
    asked = "\n\nHuman: p\n\nAssistant:"
    data = loaded(tmp_path, {"chosen": f"{asked} a", "rejected": f"{asked} b"}, is_chat=False)
    assert (data.rows[0].prompt, data.rows[0].answers) == (asked, (" a", " b"))


def test_every_row_has_all_other_columns(tmp_path):
    data = loaded(tmp_path, {"prompt": "p", "response": "a", "x": 1}, {"prompt": "q", "response": "b", "y": [2]})
    assert data.columns == ["x", "y"]
    assert [row.columns for row in data.rows] == [{"x": 1, "y": None}, {"x": None, "y": [2]}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"rows.jsonl is empty"),
        ([{"prompt": "p", "chosen": "a"}], r"neither chosen and rejected nor response .*columns are: prompt, chosen"),
        ([{"prompt": "p", "response": 7}], r"row 0 \(line 1\), response: got 7, wanted text or a list of"),
        ([{"prompt": "p", "chosen": "a", "rejected": None}], r"row 0 \(line 1\), rejected: got None"),
        ([{"response": "a"}], r"row 0 \(line 1\) has no prompt"),
        ([{"prompt": "p", "response": "a"}, {"prompt": "", "response": "a"}], r"row 1 \(line 2\) has no prompt"),
        ([{"prompt": "p", "response": "\ud800"}], r"row 0 \(line 1\): got '\\ud800' at character 0"),
        ([{"messages": [user("p")]}], r"row 0 \(line 1\), messages: the last message is .* wanted the assistant's"),
    ],
)
def test_rows_that_are_none(tmp_path, rows, message):
    with pytest.raises(DataError, match=rf"FILE: .*{message}"):
        loaded(tmp_path, *rows)
