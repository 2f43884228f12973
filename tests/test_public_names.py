"""What ``from tether import …`` offers."""

import builtins
import re
import subprocess
import sys

import tether


def test_public_names_are_sorted_and_exist():
    assert sorted(tether.__all__) == tether.__all__
    for name in tether.__all__:
        assert getattr(tether, name).__doc__, name


def test_errors_that_public_functions_document_are_public():
    docs = [getattr(tether, name).__doc__ for name in tether.__all__]
    raised = {name for doc in docs for name in re.findall(r"\b[A-Z]\w+Error\b", doc)}
    assert {"ConfigError", "CheckpointError"} <= raised
    assert sorted(raised - set(tether.__all__) - set(dir(builtins))) == []


def test_subpackages_of_the_same_name_do_not_hide_functions():
    code = "import tether.train.trainer, tether; print(type(tether.train_policy).__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "function"
