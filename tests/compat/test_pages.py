"""docs/from_llamafactory.md and docs/convert.md say what is true."""

import re
import shutil
from pathlib import Path

import pytest

from tests.compat.llamafactory import PPO, write_home, write_reward
from tests.compat.test_convert import OPENRLHF_NEW
from tether.cli.commands import run_arguments
from tether.cli.main import main
from tether.compat import llamafactory
from tether.compat.convert import SECTIONS
from tether.compat.load import load_any
from tether.config.keys import describe
from tether.config.load import load_config
from tether.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
FROM = (ROOT / "docs" / "from_llamafactory.md").read_text(encoding="utf-8")
CONVERT = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")


def commands(page):
    return [line.strip() for line in page.splitlines() if line.startswith("    tether ")]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)
    return tmp_path


def test_commands_for_llamafactory_are_understood(home):
    """Runs of the three stages are tests of their own; here everything up to them, and all else."""
    write_home(home)
    write_reward()
    started = []
    for command in commands(FROM):
        _, name, *arguments = command.split()
        if name == "convert":
            assert main([name, *arguments]) == 0
            continue
        file, overrides = run_arguments(name, arguments)
        started.append(load_any(file, overrides, SECTIONS[name], name)[0])
    assert load_config("ours.yaml").data.prompts == ["identity", "alpaca_en_demo"]
    assert (started[-1].train.learning_rate, started[-1].train.max_steps) == (2e-5, 20)


def test_commands_that_convert_run(home):
    Path("their.yaml").write_text(PPO, encoding="utf-8")
    Path("launch.sh").write_text(OPENRLHF_NEW, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "preference_lora.yaml", "run.yaml")
    for command in commands(CONVERT):
        assert main(command.split()[1:]) == 0, command
    assert load_config("from_launch.yaml") and Path("verl.sh").read_text().startswith("#!/bin/sh")


def test_keys_of_the_page_are_keys():
    table = FROM.split("## What becomes")[1].split("## Differences")[0]
    words = {word.split(":")[0] for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*(?:: [\w.]+)?)`", table)}
    ours = {doc.key for doc in describe(RunConfig)} | {"model.lora"}
    theirs = {word for word in words - ours if "." not in word}
    files = {word for word in words if word.rpartition(".")[2] in ("png", "html", "safetensors")}
    assert {word for word in words - files if "." in word} - ours == set()
    values = {"adapter", "value_head", "model", "http", "protocol", "rewards"}
    assert theirs - llamafactory.KNOWN - values == set()
