"""docs/scale.md: its commands are those of the launchers, its table is what ``tether plan`` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from tests import scale
from tests.train.runs import tiny_run
from tether.cli.launched import LAUNCHED
from tether.cli.main import main
from tether.config.load import dump_config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
COMMANDS = [line.split("  #")[0].split() for line in PAGE.splitlines() if re.match(r" {4}[a-z]", line)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    if words[0] == "tether":
        config = tiny_run(tmp_path, train__rollout_batch_size=16, train__micro_batch_size=1)
        (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "160")
        assert main(words[1:]) == 0
        shown = capsys.readouterr().out
        assert "2 of 1 answer in each of 8 processes" in shown and all(name in shown for name in scale.ENGINES)
        return
    if words[0] == "accelerate":
        args = launch_command_parser().parse_args(words[2:])
        file = load_config_from_file(args.config_file)
        assert (args.num_processes or file.num_processes) % 8 == 0 and file.mixed_precision == "no"
    else:
        args = get_args_parser().parse_args(words[1:])
        assert args.nproc_per_node == "8"
    assert args.module and args.training_script == "tether"
    command, file, *more = args.training_script_args
    assert command in LAUNCHED and file in ("run.yaml", f"{command}.yaml") and more in ([], ["--resume=auto"])


@pytest.mark.parametrize(("shape", "trained"), list(zip(("7B", "72B"), scale.TRAINED, strict=True)))
def test_memory_table(shape, trained):
    """``python -m tests.scale`` writes the table anew."""
    assert f"| {shape} | {trained} | {' | '.join(scale.row(shape, trained))} |" in PAGE
    assert f"| model | trained | {' | '.join(scale.COLUMNS)} |" in PAGE


def test_shipped_files_are_named():
    files = {path.name for path in (ROOT / "examples" / "accelerate").glob("*.yaml")}
    assert files == set(re.findall(r"([a-z0-9]+\.yaml)`", PAGE)) - {"run.yaml"}
