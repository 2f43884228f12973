"""The short version of ``make chaos``, and what it is made of."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chaos import kills
from tests.chaos.children import Failed
from tests.chaos.configurations import accepted, base_config, changed, check_run, fuzzed_text
from tests.chaos.kills import CELLS, PLACES, check_end
from tests.chaos.run import COUNTS, main
from tests.train.runs import tiny_run
from tether.config.load import parse_config
from tether.errors import ConfigError


def test_a_little_chaos():
    """In a process of its own, as it forks before anything was trained."""
    sizes = ["--kills", "4", "--calls", "30", "--parsed", "300", "--trained", "4", "--seed", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.run", *sizes], check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    assert "4 of 4 kills" in done.stdout
    *_, head, parsed, calls, kills, trained = done.stdout.splitlines()
    assert head.split() == ["part", "wanted", "seconds", "what", "came", "of", "it"]
    for row, words in ((parsed, "files refused"), (calls, "updates as without"), (kills, "bitwise"), (trained, "4 tr")):
        assert " held " in row and words in row


def test_the_long_version_has_the_numbers_that_are_promised():
    assert COUNTS == {"kills": 100, "calls": 1000, "parsed": 10_000, "trained": 300}
    assert len(CELLS) >= 8 and len(PLACES) >= 6
    assert all(callable(getattr(owner, name)) for functions in PLACES.values() for owner, name in functions)


def test_what_differs_fails():
    end = {"metrics": [{"step": 1}], "samples": [], "models": {"a": b"1"}, "hidden": []}
    check_end(end, end, "x")
    for name, other in {"metrics": [], "models": {"a": b"2"}, "hidden": [".partial"]}.items():
        with pytest.raises(Failed, match=name):
            check_end(end | {name: other}, end, "x")


def test_a_failure_is_told_and_makes_exit_code_1(monkeypatch, capsys):
    def failing(*args):
        raise Failed("it did not hold")

    monkeypatch.setattr("tests.chaos.run.PARTS", {"kills": failing, "calls": lambda *args: "all well"})
    assert main(["--seed", "1", "--only", "kills", "calls"]) == 1
    told = capsys.readouterr().out
    assert "kills: FAILED: it did not hold" in told
    assert [line.split()[3] for line in told.splitlines()[-2:]] == ["FAILED", "held"]


def test_many_kills_must_have_been_everywhere(monkeypatch, tmp_path):
    monkeypatch.setattr(kills, "in_child", lambda work: Counter({place: 9 for place in PLACES}))
    monkeypatch.setattr(kills, "end_of", lambda folder: {})
    monkeypatch.setattr(kills, "cell_run", lambda home, cell, name: tiny_run(tmp_path))
    monkeypatch.setattr(kills.shutil, "rmtree", lambda folder: None)
    monkeypatch.setattr(kills, "_killed_run", lambda *args: [("save", 1)])
    with pytest.raises(Failed, match="100 kills missed rollout, update, end, evaluation, line, millisecond"):
        kills.run_kills(tmp_path, 100, 1, lambda text: None)
    monkeypatch.setattr(kills, "_killed_run", lambda *args: [(place, 1) for place in (*PLACES, kills.CLOCK)])
    assert "15 killed more than once" in kills.run_kills(tmp_path, 100, 1, lambda text: None)


FORKED = """
import os, signal, time
from tests.chaos.children import Failed, Killed, in_child
def sleep():
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    time.sleep(9)
assert in_child(lambda: {"a": 1}) == {"a": 1}
for work, error in ((lambda: os.kill(os.getpid(), 9), Killed), (sleep, Killed), (lambda: 1 / 0, Failed)):
    try:
        in_child(work)
    except error as caught:
        print(type(caught).__name__, "ZeroDivisionError" in str(caught))
"""


def test_children_give_their_results_and_their_ends():
    done = subprocess.run([sys.executable, "-c", FORKED], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["Killed", "False", "Killed", "False", "Failed", "True"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_config(tmp_path_factory.mktemp("base"))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(draw=st.randoms(use_true_random=False))
def test_every_configuration_text_is_read_or_refused_with_a_message(base, draw):
    try:
        parse_config(fuzzed_text(base, random.Random(draw.getrandbits(32))))
    except ConfigError as error:
        assert str(error).startswith("configuration")


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_accepted_configurations_train_and_refused_ones_say_why(base, tmp_path, seed):
    data = changed(base, random.Random(seed), most=12)
    outcome = check_run(tmp_path, data)
    assert outcome == "refused" or accepted(data) is not None
