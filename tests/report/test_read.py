import json
import math

import pytest

from tests.report.runs import answer, evaluation, healthy, update, write
from tether.report.read import TEXT_LIMIT, read_run


def test_a_whole_run_is_read_without_a_note(tmp_path):
    run = read_run(healthy(tmp_path, updates=10))
    assert run.notes == []
    assert run.series("objective/scores").steps == list(range(1, 11))
    assert run.evaluated("eval_scores").points == [(0, 0.1), (10, 2.1)]
    assert (run.num_updates, run.planned_updates) == (10, 25)
    assert run.setting("model.lora.r") == 16
    assert len(run.samples) == 42


def test_each_missing_file_is_named(tmp_path):
    run = read_run(tmp_path)
    assert [note.split()[0] for note in run.notes] == ["config.yaml", "metrics.jsonl", "samples.jsonl"]
    assert not run.updates and not run.samples and not run.config


def test_a_torn_last_line_is_told_from_damage_in_the_middle(tmp_path):
    write(tmp_path, [update(1, 0.1)], [])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('not json\n[1, 2]\n{"step": "two"}\n{"step": 3, "lr": 1.0}\n{"step": 4, "objective/sco')
    run = read_run(tmp_path)
    assert sorted(run.updates) == [1, 3]
    assert any("last line of metrics.jsonl is incomplete" in note for note in run.notes)
    assert any("3 unreadable lines; the first is line 2" in note for note in run.notes)


def test_values_that_are_not_finite_are_gaps_and_not_numbers_are_left_out(tmp_path):
    write(tmp_path, [update(1, 0.1)])
    line = '{"step": 2, "a": NaN, "b": -Infinity, "c": null, "d": 1e999, "e": "text", "f": true, "g": %s, "h": 1e-310}'
    (tmp_path / "metrics.jsonl").write_text(line % ("9" * 400) + "\n")
    metrics = read_run(tmp_path).updates[2]
    assert all(math.isnan(metrics[name]) for name in "abcdg")
    assert metrics["h"] == 0.0 and "e" not in metrics and "f" not in metrics


def test_the_later_of_two_lines_of_one_update_counts(tmp_path):
    run = read_run(write(tmp_path, [update(2, 0.1, lr=1.0), update(1, 0.1, lr=5.0), update(2, 0.1, lr=2.0)]))
    assert run.series("lr").points == [(1, 5.0), (2, 2.0)]


def test_an_evaluation_is_no_update_whatever_else_its_line_holds(tmp_path):
    run = read_run(write(tmp_path, [update(1, 0.1), evaluation(2, 0.5) | {"time/eval_s": 3.0}]))
    assert sorted(run.updates) == [1] and sorted(run.evaluations) == [2]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- a\n- b", b"a: [", b"when: 2020-13-45", b"{" * 1500])
def test_a_config_that_cannot_be_parsed_is_kept_as_text(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    run = read_run(tmp_path)
    assert run.config == {} and run.config_text is not None
    assert any("config.yaml is not a YAML mapping" in note for note in run.notes)


def test_a_file_that_cannot_be_read_is_a_note(tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).mkdir()
    assert sum("cannot be read" in note for note in read_run(tmp_path).notes) == 3


def test_odd_samples_do_not_stop_the_reading(tmp_path):
    lines = [
        answer(1, 0, 1.0, response="x" * 10_000),
        answer(1, 1, None, response=None, rewards=None, prompt=None, length="long", finish_reason=None, kl=None),
        answer(1, 2, 1.0, rewards={"a": "b", "c": 2}, row="first", response={"text": "x"}),
        {"step": -1},
        {"split": "eval"},
        {"step": True},
        answer(1, 3, 1.0),
    ]
    run = read_run(write(tmp_path, [], lines))
    long, empty, odd, plain = run.samples
    assert (len(long.response), long.cut) == (TEXT_LIMIT, 10_000 - TEXT_LIMIT)
    assert empty.response == "" and empty.kl is None and math.isnan(empty.score)
    assert empty.prompt == "<|user|>question 1"
    assert (odd.row, odd.rewards, odd.response) == (None, {"c": 2.0}, '{"text": "x"}')
    assert plain.row == 3
    assert any("3 unreadable" in note for note in run.notes)


def test_invalid_utf8_and_deep_nesting_cost_one_line_at_most(tmp_path):
    good = json.dumps(answer(1, 0, 1.0)).encode()
    deep = b'{"step": 1, "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (tmp_path / "samples.jsonl").write_bytes(good.replace(b"answer", b"\xff\xfe") + b"\n" + deep + b"\n" + good + b"\n")
    run = read_run(tmp_path)
    assert [s.response for s in run.samples] == ["\ufffd\ufffd 0 at 1", "answer 0 at 1"]


@pytest.mark.parametrize("depth", [100, 300, 480, 900, 970, 990])
def test_nesting_near_the_recursion_limit(tmp_path, depth):
    line = '{"step": 1, "split": "eval", "prompt": ' + "[" * depth + "]" * depth + ', "response": "kept"}'
    (tmp_path / "samples.jsonl").write_text(line + "\n")
    run = read_run(tmp_path)
    assert [s.response for s in run.samples] in (["kept"], [])


def test_planned_updates_rounds_up_and_is_unknown_for_epochs(tmp_path):
    config = "train: {total_episodes: 100, rollout_batch_size: 64}"
    assert read_run(write(tmp_path / "a", config=config)).planned_updates == 2
    assert read_run(write(tmp_path / "b", config="train: {max_steps: 7}")).planned_updates == 7
    assert read_run(write(tmp_path / "c", config="train: {num_train_epochs: 2}")).planned_updates is None
    assert read_run(write(tmp_path / "d", config="train: text")).planned_updates is None
