"""What ``make mutants`` says of defects whose fate is known."""

import json
import re
import subprocess
import sys

import pytest

from tests.mutants.defects import ROOT

RUN = """
import sys
from pathlib import Path
from tests.mutants import run
from tests.mutants.defects import in_file

tests = ("tests/algo/test_masking.py",)
run.TIME_LIMIT = 8
run.KILLERS = Path(sys.argv[1])
run.DEFECTS = in_file(
    "algo/masking.py",
    ("wrong", "masked_sum(x, mask) / mask.sum()", "masked_sum(x, mask) / mask.numel()"),
    ("harmless", "masked_sum(x, mask) / mask.sum()", "masked_sum(x, mask) / mask.sum() * 1"),
    ("endless", "    x = wide(x)\\n", "    while True: x = wide(x)\\n"),
    ("broken", "import torch\\n", "import torch, nothing_of_that_name\\n"),
    ("deadly", "    x = wide(x)\\n", "    __import__('os')._exit(0)\\n"),
    ("known", "torch.where(mask, x, torch.zeros_like(x)).sum(dim)", "x.sum(dim)"),
    ("astray", "white + mean if keep_mean else white", "white"),
    tests=tests,
)
raise SystemExit(run.main(["--record"]))
"""
TESTS = "tests/algo/test_masking.py::"
BEFORE = {
    "known": f"{TESTS}test_reductions_of_the_three_entries_1_2_6",  # not the first that would notice
    "astray": f"{TESTS}test_length_mask_counts_from_the_left",
    "of another time": f"{TESTS}test_nothing",
}


@pytest.mark.slow
def test_only_a_test_that_fails_or_never_ends_kills(tmp_path):
    killers = tmp_path / "killers.json"
    killers.write_text(json.dumps(BEFORE), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(killers)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = re.findall(r"^ +\d/7 (\w+) +[\d.]+ s  (\w+) \((.*)\)$", done.stdout, re.MULTILINE)
    assert {name: verdict for verdict, name, _ in lines} == {
        "wrong": "killed", "harmless": "survived", "endless": "killed", "broken": "broken", "deadly": "broken",
        "known": "killed", "astray": "killed",
    }  # fmt: skip
    why = {name: reason for _, name, reason in lines}
    assert why["wrong"].startswith(TESTS) and why["endless"] == "by the time limit"
    assert "nothing_of_that_name" in done.stdout and "Not all of 7 defects killed" in done.stdout
    assert why["known"] == BEFORE["known"], "the test that killed it before comes first"
    assert why["astray"].startswith(TESTS) and why["astray"] != BEFORE["astray"], "where that one passes, all run"
    written = json.loads(killers.read_text(encoding="utf-8"))
    assert written == {name: why[name] for name in ("wrong", "known", "astray")}
