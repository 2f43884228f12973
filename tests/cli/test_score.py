"""``tether score``: a judge's self-test from the command line."""

import json

import pytest

from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.config.load import dump_config
from tether.metrics.writers import read_jsonl

PAIRS = [
    {"prompt": "the cat", "chosen": "good nice day", "rejected": "bad"},
    {"prompt": "you", "chosen": "good", "rejected": "a very bad day"},
]


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was(monkeypatch):
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS), encoding="utf-8")
    (tmp_path / "length.py").write_text("def length(prompts, completions): return [len(c) for c in completions]")
    (tmp_path / "source.yaml").write_text("rewards: [{type: function, path: length.py, name: length}]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_says_how_well_pairs_are_told_apart(folder, capsys):
    assert main(["score", "source.yaml", "pairs.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "2 pairs of pairs.jsonl" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("│ score")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["score", "0.5", "0.354", "0", "8.5", "8.5", "0", "1"]
    assert "the chosen answer is longer" in shown


def test_keys_can_be_set_and_rows_written(folder, capsys):
    assert main(["score", "source.yaml", "pairs.jsonl", "-o", "out.jsonl", "--rewards.0.weight=-2"]) == 0
    assert [row["chosen_score"] for row in read_jsonl(folder / "out.jsonl")] == [-26.0, -8.0]
    assert main(["score", "source.yaml", "pairs.jsonl", "-o", "out.jsonl"]) == 2
    assert "--output: out.jsonl exists" in capsys.readouterr().err


def test_a_runs_own_file_will_do_and_the_models_text_is_shown(folder, capsys):
    save_tiny(folder / "judge", num_labels=1)
    run = tiny_run(folder, rewards=[{"type": "model", "path": str(folder / "judge")}])
    (folder / "run.yaml").write_text(dump_config(run), encoding="utf-8")
    assert main(["score", "run.yaml", "pairs.jsonl"]) == 0
    assert "row 0, chosen, as model reads it: '<user> the cat <eos> <assistant> good nice day <eos>'" in (
        capsys.readouterr().out.replace("\n", "")
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["source.yaml", "none.jsonl"], "FILE: no such file or folder: none.jsonl"),
        (["none.yaml", "pairs.jsonl"], "none.yaml: there is no such file"),
        (["source.yaml", "pairs.jsonl", "--rewards.0.nam=f"], "--rewards.0.nam: unknown key"),
        (["source.yaml"], "the following arguments are required: FILE"),
    ],
)
def test_mistakes(folder, capsys, arguments, told):
    assert main(["score", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_columns_under_other_names(folder, capsys):
    rows = [{"ask": "the cat", "said": "good"}, {"ask": "a dog", "said": "so good nice"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["score", "source.yaml", "rows.jsonl"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "its columns are: ask, said. Rename them, or name them by --columns: {prompt: …, completion: …}" in told
    named = "--columns={prompt: ask, completion: said}"
    assert main(["score", "source.yaml", "rows.jsonl", named, "-o", "scored.jsonl", "--metrics=m.json"]) == 0
    scored = [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["response"]) for row in scored] == [("the cat", "good"), ("a dog", "so good nice")]
    assert json.loads((folder / "m.json").read_text())["columns"] == {"prompt": "ask", "completion": "said"}


def test_a_subset_of_a_folder_is_read_by_its_name(folder, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    entries = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("first", "second"))
    (folder / "data").mkdir()
    (folder / "data" / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    for name, pairs in (("first", PAIRS), ("second", PAIRS[:1])):
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert main(["score", "source.yaml", "data", "--subset", "second"]) == 0
    assert "1 pair of data" in capsys.readouterr().out
    assert main(["score", "source.yaml", "data"]) == 2
    assert "has the subsets first, second: choose one with --subset" in " ".join(capsys.readouterr().err.split())
