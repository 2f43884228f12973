"""What ``make mutants`` says of defects whose fate is known."""

import re
import subprocess
import sys

import pytest

from tests.mutants.defects import ROOT

RUN = """
from tests.mutants import run
from tests.mutants.defects import in_file

tests = ("tests/algo/test_masking.py",)
run.TIME_LIMIT = 8
run.DEFECTS = in_file(
    "algo/masking.py",
    ("wrong", "masked_sum(x, mask) / mask.sum()", "masked_sum(x, mask) / mask.numel()"),
    ("harmless", "masked_sum(x, mask) / mask.sum()", "masked_sum(x, mask) / mask.sum() * 1"),
    ("endless", "    x = wide(x)\\n", "    while True: x = wide(x)\\n"),
    ("broken", "import torch\\n", "import torch, nothing_of_that_name\\n"),
    ("deadly", "    x = wide(x)\\n", "    __import__('os')._exit(0)\\n"),
    tests=tests,
)
raise SystemExit(run.main([]))
"""


@pytest.mark.slow
def test_only_a_test_that_fails_or_never_ends_kills():
    done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = re.findall(r"^ +\d/5 (\w+) +[\d.]+ s  (\w+) \((.*)\)$", done.stdout, re.MULTILINE)
    assert {name: verdict for verdict, name, _ in lines} == {
        "wrong": "killed", "harmless": "survived", "endless": "killed", "broken": "broken", "deadly": "broken",
    }  # fmt: skip
    why = {name: reason for _, name, reason in lines}
    assert why["wrong"].startswith("tests/algo/test_masking.py::") and why["endless"] == "by the time limit"
    assert "nothing_of_that_name" in done.stdout and "Not all of 5 defects killed" in done.stdout
