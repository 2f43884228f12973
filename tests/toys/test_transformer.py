"""A small transformer on toy A, through ``train_policy``: what a run writes and saves, and how close it gets to the
optimum."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.toys.language import toy
from benchmarks.toys.transformer import fit_transformer, prefix_logprobs, train_transformer
from transformers import AutoModelForCausalLM

from tether.data.collate import collate

SETTINGS = {
    "train.max_steps": 8,
    "train.rollout_batch_size": 256,
    "train.micro_batch_size": 256,
    "sampling.batch_size": 256,
}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A transformer that resembles the reference, and its distance from it."""
    folder = tmp_path_factory.mktemp("fitted")
    return folder, fit_transformer(toy("A"), folder, hidden=32, steps=100)


def test_fitting_brings_it_near_the_reference(fitted):
    _, distance = fitted
    language, uniform = toy("A"), torch.full((4, 121, 4), 0.25).log().double()
    assert distance < 0.7 * (language.ref_logprobs.exp() * (language.ref_logprobs - uniform)).sum(-1).mean()


def test_one_pass_over_the_longest_prefixes_says_what_a_pass_over_each_says(fitted):
    language, model = toy("A"), AutoModelForCausalLM.from_pretrained(fitted[0]).eval()
    with torch.no_grad():
        table = prefix_logprobs(model, language)
        for x, text in ((0, (1,)), (3, (2, 3)), (1, (3, 1, 2)), (3, (3, 3, 3, 3)), (2, (1, 2, 3, 1))):
            batch = collate([language.query(x)], [text])
            expected = model(input_ids=batch.token_ids).logits[0, -1].log_softmax(-1)
            torch.testing.assert_close(table[x, language.number(text)], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "most"),
    [({"train.learning_rate": 3e-3}, 0.4), ({"train.learning_rate": 1e-2, "model.lora": {"r": 8}}, 0.45)],
    ids=["full", "LoRA"],
)
def test_a_short_run_lowers_regret(fitted, tmp_path, changes, most):
    folder, _ = fitted
    course = train_transformer("A", folder, tmp_path / "run", SETTINGS | changes)
    assert len(course.regrets) == 8
    assert course.regret < most
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["val/first_ratio_error"] for line in lines) == 0.0
