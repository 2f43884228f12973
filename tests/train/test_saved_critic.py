"""The critic that a run leaves behind starts the critic of the next."""

import pytest
import torch

from tests.models.build import micro_batch
from tests.train.runs import tiny_run
from tether.models.build import build_roles
from tether.models.tokenizer import load_tokenizer
from tether.train.run import train_policy


@pytest.mark.parametrize(
    "sharing",
    [{"value__kind": "model"}, {"value__kind": "head"}, {"model__lora": {}}],
    ids=["model", "head", "adapter"],
)
def test_next_run_begins_with_the_values_that_the_last_one_ended_with(tmp_path, sharing):
    first = tiny_run(tmp_path, **sharing, value__save=True, value__detach="head" in sharing.values())
    result = train_policy(first)
    assert result.interrupted is None
    folder = tmp_path / "out" / "critic"
    assert (folder / "manifest.json").is_file() and (folder / "tokenizer.json").is_file()
    kind = "adapter" if "model__lora" in sharing else "model"
    changes = {"model__lora": {}} if kind == "adapter" else {}
    second = tiny_run(tmp_path, **changes, value__kind=kind, value__init=str(folder), output_dir=str(tmp_path / "next"))
    tokenizer = load_tokenizer(second.model.path)
    values = build_roles(second, tokenizer, device="cpu", autocast_dtype=None).score_pass(micro_batch(), 1.0).values
    fresh = tiny_run(tmp_path, **changes, value__kind=kind, value__init="policy", output_dir=str(tmp_path / "fresh"))
    zero = build_roles(fresh, tokenizer, device="cpu", autocast_dtype=None).score_pass(micro_batch(), 1.0).values
    assert torch.equal(zero, torch.zeros_like(zero))
    assert values.abs().max() > 1e-4
    train_policy(second)


def test_without_the_key_no_critic_is_written(tmp_path):
    train_policy(tiny_run(tmp_path))
    assert not (tmp_path / "out" / "critic").exists()


def test_a_run_that_replaces_another_takes_its_critic_away(tmp_path):
    train_policy(tiny_run(tmp_path, value__save=True))
    train_policy(tiny_run(tmp_path, overwrite_output_dir=True))
    assert not (tmp_path / "out" / "critic").exists()
