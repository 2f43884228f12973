"""Rows that cannot be used: all are named at once, or left out, counted and told."""

import json
import logging

import pytest

from tests.data.loading import load_demonstrations, load_judged, load_pairs, load_prompts
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.config.load import parse_config
from tether.config.reward_stage import RewardStageConfig
from tether.config.sft_stage import SftStageConfig
from tether.errors import ConfigError, DataError
from tether.stages import reward, sft
from tether.train.display import NullDisplay
from tether.train.inputs import check_data, load_data, tell_data
from tether.train.plan import plan

LEFT_OUT = "3 left out as unusable"


def user(content):
    return {"role": "user", "content": content}


def says(content):
    return {"role": "assistant", "content": content}


def prompts(file, **options):
    return load_prompts(file, **options)


def demonstrations(file, **options):
    return load_demonstrations(file, **options)


def pairs(file, **options):
    return load_pairs(file, **options)


ROWS = {
    prompts: [
        {"prompt": "the cat"},
        {"prompt": [user("a"), says("b")]},  # found when the prompt is checked
        {"prompt": '[{"role": "user", "content": }]'},  # when the row is read
        {"prompt": "the dog"},
        {"prompt": [{"role": "robot", "content": "a"}]},  # when the template is applied
        {"prompt": "the sun", "id": 7},
    ],
    demonstrations: [
        {"prompt": "the cat", "completion": "sees"},
        {"prompt": "the cat", "completion": None},
        {"messages": [{"from": "human"}, {"from": "gpt", "value": "sees"}]},
        {"prompt": "the dog", "completion": "sees"},
        {"prompt": [{"role": "robot", "content": "a"}], "completion": "sees"},
        {"text": "the sun is red"},
    ],
    pairs: [
        {"prompt": "the cat", "chosen": "sees", "rejected": "runs"},
        {"prompt": "the cat", "chosen": 3, "rejected": "runs"},
        {"prompt": [{"role": "robot", "content": "a"}], "chosen": "sees", "rejected": "runs"},
        {"prompt": "the dog", "chosen": "sees", "rejected": "runs"},
        {"prompt": None, "chosen": "sees", "rejected": "runs"},
        {"prompt": "the sun", "chosen": "sees", "rejected": "runs"},
    ],
}
"""Rows of which 1, 2 and 4 cannot be used, by what reads them."""
RESULTS = {prompts: "prompts", demonstrations: "demonstrations", pairs: "pairs"}


@pytest.fixture
def write(tmp_path):
    def write(rows, name="rows"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / f"{name}.jsonl")

    return write


@pytest.mark.parametrize("read", ROWS, ids=RESULTS.values())
def test_all_of_them_are_named_at_once_in_the_order_of_the_file(write, read):
    file = write(ROWS[read])
    with pytest.raises(DataError) as refused:
        read(file)
    first, *named, way_out = str(refused.value).splitlines()
    assert first == f"data.k: 3 of 6 rows of {file} cannot be used:"
    assert [line.partition(")")[0] for line in named] == [f"  {file}, row {i} (line {i + 1}" for i in (1, 2, 4)]
    assert way_out == "Correct or remove them, or set data.drop_bad_rows: true to leave them out"


@pytest.mark.parametrize("read", ROWS, ids=RESULTS.values())
def test_they_are_left_out_and_counted_and_the_others_keep_their_numbers(write, read, caplog):
    with caplog.at_level(logging.WARNING):
        data = read(write(ROWS[read]), drop_bad_rows=True)
    assert [each.row for each in getattr(data, RESULTS[read])] == [0, 3, 5]
    assert (data.num_rows, data.num_bad, data.num_too_long) == (6, 3, 0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "3 of 6 rows" in record.message
    assert [line.partition(")")[0][-1] for line in record.message.splitlines()[1:]] == ["2", "3", "5"]
    good = [row for i, row in enumerate(ROWS[read]) if i not in (1, 2, 4)]
    alone = read(write(good))
    caplog.clear()
    assert read(write(good), drop_bad_rows=True) == alone and not caplog.records
    assert [each.row for each in getattr(alone, RESULTS[read])] == [0, 1, 2] and alone.num_bad == 0


def test_of_many_the_first_five_are_named(write):
    rows = [{"prompt": None} if i % 2 else {"prompt": "the cat"} for i in range(40)]
    with pytest.raises(DataError) as refused:
        prompts(write(rows))
    first, *named, _ = str(refused.value).splitlines()
    assert "20 of 40 rows" in first and first.endswith("cannot be used; the first:")
    assert [line.partition("row ")[2].partition(" ")[0] for line in named] == ["1", "3", "5", "7", "9"]


def test_a_single_one_is_told_as_before_with_the_way_out(write):
    file = write([{"prompt": "the cat"}, {"prompt": 3}])
    with pytest.raises(DataError) as refused:
        prompts(file)
    assert str(refused.value) == (
        f"data.k: {file}, row 1 (line 2): the prompt is a int, wanted text or a list of chat messages\n"
        "Correct or remove the row, or set data.drop_bad_rows: true to leave it out"
    )
    with pytest.raises(DataError, match=r"Correct or remove the row$"):
        prompts(file, key="--prompts")


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_where_all_rows_are_bad_the_data_is_refused_whatever_the_key_says(write, count, drops):
    with pytest.raises(DataError, match=r"the prompt is a int") as refused:
        prompts(write([{"prompt": 3}] * count), drop_bad_rows=drops)
    assert "drop_bad_rows" not in str(refused.value)


def test_what_is_wrong_with_all_rows_is_told_first_only_where_no_row_is_bad(write):
    rows = [{"prompt": "the cat sees a dog"}, {"prompt": 3}]
    with pytest.raises(DataError, match=r"row 1 .*the prompt is a int"):
        prompts(write(rows), limit=3)
    with pytest.raises(DataError, match=r"every prompt of .* \(1 prompt\) is longer than data\.max_prompt_length 3"):
        prompts(write(rows), limit=3, drop_bad_rows=True)


def test_a_file_that_cannot_be_parsed_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the cat"}\n{\n')
    with pytest.raises(DataError, match=r"line 2: not JSON"):
        prompts(str(tmp_path / "rows.jsonl"), drop_bad_rows=True)


def test_rows_that_a_dataset_info_cannot_convert(tmp_path, caplog):
    rows = [{"instruction": "the cat", "output": "sees"}, {"instruction": 3}, {"instruction": None}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": {"file_name": "rows.json"}}))
    with pytest.raises(DataError) as refused:
        prompts("d", dataset_dir=str(tmp_path))
    first, *named, _ = str(refused.value).splitlines()
    assert "2 of 3 rows" in first and ["row 1," in named[0], "row 2," in named[1]] == [True, True]
    with caplog.at_level(logging.WARNING):
        data = prompts("d", dataset_dir=str(tmp_path), drop_bad_rows=True)
    assert (len(data.prompts), data.num_rows, data.num_bad, len(caplog.records)) == (1, 3, 2, 1)
    rows[0] = rows[1]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match="3 of 3 rows"):
        prompts("d", dataset_dir=str(tmp_path), drop_bad_rows=True)


def test_answers_to_be_judged_are_named_all_at_once_too(write):
    rows = [{"prompt": "p", "response": "a"}, {"prompt": "p", "response": 7}, {"response": "a"}]
    with pytest.raises(DataError) as refused:
        load_judged(write(rows))
    first, *named, way_out = str(refused.value).splitlines()
    assert first.startswith("FILE: 2 of 3 rows") and len(named) == 2 and way_out == "Correct or remove them"


class Told(NullDisplay):
    """A display that keeps what it is told."""

    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def test_the_first_lines_of_a_run_and_its_plan_say_how_many(write, tmp_path):
    file, shown = write(ROWS[prompts]), write(ROWS[demonstrations], "shown")
    asked = {"data__prompts": file, "data__eval_prompts": file, "data__ptx": shown, "ppo__ptx_coef": 1.0}
    config, told = tiny_run(tmp_path, **asked, data__drop_bad_rows=True), Told()
    data = load_data(config)
    assert [prompt.row for prompt in data.eval_prompts.prompts] == [0, 3, 5]
    tell_data(config, data, told)
    assert told.lines[0].endswith(f"3 of 6 prompts, {LEFT_OUT}") and told.lines[0].startswith("prompts: ")
    assert told.lines[1].endswith(LEFT_OUT) and told.lines[1].startswith("held-out prompts: ")
    assert f"demonstrations: {shown}: 6 rows, {LEFT_OUT}" in told.lines
    assert dict(plan(config).arithmetic)["prompts"].startswith("3 of 6 rows (0 too long, 3 unusable)")
    with pytest.raises(DataError, match=r"^data\.prompts: 3 of 6 rows"):
        load_data(tiny_run(tmp_path, **asked))


def test_rows_that_a_reward_cannot_use_are_named_together_or_left_out_too(write, tmp_path, caplog):
    file = write([{"prompt": f"the {word}", "answer": answer} for word, answer in
                  (("cat", "1"), ("dog", None), ("sun", "2"), ("sea", [1]), ("day", "3"))])  # fmt: skip
    exact = {"data__prompts": file, "data__eval_prompts": file}
    exact["rewards"] = [{"type": "exact_match", "column": "answer"}]
    config = tiny_run(tmp_path, **exact)
    with pytest.raises(DataError) as refused:
        check_data(config, load_data(config))
    first, second, way_out = str(refused.value).splitlines()
    assert first.startswith("row 1 of the prompts, for rewards.0: column answer")
    assert second.startswith("row 3 of the prompts, for rewards.0: column answer")
    assert way_out == "Correct or remove such rows, or set data.drop_bad_rows: true to leave them out"
    config = tiny_run(tmp_path, **exact, data__drop_bad_rows=True)
    with caplog.at_level(logging.WARNING):
        data = load_data(config)
    check_data(config, data)
    for read in (data.prompts, data.eval_prompts):
        assert [prompt.row for prompt in read.prompts] == [0, 2, 4] and (read.num_rows, read.num_bad) == (5, 2)
        assert read.note.endswith("5 of 5 prompts; 2 of these left out, as rewards cannot use their columns")
    assert len(caplog.records) == 2 and "row 3 of the prompts" in caplog.records[0].getMessage()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "the cat", "answer": None}))
    with pytest.raises(DataError, match=r"^row 0 of the prompts, for rewards\.0"):
        load_data(config)
    with pytest.raises(ConfigError, match="other"):
        load_data(tiny_run(tmp_path, **exact | {"rewards": [{"type": "exact_match", "column": "other"}]},
                           data__drop_bad_rows=True))  # fmt: skip


@pytest.mark.parametrize("held_out", [True, False])
def test_the_other_stages_say_so_too(write, tmp_path, held_out):
    def config(section, name, rows):
        data = {name: write(rows), "eval_fraction": 0, "drop_bad_rows": True}
        if held_out:
            data = data | {f"eval_{name}": data[name]}
            del data["eval_fraction"]
        model = {"path": str(save_tiny(tmp_path / "model"))}
        return parse_config(json.dumps({"model": model, "data": data, "output_dir": str(tmp_path / "o")}), section)

    count = 6 if held_out else 3
    data = sft.load_data(config(SftStageConfig, "demonstrations", ROWS[demonstrations]))
    assert data.counts["demonstrations/unusable"] == count and f"{count} left out as unusable" in data.notes[0]
    _, data = reward.load_data(config(RewardStageConfig, "pairs", ROWS[pairs]))
    assert data.counts["pairs/unusable"] == count and f"{count} left out as unusable" in data.note
