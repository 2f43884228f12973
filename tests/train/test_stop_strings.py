"""Runs whose answers end at strings: what is judged, recorded, trained on and compared on resuming."""

from __future__ import annotations

import pytest

from tests.rewards.test_model_source import alone
from tests.tiny import EOS, save_tiny
from tests.train.runs import tiny_run
from tests.train.test_bookkeeping import ANSWERS, recorded
from tether.config.base import differences
from tether.generation.fake import FakeGenerator
from tether.inference.evaluate import evaluate_path
from tether.metrics.writers import read_jsonl
from tether.rewards.fake import FakeRewards
from tether.train.inputs import load_data
from tether.train.run import train_policy
from tether.train.same_run import may_change

STRINGS = [" we it", " not very"]
ENDED = [[10, 11, 12], [20, EOS], [13, 14, 15, 16], [21, 22, EOS]]
"""ANSWERS as these strings end them: you we it, cat, is was not very, dog sun."""
CLOSED = [[10, EOS], [20, EOS], [13, 14, EOS], [21, 22, EOS]]
TEXTS = ["you", "cat", "is was", "dog sun"]


def test_judges_get_the_text_before_the_string_and_training_every_token(tmp_path, monkeypatch):
    judge = FakeRewards(lambda query, response: len(response))
    config, _, result = recorded(
        tmp_path, monkeypatch, rewards=judge, sampling__stop_strings=STRINGS, train__max_steps=1
    )
    (batch,) = judge.batches
    assert batch.responses == TEXTS * 2 and batch.response_ids == ENDED * 2
    assert [batch.read_ids(row) for row in range(8)] == [
        query + answer for query, answer in zip(batch.query_ids, CLOSED * 2, strict=True)
    ]
    samples = read_jsonl(config.output_dir / "samples.jsonl")
    assert [row["response"] for row in samples] == TEXTS * 2
    assert [(row["length"], row["finish_reason"]) for row in samples] == [(len(ids), "stop") for ids in ENDED] * 2
    assert result.updates[0]["rollout/eos_rate"] == 1
    assert result.updates[0]["rollout/length"] == sum(map(len, ENDED)) / 4


def test_a_reward_model_with_the_policys_tokenizer_reads_what_the_others_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.train.build.build_generator", lambda config, roles: FakeGenerator(ANSWERS))
    judge = save_tiny(tmp_path / "judge", num_labels=1)
    rewards = [{"type": "model", "path": str(judge), "name": "judge"}]
    config = tiny_run(tmp_path, sampling__stop_strings=STRINGS, train__max_steps=1, rewards=rewards)
    train_policy(config)
    tokenizer = load_data(config).tokenizer
    samples = read_jsonl(config.output_dir / "samples.jsonl")
    for row, closed in zip(samples, CLOSED * 2, strict=True):
        query = tokenizer(row["query"], add_special_tokens=False)["input_ids"]
        assert row["rewards"]["judge"] == pytest.approx(alone(judge, query + closed), abs=1e-5)


@pytest.mark.parametrize("stop", ["eos", None])
def test_answers_of_a_model_end_at_strings_and_the_rules_for_missing_ends_know(tmp_path, stop):
    config = tiny_run(
        tmp_path, sampling__stop_token=stop, sampling__stop_strings=["at", "e r", "y n"],
        sampling__response_length=12, ppo__missing_eos_penalty=100.0, train__max_steps=1,
        train__rollout_batch_size=16, train__log_samples=16, data__eval_prompts=str(tmp_path / "prompts.jsonl"),
    )  # fmt: skip
    result = train_policy(config)
    samples = [row for row in read_jsonl(config.output_dir / "samples.jsonl") if row["split"] == "train"]
    ended = [row["finish_reason"] == "stop" for row in samples]
    assert True in ended and False in ended, "the case needs answers of both kinds"
    for row, did_end in zip(samples, ended, strict=True):
        assert not any(string in row["response"] for string in config.sampling.stop_strings)
        assert row["score"] == pytest.approx(row["rewards"]["letters"] - (0 if did_end else 100), abs=1e-4)
        assert row["rewards"]["letters"] == pytest.approx(len(row["response"]) / 10)
        assert did_end or row["length"] == 12
    assert result.updates[0]["val/num_eos_tokens"] == sum(ended)
    evaluated = evaluate_path(config.output_dir).samples
    assert {row["finish_reason"] for row in evaluated} >= {"stop"}
    assert not any(string in row["response"] for row in evaluated for string in config.sampling.stop_strings)


def test_the_dry_step_decodes_to_the_limit(tmp_path, monkeypatch):
    class Noting(FakeGenerator):
        def generate(self, requests, sampling):
            seen.append((sampling.text_ends is not None, bool(sampling.stop_token_ids)))
            return super().generate(requests, sampling)

    seen = []
    monkeypatch.setattr("tether.train.build.build_generator", lambda config, roles: Noting([[13, 14, 15, 16, 17, 18]]))
    train_policy(tiny_run(tmp_path, sampling__stop_strings="good", train__max_steps=1, train__dry_step=True))
    assert seen == [(False, False), (True, True)]


def test_a_resumed_run_must_keep_its_strings(tmp_path):
    one, same, other, none = (
        tiny_run(tmp_path, sampling__stop_strings=strings) for strings in ("###", ["###"], ["###", "Q:"], [])
    )
    assert not differences(one, same)
    assert [*differences(one, other)] == ["sampling.stop_strings.1"]
    assert [*differences(none, one)] == ["sampling.stop_strings.0"] == [*differences(one, none)]
    assert not may_change("sampling.stop_strings.0")
