"""Rows 61 and 72 of the fault list: what a trainer offers, and what a run leaves to be looked at.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import ClassVar

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker

from tests.train.runs import tiny_run
from tether.compat import trl
from tether.metrics import trackers
from tether.metrics.writers import read_jsonl
from tether.train.run import train_policy
from tether.train.trainer import PPOTrainer

ROOT = Path(__file__).parents[2]


def used_names(*folders):
    """Names that are looked up on something in Python files."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize(
    ("trainer", "users"),
    [(PPOTrainer, ("tests", "src/tether/train", "src/tether/compat")), (trl.PPOTrainer, ("tests/compat",))],
    ids=["own", "TRL's"],
)
def test_61_a_trainer_offers_nothing_that_nobody_calls_and_every_method_says_what_it_does(trainer, users):
    offered = {name: member for name, member in inspect.getmembers(trainer) if not name.startswith("_")}
    assert len(offered) > 10
    assert not [name for name, member in offered.items() if not member.__doc__]
    assert not offered.keys() - used_names(*users)
    bases = {base.__module__.partition(".")[0] for base in trainer.__mro__}
    assert bases == {"tether", "builtins"}, "nothing is inherited that does something else here"


class Kept(GeneralTracker):
    """Keeps the updates that it is told of."""

    name = "tensorboard"
    requires_logging_directory = True
    steps: ClassVar[list[int]] = []

    def __init__(self, *args, **kwargs):
        super().__init__()

    @property
    def tracker(self):
        return self.steps

    def log(self, values, step=None, **kwargs):
        self.steps.append(step)


@pytest.mark.parametrize(("logging_steps", "told"), [(1, [1, 2, 3]), (2, [2, 3]), (99, [3])])
@pytest.mark.parametrize("report_to", ["none", [], "tensorboard"])
def test_72_every_run_leaves_its_metrics_whatever_is_reported_and_however_seldom(
    tmp_path, monkeypatch, report_to, logging_steps, told
):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Kept)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    monkeypatch.setattr(Kept, "steps", [])
    config = tiny_run(tmp_path, train__report_to=report_to, train__logging_steps=logging_steps, train__max_steps=3)
    result = train_policy(config)
    rows = read_jsonl(config.output_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] == [row["step"] for row in result.updates]
    assert Kept.steps == (told if report_to == "tensorboard" else [])
    assert "objective/scores" in (config.output_dir / "report.html").read_text(encoding="utf-8")
