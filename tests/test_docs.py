"""The pages of docs/ say what is true."""

import re
from pathlib import Path

from tests.train.runs import tiny_run
from tether.train.run import train_policy

ROOT = Path(__file__).parents[1]


def test_every_metric_of_a_run_is_defined_in_the_docs(tmp_path):
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"`([a-z_]+(?:/[A-Za-z_0-9]+)?)`", page))
    config = tiny_run(tmp_path, data__eval_prompts=str(tmp_path / "prompts.jsonl"), train__max_steps=1)
    result = train_policy(config)
    names = {name.replace("letters", "NAME") for row in (*result.updates, *result.evaluations) for name in row}
    assert names - defined == set()
    groups = ("objective", "policy", "val", "loss", "rollout", "time")
    logged = {name for name in defined if name.split("/")[0] in groups}
    assert logged - names == set()
