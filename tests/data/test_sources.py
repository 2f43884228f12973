"""Every form a dataset comes in, and what is said of those that cannot be read."""

import csv
import gzip
import json
import os
import subprocess
import sys

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


def write_gz(path):
    write_csv(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_configurations(path):
    """A folder as it is on the hub, with two subsets."""
    names = ("main", "socratic")
    entries = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in names)
    path.mkdir()
    (path / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    for name in names:
        (path / f"{name}.jsonl").write_text(json.dumps({"question": f"the {name}", "answer": "4"}) + "\n")


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8"),
    "lines.json": write_jsonl,
    "bom.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8-sig"),
    "rows.csv": write_csv,
    "zipped.csv.gz": write_gz,
    "zipped.jsonl.gz": lambda path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
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


def test_a_cell_of_csv_may_be_long(tmp_path):
    with (tmp_path / "long.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt"], ["a" * 200_000]])
    assert read_rows(str(tmp_path / "long.csv"), split="train", key="k").rows == [{"prompt": "a" * 200_000}]


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl")
    assert read_rows("~/rows.jsonl", split="train", key="k").rows == ROWS


@pytest.mark.parametrize("name", ["saved_splits", "folder"])
def test_splits(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert len(read_rows(str(tmp_path / name), split="test", key="k").rows) == 1
    named = {"data.prompts": "data.split", "data.eval_pairs": "data.eval_split", "--prompts": "--split"}
    for key, option in named.items():
        with pytest.raises(DataError, match=rf"^{key}: .* no split valid; it has train, test: choose with {option}$"):
            read_rows(str(tmp_path / name), split="valid", key=key)


def test_a_single_split_is_read_whatever_it_is_called(tmp_path):
    datasets.DatasetDict(held_out=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "one")
    for split in ("train", "train+test"):
        assert read_rows(str(tmp_path / "one"), split=split, key="k").rows == ROWS


MANY = [{"prompt": f"text {i}"} for i in range(11)]
SPLITS = {
    "train": MANY,
    "train[:3]": MANY[:3],
    "train[2:4]": MANY[2:4],
    "train[-3:]": MANY[-3:],
    "train[:-9]": MANY[:-9],
    "train[:90%]": MANY[:10],
    "train[90%:]": MANY[10:],
    "train[-20%:]": MANY[-2:],
    "train[5:1000]": MANY[5:],
    "train[:2] + train[9:]": MANY[:2] + MANY[9:],
}
MANY_WRITERS = {
    "rows.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, MANY))),
    "rows.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(MANY), path),
    "saved": lambda path: datasets.Dataset.from_list(MANY).save_to_disk(path),
    "folder": lambda path: (path.mkdir(), (path / "train.jsonl").write_text("\n".join(map(json.dumps, MANY)))),
}


@pytest.mark.parametrize("form", MANY_WRITERS)
def test_parts_of_a_split_are_those_that_datasets_reads(tmp_path, form):
    MANY_WRITERS[form](tmp_path / form)
    for split, wanted in SPLITS.items():
        read = read_rows(str(tmp_path / form), split=split, key="k")
        assert read.rows == wanted, split
        assert read_rows(str(tmp_path / form), split=split, key="k", max_rows=2).rows == wanted[:2], split
    assert read_rows(str(tmp_path / form), split="validation[1:2]", key="k").rows == MANY[1:2], "the only split"
    datasets.Dataset.from_list(MANY).to_json(tmp_path / "all.jsonl")
    for split, wanted in SPLITS.items():
        files = {"train": str(tmp_path / "all.jsonl")}
        assert list(datasets.load_dataset("json", data_files=files, split=split.replace(" ", ""))) == wanted, split


@pytest.mark.parametrize("name", ["saved_splits", "folder"])
def test_several_splits_are_joined(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = read_rows(str(tmp_path / name), split="train[1:]+test", key="k").rows
    assert rows[:2] == ROWS[1:] and len(rows) == 3


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train[:10", r"the split train\[:10 cannot be read at 'train\[:10'; wanted NAME, NAME\[FROM:TO\]"),
        ("train[5]", r"the split train\[5\] cannot be read"),
        ("train[0.5:]", "cannot be read"),
        ("train+", "cannot be read at ''"),
        ("train[10:50%]", "in both rows and percent"),
        ("train[:101%]", "asks for 101% of the rows, wanted at most 100%"),
        ("train[:1]+test", "has no split test; it has train"),
    ],
)
def test_splits_that_cannot_be_read(tmp_path, split, message):
    write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=rf"^data\.prompts: .*{message}"):
        read_rows(str(tmp_path / "rows.jsonl"), split=split, key="data.prompts")


def test_rows_of_a_part_keep_their_own_numbers(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl")
    table = read_rows(str(tmp_path / "rows.jsonl"), split="train[1:]", key="k")
    assert [table.where(i).rpartition("jsonl")[2] for i in (0, 1)] == [", row 1 (line 2)", ", row 2 (line 3)"]
    MANY_WRITERS["saved"](tmp_path / "saved")
    assert read_rows(str(tmp_path / "saved"), split="train[5:]", key="k").where(1).endswith("(split train[5:]), row 1")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_rows_that_are_not_asked_for_are_not_read(tmp_path, name):
    lines = ["prompt", "a", "b", "c,d"] if name == "rows.csv" else ['{"prompt": "a"}', '{"prompt": "b"}', "{broken"]
    (tmp_path / name).write_text("\n".join(lines))
    for options in ({"split": "train", "max_rows": 2}, {"split": "train[:2]"}, {"split": "train[1:]", "max_rows": 1}):
        assert read_rows(str(tmp_path / name), key="k", **options).rows[-1] == {"prompt": "b"}
    with pytest.raises(DataError, match=rf"{name}, line "):
        read_rows(str(tmp_path / name), split="train", key="k", max_rows=3)


@pytest.mark.parametrize("name", ["folder", "saved"])
def test_of_datasets_no_more_rows_are_made_than_are_asked_for(tmp_path, monkeypatch, name):
    MANY_WRITERS[name](tmp_path / name)
    made = []
    as_row = datasets.formatting.formatting.PythonFormatter.format_row
    monkeypatch.setattr(
        datasets.formatting.formatting.PythonFormatter, "format_row",
        lambda self, table: made.append(1) or as_row(self, table),
    )  # fmt: skip
    monkeypatch.setattr(
        datasets.formatting.formatting.PythonFormatter, "format_batch",
        lambda self, table: pytest.fail("read in batches: count those"),
    )  # fmt: skip
    assert read_rows(str(tmp_path / name), split="train", key="k", max_rows=2).rows == MANY[:2]
    assert len(made) == 2


def test_subsets_are_named_by_their_key(tmp_path):
    write_configurations(tmp_path / "data")
    folder = str(tmp_path / "data")
    rows = read_rows(folder, split="train", subset="socratic", key="data.prompts").rows
    assert rows == [{"question": "the socratic", "answer": "4"}]
    asked = {"split": "train", "key": "data.prompts"}
    with pytest.raises(DataError, match=r"^data\.prompts: .* subsets main, socratic: choose one with data\.subset$"):
        read_rows(folder, **asked)
    with pytest.raises(DataError, match=r"main, socratic, but none called other: choose one with data\.subset$"):
        read_rows(folder, subset="other", **asked)
    with pytest.raises(DataError, match=r"main, socratic: choose one with --subset$"):
        read_rows(folder, split="train", key="--prompts")
    with pytest.raises(DataError, match=r"main, socratic: save one of them, and name its file$"):
        read_rows(folder, split="train", key="data.prompts: d in dataset_info.json, file_name")
    write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"^data\.subset: got main, but .*rows\.jsonl is a file, which has no subsets"):
        read_rows(str(tmp_path / "rows.jsonl"), subset="main", **asked)


def test_all_columns_are_read_whatever_a_saved_dataset_shows(tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.set_format("numpy", columns=["answer"])
    saved.save_to_disk(tmp_path / "saved")
    assert read_rows(str(tmp_path / "saved"), split="train", key="k").rows == ROWS


IMAGES = """
import sys
from tether.data.digest import rows_digest
from tether.data.sources import read_rows
rows = read_rows(sys.argv[1], split="train", key="k").rows
print(rows_digest([(i, ([1],), row) for i, row in enumerate(rows)]))
"""


def test_images_are_left_as_they_are_stored_so_that_a_run_knows_its_rows_again(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pictures = [image.new("RGB", (2, 2), (i, 0, 0)) for i in range(2)]
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "image": datasets.Image(), "more": datasets.List(datasets.Image())}
    )
    rows = [{"prompt": "the cat", "image": picture, "more": [picture]} for picture in pictures]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    read = read_rows(str(tmp_path / "saved"), split="train", key="k").rows
    assert read[0]["image"]["bytes"] == read[0]["more"][0]["bytes"] != read[1]["image"]["bytes"]
    digests = {
        subprocess.run(
            [sys.executable, "-c", IMAGES, str(tmp_path / "saved")], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == 64


def test_what_datasets_cannot_do_is_told_under_the_key(tmp_path, monkeypatch):
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("import datasets\n")
    with pytest.raises(DataError, match=r"^data\.prompts: cannot read folder .*Dataset scripts are no longer"):
        read_rows(str(tmp_path / "script"), split="train", key="data.prompts")

    def no_pillow(*given, **options):
        raise ImportError("To support decoding images, please install 'Pillow'.")

    monkeypatch.setattr(datasets, "load_from_disk", no_pillow)
    WRITERS["saved"](tmp_path / "saved")
    with pytest.raises(DataError, match=r"^data\.prompts: .*saved was saved by datasets but .*install 'Pillow'"):
        read_rows(str(tmp_path / "saved"), split="train", key="data.prompts")


BROKEN = {
    "rows.jsonl": ('{"prompt": "a"}\n\n{"prompt": "b",}\n', "line 3: not JSON: .* at column "),
    "unclosed.jsonl": ('{"prompt": "a"}\n{"prompt": "b"\n{"prompt": "c"}\n', "line 2: not JSON: .* at column 15$"),
    "list.jsonl": ('{"prompt": "a"}\n["b"]\n', "line 2: got list, wanted an object with one entry per column"),
    "twice.jsonl": ('{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}\n', "line 2: has 'prompt' several times in one"),
    "inner.jsonl": ('{"prompt": [{"role": "user", "content": "a", "role": "user"}]}\n', "line 1: has 'role' several"),
    "twice.json": ('{"prompt": "a", "prompt": "b"}', "line 1: has 'prompt' several times in one object; wanted each"),
    "list.json": ('[{"prompt": "a", "prompt": "b"}]', "has 'prompt' several times in one object; wanted"),
    "rows.json": ('[\n  {"prompt": "a"},\n  {"prompt": b}\n]', "line 3: not JSON: .* at column 14"),
    "object.json": ('{\n "data": [{"prompt": "a"}]\n}', "got one object with the keys data; wanted a list of rows"),
    "text.json": ('[{"prompt": "a"}, "b"]', "row 1: got str, wanted an object"),
    "rows.csv": ('prompt,answer\n"a\nb",c\nd\n', "line 4: got 1 cells, the header has 2"),
    "semicolons.csv": ("prompt;topic\n'Why; how?';sky\n", "line 1: got the one column 'prompt;topic'; wanted commas"),
    "tabs.csv": ("prompt\ttopic\nWhy?\tsky\n", "line 1: .*; wanted commas between columns, not tabs"),
    "open.csv": ('prompt,answer\n"a\nb,c\nd\n', "line 2: not CSV: "),
    "twice.csv": ("prompt,answer,,answer,\na,b,c,d,e\n", "line 1: has several columns 'answer'; wanted one of each"),
    "rows.parquet": ("prompt", "not a parquet file: "),
    "empty.jsonl": ("", "is empty"),
    "plain.jsonl.gz": ('{"prompt": "a"}', "cannot be read: Not a gzipped file"),
    "rows.parquet.gz": ("x", "has an unknown format"),
    "rows.txt": ("the cat", "has an unknown format; wanted a .jsonl, .json, .csv or .parquet file"),
}


def test_columns_without_a_name_may_be_several(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,,\na,b,c\n")
    (row,) = read_rows(str(tmp_path / "rows.csv"), split="train", key="k").rows
    assert row["prompt"] == "a"


def test_columns_of_parquet_with_one_name_are_refused(tmp_path):
    arrays = [pyarrow.array([text]) for text in ("a", "b", "c")]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays(arrays, names=["prompt", "answer", "answer"]), tmp_path / "rows.parquet"
    )
    with pytest.raises(DataError, match=r"rows\.parquet: has several columns 'answer'; wanted one of each name"):
        read_rows(str(tmp_path / "rows.parquet"), split="train", key="data.prompts")


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


def test_a_pipe_is_told_as_one(tmp_path):
    """It could be read once, but a run reads its data again when it is resumed."""
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"^data\.prompts: .*rows\.jsonl is a pipe or a device, which cannot be r"):
        check_source(str(tmp_path / "rows.jsonl"), "data.prompts")


@pytest.mark.parametrize("settings", ["config.json", "adapter_config.json"])
def test_the_folder_of_a_model_is_not_read_as_data(tmp_path, settings):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    check_source(str(tmp_path), "data.prompts")
    (tmp_path / settings).write_text("{}")
    with pytest.raises(DataError, match=r"^data\.prompts: folder .* holds a model; wanted a \.jsonl"):
        check_source(str(tmp_path), "data.prompts")


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
    with pytest.raises(DataError, match=rf"(?s)data\.prompts: {name} is not a local .*HF_HUB_OFFLINE.*a local file"):
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


def test_what_is_read_from_the_hub_is_told_as_it_may_take_long(tmp_path, monkeypatch, caplog):
    told = "reading the dataset org/prompts from the hub (HF_HUB_OFFLINE=1 reads its cache alone)"
    with caplog.at_level("INFO", logger="tether"):
        for is_offline, shown in ((True, []), (False, [told])):
            monkeypatch.setattr("tether.data.sources.HF_HUB_OFFLINE", is_offline)
            with pytest.raises(DataError, match="cannot be loaded"):
                read_rows("org/prompts", split="train", key="k")
            assert caplog.messages == shown


def test_a_revision_of_a_hub_dataset_is_asked_for_everywhere_and_named(monkeypatch):
    asked = []

    def of_revision(name, *given, revision, **options):
        asked.append((name, revision, options))
        return ["train"]

    monkeypatch.setattr(datasets, "get_dataset_split_names", of_revision)

    def load_dataset(*given, **options):
        of_revision(*given, **options)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = read_rows("org/prompts", split="train", revision="v1", key="k")
    assert table.name == "org/prompts (split train, revision v1)"
    assert asked == [("org/prompts", "v1", {}), ("org/prompts", "v1", {"split": "train"})]

    def none(name, *given, **options):
        raise ValueError("which of them")

    monkeypatch.setattr(datasets, "load_dataset", none)
    monkeypatch.setattr(
        datasets, "get_dataset_config_names", lambda *given, **options: [*of_revision(*given, **options), "test"]
    )
    with pytest.raises(DataError, match=r"the subsets train, test: choose one with data\.subset"):
        read_rows("org/prompts", split="train", revision="v1", key="data.prompts")
    assert asked[-1] == ("org/prompts", "v1", {})


@pytest.mark.parametrize(("name", "what"), [("rows.jsonl", "file"), ("saved", "folder"), ("folder", "folder")])
def test_what_is_local_has_no_revisions(tmp_path, name, what):
    WRITERS[name](tmp_path / name)
    for look in (check_source, lambda *given, **options: read_rows(*given[:1], split="train", key=given[1], **options)):
        with pytest.raises(
            DataError, match=rf"^data\.eval_revision: got v1, but .*{name} is a local {what}, which .*: leave it out$"
        ):
            look(str(tmp_path / name), "data.eval_prompts", revision="v1")


def test_rows_are_called_by_number_and_line(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt\n"a\nb"\n\nc\n')
    table = read_rows(str(tmp_path / "rows.csv"), split="train", key="k")
    assert [table.where(i).rpartition("rows.csv")[2] for i in range(2)] == [", row 0 (line 2)", ", row 1 (line 5)"]
