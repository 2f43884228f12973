"""Every form a dataset comes in, and what is said of those that cannot be read."""

import csv
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tether.data.sources import check_source, read_rows
from tether.errors import DataError

ROWS = [
    {"prompt": "the cat", "answer": "good"},
    {"prompt": "a dog\nruns", "answer": "bad"},
    {"prompt": "ü", "answer": "x"},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_jsonl(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


def write_csv(path):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_folder(path):
    (path / "data").mkdir(parents=True)
    write_jsonl(path / "data" / "train.jsonl")
    (path / "data" / "test.jsonl").write_text(json.dumps({"prompt": "night", "answer": "z"}) + "\n")


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8"),
    "lines.json": write_jsonl,
    "bom.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8-sig"),
    "rows.csv": write_csv,
    "rows.PARQUET": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "saved_splits": lambda path: datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:1])
    ).save_to_disk(path),
    "folder": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_all_forms_hold_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    check_source(str(tmp_path / name), "data.prompts")
    assert read_rows(str(tmp_path / name), split="train", key="data.prompts").rows == ROWS


def test_csv_holds_chat_messages_as_json(tmp_path):
    messages = [{"role": "user", "content": "the, \"cat\""}]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(messages)], ["a dog"]])
    rows = read_rows(str(tmp_path / "rows.csv"), split="train", key="k").rows
    assert rows == [{"messages": messages}, {"messages": "a dog"}]
    with (tmp_path / "long.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt"], ["a" * 200_000]])
    assert read_rows(str(tmp_path / "long.csv"), split="train", key="k").rows == [{"prompt": "a" * 200_000}]
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["chosen", "rejected", "tags"], [json.dumps(messages), "[a] dog", '[{"role": 1}]']])
    rows = read_rows(str(tmp_path / "pairs.csv"), split="train", key="k").rows
    assert rows == [{"chosen": messages, "rejected": "[a] dog", "tags": '[{"role": 1}]'}]


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl")
    assert read_rows("~/rows.jsonl", split="train", key="k").rows == ROWS


@pytest.mark.parametrize("name", ["saved_splits", "folder"])
def test_splits(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert len(read_rows(str(tmp_path / name), split="test", key="k").rows) == 1
    with pytest.raises(DataError, match=r"data.prompts: .* has no split valid; it has train, test"):
        read_rows(str(tmp_path / name), split="valid", key="data.prompts")


def test_a_single_split_is_read_whatever_it_is_called(tmp_path):
    datasets.DatasetDict(held_out=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "one")
    assert read_rows(str(tmp_path / "one"), split="train", key="k").rows == ROWS


BROKEN = {
    "rows.jsonl": ('{"prompt": "a"}\n\n{"prompt": "b",}\n', "line 3: not JSON: .* at column "),
    "list.jsonl": ('{"prompt": "a"}\n["b"]\n', "line 2: got list, wanted an object, one entry a column"),
    "rows.json": ('[\n  {"prompt": "a"},\n  {"prompt": b}\n]', "line 3: not JSON: .* at column 14"),
    "object.json": ('{\n "data": [{"prompt": "a"}]\n}', "got one object with the keys data; wanted a list of rows"),
    "chosen.csv": ("chosen\n\"[{'role': 'user'}]\"\n", "line 2: chosen is not JSON: .*a JSON list of chat"),
    "text.json": ('[{"prompt": "a"}, "b"]', "row 1: got str, wanted an object"),
    "rows.csv": ('prompt,answer\n"a\nb",c\nd\n', "line 4: got 1 cells, the header has 2"),
    "messages.csv": ("messages\n\"[{'role': 'user'}]\"\n", "line 2: messages is not JSON: .*a JSON list of chat"),
    "open.csv": ('prompt,answer\n"a\nb,c\nd\n', "line 2: not CSV: "),
    "rows.parquet": ("prompt", "not a parquet file: "),
    "empty.jsonl": ("", "is empty"),
    "rows.txt": ("the cat", "is of an unknown form; wanted a .jsonl, .json, .csv or .parquet file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named_with_the_line(tmp_path, name):
    text, message = BROKEN[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"^data\.prompts: .*{name}.*{message}"):
        read_rows(str(tmp_path / name), split="train", key="data.prompts")


def test_files_that_are_not_utf8(tmp_path):
    (tmp_path / "rows.csv").write_bytes("prompt\nü\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"data\.prompts: .*rows\.csv is not UTF-8 text"):
        read_rows(str(tmp_path / "rows.csv"), split="train", key="data.prompts")


@pytest.mark.parametrize("source", ["none.jsonl", "no/such/folder/here", "./missing", "~/missing", "org/rows.csv"])
def test_what_does_not_exist_is_refused_without_a_look_at_the_hub(source):
    with pytest.raises(DataError, match=rf"^data\.prompts: no such file or folder: {source}$"):
        check_source(source, "data.prompts")


def test_a_folder_without_files(tmp_path):
    (tmp_path / "inner").mkdir()
    with pytest.raises(DataError, match=r"data\.prompts: folder .* holds no files"):
        check_source(str(tmp_path), "data.prompts")


def test_a_folder_that_datasets_cannot_read(tmp_path):
    (tmp_path / "train.jsonl").write_text("{broken\n")
    with pytest.raises(DataError, match=r"data\.prompts: cannot read folder .*: "):
        read_rows(str(tmp_path), split="train", key="data.prompts")


@pytest.mark.parametrize("name", ["org/prompts", "prompts"])
def test_a_hub_id_that_cannot_be_reached_says_the_way_out(name):
    check_source(name, "data.prompts")
    with pytest.raises(DataError, match=rf"(?s)data\.prompts: {name} is no file .*HF_HUB_OFFLINE.*a local file"):
        read_rows(name, split="train", key="data.prompts")


def test_a_hub_id_is_loaded_by_datasets(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = read_rows("org/prompts", split="test", key="k")
    assert table.rows == ROWS and asked == [("org/prompts", "test")]
    assert table.where(1) == "org/prompts (split test), row 1"


def test_rows_are_called_by_number_and_line(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt\n"a\nb"\n\nc\n')
    table = read_rows(str(tmp_path / "rows.csv"), split="train", key="k")
    assert [table.where(i).rpartition("rows.csv")[2] for i in range(2)] == [", row 0 (line 2)", ", row 1 (line 5)"]
