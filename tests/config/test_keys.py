"""What the sections say about their keys."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from tether.config import docs
from tether.config.keys import KeyDoc, counted, describe, find, shown, wanted
from tether.config.model import LoraConfig
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "a whole number"),
        (Annotated[int, Field(gt=0)] | None, "a whole number above 0 or null"),
        (Annotated[float, Field(ge=0, le=1)], "a number from 0 to 1"),
        (Annotated[float, Field(ge=0, lt=1)], "a number of at least 0 and below 1"),
        (bool | str, "true or false or text"),
        (Literal["a", "b"], "one of a, b"),
        (list[str] | None, "a list of text or null"),
        (Annotated[list[int], Field(min_length=2)], "a list of whole numbers, at least 2"),
        (Annotated[list[float], Field(min_length=2, max_length=2)], "a list of numbers, exactly 2"),
        (Path, "a path"),
        (LoraConfig | None, "a group of keys or null"),
    ],
)
def test_types_in_words(annotation, words):
    assert wanted(annotation) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (32.0, "32"),
        (1e-5, "1e-05"),
        (0.1234567, "0.1234567"),
        ("eos", "eos"),
        ("7", "'7'"),
        ("", "''"),
        ("a\nb", r"'a\nb'"),
        ([1, {"a": "b"}], "[1, {a: b}]"),
        ("x" * 80, "x" * 57 + "…"),
    ],
)
def test_values_in_messages(value, words):
    assert shown(value) == words


@pytest.mark.parametrize("section", [RunConfig, RewardStageConfig])
def test_every_key_has_a_help_a_type_and_a_group(section):
    assert all(doc.help and doc.type and doc.group for doc in describe(section))


def test_a_row_says_what_its_field_says():
    (row,) = [doc for doc in describe(RunConfig) if doc.key == "ppo.cliprange"]
    assert row == KeyDoc(
        "ppo.cliprange",
        "number above 0 and below 1",
        "0.2",
        "Policy ratio is clipped to [1 − cliprange, 1 + cliprange]. Source: Schulman et al. 2017, "
        "https://arxiv.org/abs/1707.06347, eq. 7.",
        "ppo: The algorithm.",
    )


def test_the_defaults_are_those_of_a_configuration_that_sets_nothing():
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "lora": {}},
            "rewards": [{"type": "model", "path": "j"}],
            "data": {"prompts": "p"},
            "sampling": {"vllm": {}},
            "train": {"max_steps": 1},
            "output_dir": "o",
        }
    )
    rows = [doc for doc in describe(RunConfig) if doc.default != "required" and ".N." not in doc.key]
    set_here = {"model.lora", "sampling.vllm", "train.max_steps"}
    for row in rows:
        value = config
        for name in row.key.split("."):
            value = getattr(value, name)
        if row.key not in set_here:
            assert row.default == shown(value), row.key
    assert len(rows) > 50


def test_a_location_is_freed_of_the_names_of_union_members():
    found = find(RunConfig, ("rewards", 0, "function", "name"))
    assert found.path == ("rewards", 0, "name")
    assert found.field.is_required()
    assert find(RunConfig, ("resume", "bool")).path == ("resume",)
    unknown = find(RunConfig, ("train", "nope", "deeper"))
    assert (unknown.path, unknown.annotation, unknown.field) == (("train", "nope"), None, None)


def test_the_page_of_all_keys_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == docs.page(), "run `make docs`"


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "row", "0 rows"), (1, "row", "1 row"), (5000, "update", "5,000 updates"), (2, "mini-batch", "2 mini-batches"),
     (2, "epoch", "2 epochs"), (2, "process", "2 processes"), (1, "pass", "1 pass")],
)  # fmt: skip
def test_a_number_of_things_has_its_plural(count, noun, text):
    assert counted(count, noun) == text
