"""What a script brings itself: the configuration, rewards, callbacks, answers. What cannot be used is told at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from transformers import TrainerCallback

from tests.tiny import EOS, tiny_classifier
from tests.train.runs import tiny_run
from tests.train.trainers import trainer_of
from tether.errors import ConfigError, DataError, RewardResponseError
from tether.metrics.reduce import Metrics
from tether.rewards.base import check_source
from tether.rewards.fake import FakeRewards
from tether.train.callbacks import callbacks_of
from tether.train.display import NullDisplay, check_display
from tether.train.rollout import Answers
from tether.train.run import train_policy
from tether.types import Completion, Prompt, RewardOutput

CALLS = """
import tether
for name in ("train_policy", "plan", "train_sft", "train_reward_model", "run_pipeline", "score_file"):
    try:
        getattr(tether, name)("run.yaml", *["rows.jsonl"] * (name == "score_file"))
    except tether.ConfigError as error:
        print(error)
try:
    with tether.open_trainer({"model": {}}):
        pass
except tether.ConfigError as error:
    print(error)
"""
TOLD = """\
train_policy: got str, wanted a RunConfig: load_config(path) reads one from a file
plan: got str, wanted a RunConfig: load_config(path) reads one from a file
train_sft: got str, wanted a SftStageConfig: load_config(path, section=SftStageConfig) reads one from a file
train_reward_model: got str, wanted a RewardStageConfig: load_config(path, section=RewardStageConfig) reads one from a \
file
run_pipeline: got str, wanted a Pipeline: load_pipeline(path) reads one from a file
score_file: got str, wanted a SourceConfig: load_sources(path) reads one from a file
open_trainer: got dict, wanted a RunConfig: load_config(path) reads one from a file
"""


def test_every_function_says_which_configuration_it_takes():
    """In a process of its own: here, jaxtyping checks arguments before the functions do."""
    ran = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert ran.stdout == TOLD, ran.stderr


class Listed:
    """Rewards that forget the record around their numbers."""

    def score(self, batch):
        return [1.0] * len(batch)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (len, "got builtin_function_or_method, wanted an object with a method score.* type: function"),
        ([1.0], "got list, wanted an object"),
        (FakeRewards, "got the class FakeRewards, wanted an object"),
        (tiny_classifier(), r"got LlamaForSequenceClassification, .* \(type: model\)"),
    ],
)
def test_rewards_that_score_nothing_are_refused(rewards, message):
    with pytest.raises(ConfigError, match=f"^rewards: {message}"):
        check_source(rewards)


def test_rewards_that_return_something_else_are_told(tmp_path):
    with pytest.raises(RewardResponseError, match=r"^the rewards returned \[1\.0, .* \(list\); wanted a tether\.Rew"):
        train_policy(tiny_run(tmp_path), rewards=Listed())
    trainer = trainer_of(tiny_run(tmp_path, output_dir=str(tmp_path / "other")), Listed())
    with pytest.raises(RewardResponseError, match="the rewards returned"):
        trainer.evaluate()


def test_a_display_that_shows_nothing_is_refused(tmp_path):
    """In tests, jaxtyping checks arguments before we do, but takes a class for one of its objects."""
    for wrong in (True, print, NullDisplay):
        with pytest.raises(ConfigError, match=r"^display: got .*, wanted None, or an object with the methods of "):
            check_display(wrong)
    check_display(NullDisplay())
    check_display(None)
    with pytest.raises(ConfigError, match="display: got <class"):
        train_policy(tiny_run(tmp_path), display=NullDisplay)


def test_callbacks_are_a_list_of_callbacks():
    assert [type(each) for each in callbacks_of([TrainerCallback, TrainerCallback()])] == [TrainerCallback] * 2
    assert callbacks_of(None) == callbacks_of(()) == []
    for wrong, message in ((TrainerCallback(), "got TrainerCallback"), ([print], "got a list with builtin_function")):
        with pytest.raises(ConfigError, match=f"^callbacks: {message}"):
            callbacks_of(wrong)


def own_answers(**changes):
    """A rollout batch of eight answers from a loop outside, with ``changes`` in row 5."""
    prompts = [Prompt(i, "the cat", "the cat", (7, 20)) for i in range(8)]
    completions = [Completion([9, 10, EOS], "stop") for _ in range(8)]
    if "query" in changes:
        prompts[5] = replace(prompts[5], token_ids=tuple(changes.pop("query")))
    completions[5] = replace(completions[5], **changes)
    return Answers(prompts, completions, ["you we"] * 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "row 5: the response has no tokens, wanted at least one"),
        ({"query": []}, "row 5: the query has no tokens, wanted at least one"),
        ({"token_ids": [9, 40]}, "row 5: the response holds 40, wanted whole numbers from 0 to 39, the policy's"),
        ({"token_ids": [-1]}, "row 5: the response holds -1, wanted"),
        ({"query": [7, 99]}, "row 5: the query holds 99, wanted"),
        ({"token_ids": [9] * 7}, "row 5: the response has 7 tokens, wanted at most sampling.response_length, 6"),
        ({"query": [7] * 126}, "row 5: query and response have 129 tokens, but the policy has 128 positions"),
    ],
)
def test_answers_that_the_policy_cannot_learn_from_are_told(tmp_path, changes, message):
    trainer = trainer_of(tiny_run(tmp_path), FakeRewards(lambda query, response: 1.0))
    with pytest.raises(DataError, match=f"^answers, {message}"):
        trainer.score(own_answers(**changes), Metrics(), RewardOutput([1.0] * 8))


def test_answers_that_are_no_rollout_batch_are_told(tmp_path):
    trainer, given = trainer_of(tiny_run(tmp_path), FakeRewards(lambda query, response: 1.0)), own_answers()
    for name in ("prompts", "completions", "texts"):
        short = replace(given, **{name: getattr(given, name)[:7]})
        with pytest.raises(DataError, match=f"^answers: got 7 {name}, wanted train.rollout_batch_size, 8"):
            trainer.score(short, Metrics(), RewardOutput([1.0] * 8))
    judged, _ = trainer.score(given, Metrics(), RewardOutput([1.0] * 8))
    assert judged.scores.tolist() == [1.0] * 8


def test_answers_that_are_compared_have_one_query(tmp_path):
    pairs = {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 2}
    trainer = trainer_of(tiny_run(tmp_path, **pairs), FakeRewards(lambda query, response: 1.0))
    with pytest.raises(DataError, match=r"^answers, row 5: its query is not that of row 4; wanted the 2 answers to a"):
        trainer.score(own_answers(query=[8]), Metrics(), RewardOutput([1.0] * 8))
