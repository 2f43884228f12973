"""Files of rows: whole, new, and written whatever ends the process."""

import os
import signal

import pytest

from tether.errors import DataError
from tether.inference import output
from tether.inference.output import kept
from tether.metrics.writers import read_jsonl, write_new
from tether.train.display import NullDisplay

DISPLAY = NullDisplay()
ROWS = [{"row": i} for i in range(5)]


@pytest.fixture(params=["SIGTERM", "SIGHUP", "SIGINT"])
def number(request):
    """A signal, handled as in a process that nobody ignores it in."""
    number = getattr(signal, request.param)
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield number
    signal.signal(number, before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_while_rows_are_written_waits_for_them(tmp_path, monkeypatch, number, fails):
    def interrupted(path, records):
        os.kill(os.getpid(), number)
        write_new(path, records)

    monkeypatch.setattr(output, "write_new", interrupted)
    file = tmp_path / "out.jsonl"
    with pytest.raises(ValueError if fails else KeyboardInterrupt), kept(file, lambda: ROWS, DISPLAY):
        if fails:
            raise ValueError
    assert read_jsonl(file) == ROWS and os.listdir(tmp_path) == ["out.jsonl"]


def test_a_second_signal_does_not_cost_the_rows(tmp_path, monkeypatch, number):
    if number == signal.SIGINT:
        pytest.skip("a second Ctrl-C is meant")

    def interrupted(path, records):
        os.kill(os.getpid(), number)
        write_new(path, records)

    monkeypatch.setattr(output, "write_new", interrupted)
    file = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), kept(file, lambda: ROWS, DISPLAY):
        os.kill(os.getpid(), number)
    assert read_jsonl(file) == ROWS


def test_a_file_that_came_into_being_meanwhile_is_left_alone(tmp_path):
    file = tmp_path / "out.jsonl"
    told = r"created by something else meanwhile; the rows are in .*tmp$"
    with pytest.raises(DataError, match=told) as caught, kept(file, lambda: ROWS, DISPLAY):
        file.write_text("{}\n", encoding="utf-8")
    assert file.read_text(encoding="utf-8") == "{}\n"
    assert read_jsonl(tmp_path / str(caught.value).rpartition("/")[2]) == ROWS
