"""JSON lines: whole, strict, mended after a kill, and cut for a resumed run."""

import errno
import json
import logging
import math
import os
from datetime import datetime

import pytest

from tether.errors import DataError
from tether.metrics.writers import JsonlWriter, read_jsonl, truncate_after, write_new, write_whole


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_each_record_is_one_line_at_once(path):
    writer = JsonlWriter(path)
    writer.write({"step": 1, "text": "a\nb\u2028c", "rewards": {"brevity": 0.5}})
    assert path.read_bytes().count(b"\n") == 1
    writer.write_all({"step": step} for step in (2, 3))
    assert path.read_bytes().count(b"\n") == 3
    assert read_jsonl(path) == [
        {"step": 1, "text": "a\nb\u2028c", "rewards": {"brevity": 0.5}}, {"step": 2}, {"step": 3}
    ]  # fmt: skip


def test_a_second_writer_goes_on(path):
    JsonlWriter(path).write({"step": 1})
    JsonlWriter(path).write({"step": 2})
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]


def test_numbers_that_json_lacks_become_null_and_are_named(path, caplog):
    record = {"loss": math.nan, "lr": 0.1, "rewards": {"model": -math.inf}, "all": [1.0, math.inf]}
    with caplog.at_level(logging.WARNING):
        JsonlWriter(path).write(record)
    line = path.read_text()
    assert "NaN" not in line and "Infinity" not in line
    assert json.loads(line) == {"loss": None, "lr": 0.1, "rewards": {"model": None}, "all": [1.0, None]}
    assert "loss=nan, rewards.model=-inf, all.1=inf" in caplog.text
    assert math.isnan(record["loss"])  # the caller's record is left alone


def test_a_finite_record_says_nothing(path, caplog):
    JsonlWriter(path).write({"loss": 1.0, "kl": None})
    assert not caplog.records


def test_text_stays_readable_and_a_lone_surrogate_survives(path):
    JsonlWriter(path).write({"text": "größer 日本 \ud83d"})
    assert "größer 日本" in path.read_text(encoding="utf-8")
    assert read_jsonl(path) == [{"text": "größer 日本 \ud83d"}]


def test_a_torn_last_line_is_skipped_and_mended_at_every_byte(path):
    JsonlWriter(path).write({"step": 1})
    whole = path.read_bytes()
    second = json.dumps({"step": 22, "text": "ü"}, ensure_ascii=False).encode()
    for size in range(len(second)):
        path.write_bytes(whole + second[:size])
        assert read_jsonl(path) == [{"step": 1}]
        JsonlWriter(path).write({"step": 2})
        assert path.read_bytes() == whole + b'{"step": 2}\n'


def test_a_whole_last_line_without_its_newline_is_kept(path):
    JsonlWriter(path)
    path.write_bytes(b'{"step": 1}')
    assert read_jsonl(path) == [{"step": 1}]
    JsonlWriter(path).write({"step": 2})
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize(("line", "word"), [(b'{"step": 2', "not JSON"), (b"[1]", "is list")])
def test_damage_elsewhere_is_an_error_that_names_the_line(path, line, word):
    JsonlWriter(path)
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(DataError, match=rf"metrics\.jsonl, line 2 .*{word}|metrics\.jsonl, line 2 {word}"):
        read_jsonl(path)


@pytest.mark.parametrize("line", [b'{"loss": 1}', b'{"step": "2"}', b'{"step": null}'])
def test_a_record_without_a_step_is_shown(path, line):
    JsonlWriter(path)
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"metrics\.jsonl: .*{line[2:6].decode()}.* has no step"):
        truncate_after(path, 1, 1)
    assert path.read_bytes().count(b"\n") == 2


def test_truncate_after_keeps_bytes_and_the_step_itself(path):
    JsonlWriter(path)
    path.write_bytes(b'{"step": 0, "x":  1e-3}\n{"step":1}\n{"step": 2}\n{"step": 1, "eval_scores": 2}\n{"step": 3')
    truncate_after(path, 1, 1)
    assert path.read_bytes() == b'{"step": 0, "x":  1e-3}\n{"step":1}\n{"step": 1, "eval_scores": 2}\n'
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_truncate_after_drops_the_evaluation_that_followed_the_checkpoint(path):
    evaluations = [{"step": step, "eval_scores": 2} for step in (0, 1)] + [{"step": 1, "split": "eval", "row": 0}]
    kept = [{"step": 1}, {"step": 1, "split": "train", "row": 0}]
    JsonlWriter(path).write_all([*evaluations, *kept])
    truncate_after(path, 1, 0)
    assert read_jsonl(path) == [evaluations[0], *kept]


def test_truncate_after_leaves_a_missing_file_missing(path):
    truncate_after(path, 1, 1)
    assert not path.exists()


def test_truncate_after_changes_nothing_if_it_fails(path, monkeypatch):
    JsonlWriter(path).write_all([{"step": 1}, {"step": 2}])
    before = path.read_bytes()

    def full_disk(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("tether.metrics.writers.os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        truncate_after(path, 1, 1)
    assert path.read_bytes() == before


def test_what_json_has_no_form_for_is_written_as_text(path):
    JsonlWriter(path).write({"prompt": [{"role": "user", "content": "a", "timestamp": datetime(2023, 4, 9, 12)}]})
    (record,) = read_jsonl(path)
    assert record["prompt"][0]["timestamp"] == "2023-04-09 12:00:00"


@pytest.mark.parametrize("write", [write_new, lambda path, rows: write_whole(path, b"{}")], ids=["new", "whole"])
def test_what_a_full_disk_does_not_take_leaves_nothing_and_is_named(path, monkeypatch, write):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path.parent.mkdir()
    monkeypatch.setattr("tether.metrics.writers.os.fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write(path, [{"step": 1}])
    assert list(path.parent.iterdir()) == []
