"""docs/rewards.md says what is true."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tests.rewards.batches import text_batch
from tether.config.load import parse_config
from tether.config.rewards import RewardConfig
from tether.models.heads import HEAD_NAMES
from tether.rewards.function import FunctionSource

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if block.startswith("rewards:")]
RUN = {"model": {"path": "m", "lora": {}}, "data": {"prompts": "p"}, "train": {"max_steps": 1}, "output_dir": "o"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_configurations(example):
    run = parse_config(yaml.safe_dump(RUN) + example)
    assert run.rewards


def test_every_type_and_every_name_of_a_head_is_told():
    union, _ = get_args(RewardConfig)
    types = {get_args(member.model_fields["type"].annotation)[0] for member in get_args(union)}
    assert {word for word in types if f"`{word}`" in PAGE or f"type: {word}" in PAGE} == types
    assert all(f"`{name}`" in PAGE for name in HEAD_NAMES if "." not in name)


def test_the_functions_of_the_page_score():
    scope: dict[str, object] = {}
    for source in re.findall(r"```python\n(def .*?)```", PAGE, re.DOTALL):
        exec(compile(source, "docs/rewards.md", "exec"), scope)
    assert FunctionSource(scope["brevity"], "brevity").score(text_batch("x" * 50)).scores == [-0.5]
    by_line = FunctionSource(scope["by_line"], "by_line").score(text_batch("1 = 1\nso\n2 = 2", "no", ""))
    assert by_line.scores == [2.0, 0.0, 0.0]
    assert [t for t, score in enumerate(by_line.token_scores[0]) if score] == [5, 13]
    batch = replace(text_batch("a b"), response_ids=[[7, 8, 2]], decode=lambda ids, before: "a b"[: 2 * len(ids) - 1])
    assert FunctionSource(scope["by_token"], "by_token").score(batch).token_scores == [[-0.01] * 3]
