"""Lines of numbers are kept as they came, in little memory."""

import tracemalloc

from tether.metrics.history import History


def test_lines_come_back_as_they_came():
    lines = [{"step": 1, "a/b": 0.1, "c": float("inf")}, {"step": 2, "c": -3.5}, {"step": 3, "a/b": 1e-300, "c": 2.0}]
    history = History()
    for line in lines:
        history.append(line)
    assert len(history) == 3 and list(history) == lines
    assert [list(line) for line in history] == [list(line) for line in lines], "in the order of their names"


def test_a_line_takes_little_more_than_its_numbers():
    names = [f"metric/{i}" for i in range(60)]
    history = History()
    tracemalloc.start()
    try:
        for step in range(500):
            history.append({name: step + 0.5 for name in names})
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 500 * (60 * 8 + 250)
