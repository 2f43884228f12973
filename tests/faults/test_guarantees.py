"""docs/guarantees.md names tests and keys that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos import run
from tests.chaos.services import FAULTS
from tether.config import keys
from tether.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_is_there():
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(files) >= 12
    assert [name for name in files if not (ROOT / name).is_file()] == []
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "faults").glob("test_*.py")}
    unnamed = {path.rpartition("/")[2] for path in ours - files}
    assert unnamed == {"test_guarantees.py", "test_modes_of_training.py", "test_padding_and_ends.py",
                       "test_ratio_and_kl.py", "test_reward_models.py", "test_watching.py"}  # fmt: skip


def test_every_key_that_the_page_names_is_one():
    known = {doc.key for doc in keys.describe(RunConfig)}
    named = set(re.findall(r"`((?:train|data|ppo)\.\w+)(?:: \w+)?`", PAGE))
    assert len(named) >= 4 and named <= known


def test_its_numbers_are_those_of_make_chaos(capsys):
    for count in run.COUNTS.values():
        assert f"{count:,}" in PAGE
    assert len(FAULTS) == 15 and "fifteen ways" in PAGE
    assert "python -m tests.chaos.run" in (ROOT / "Makefile").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="0"):
        run.main(["--help"])
    assert "--kills" in capsys.readouterr().out
