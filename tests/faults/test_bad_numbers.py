"""What is not finite is named, left out up to a limit, and never trained on; a policy that collapses is noticed."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TrainerCallback

from tests.train.runs import REWARD, tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tests.train.trainers import trainer_of
from tether.errors import RewardResponseError, TrainingError
from tether.generation.fake import FakeGenerator
from tether.metrics.writers import read_jsonl
from tether.rewards.fake import FakeRewards
from tether.train.display import NullDisplay
from tether.train.run import train_policy

ONE_STEP = {"ppo__num_ppo_epochs": 1, "train__lr_scheduler_type": "linear"}
"""One optimizer step an update."""
ANSWERS = [[10, 11, 12, 2], [20, 2], [13, 14, 15, 2], [21, 22, 2], [2], [30, 31, 32, 2], [12, 13, 2], [25, 26, 2]]


class Heard(NullDisplay):
    """Keeps what a run says."""

    def __init__(self):
        self.said = []

    def message(self, text):
        self.said.append(text)


class Poison(TrainerCallback):
    """Makes the policy's gradients NaN in some updates, and keeps its weights before and after each."""

    def __init__(self, *updates):
        self.updates, self.weights, self.handle = updates, [], None

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step + 1 in self.updates:
            parameter = next(p for p in model.parameters() if p.requires_grad)
            self.handle = parameter.register_hook(lambda gradient: gradient * math.nan)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if self.handle is not None:
            self.handle.remove()


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "LoRA"])
def test_a_bad_mini_batch_is_left_out_and_the_run_goes_on(tmp_path, lora):
    config, poison, display = tiny_run(tmp_path, model__lora=lora, train__max_steps=3, **ONE_STEP), Poison(2), Heard()
    result = train_policy(config, callbacks=[poison], display=display)
    assert [(row["update/num_steps"], row["update/num_bad"]) for row in result.updates] == [(1, 0), (0, 1), (1, 0)]
    assert "loss/policy_avg" not in result.updates[1], "what was left out is in no mean"
    first, second, third = poison.weights
    assert_same_weights(first, second)
    assert any(not torch.equal(second[name], third[name]) for name in third)
    assert all(math.isfinite(value) for row in result.updates for value in row.values())
    rates = [result.updates[i]["lr"] for i in (0, 2)]
    assert rates[1] == pytest.approx(rates[0] / 3), "the schedule goes on without the step"
    (record,) = read_jsonl(config.output_dir / "bad_batches.jsonl")
    assert (record["step"], record["what"]) == (2, "gradient is not finite")
    samples = [row for row in read_jsonl(config.output_dir / "samples.jsonl") if row["step"] == 2]
    texts = sorted((each["row"], each["response"]) for each in record["rollouts"])
    assert texts == sorted((sample["row"], sample["response"]) for sample in samples)
    (told,) = [text for text in display.said if "not finite" in text]
    assert "gradient is not finite for 8 rollouts of update 2" in told and "1 in a row, of at most 3" in told


@pytest.mark.parametrize("whose", ["policy", "value"])
def test_a_bad_gradient_of_the_policy_keeps_both_from_stepping_and_one_of_the_critic_the_critic(tmp_path, whose):
    config = tiny_run(tmp_path, value__kind="model", **ONE_STEP)
    trainer = trainer_of(
        config, FakeRewards(lambda query, response: len(response) / 10), FakeGenerator(ANSWERS), stop_ids={2}
    )
    trained = {name: trainer.roles.role(name).trained for name in ("policy", "value")}
    before = {name: {key: p.detach().clone() for key, p in own.items()} for name, own in trained.items()}
    handle = next(iter(trained[whose].values())).register_hook(lambda gradient: gradient * math.nan)
    trainer.train_one_update()
    handle.remove()
    for name, own in trained.items():
        has_moved = any(not torch.equal(p, before[name][key]) for key, p in own.items())
        assert has_moved == (name == "policy" and whose == "value"), name
    (update,) = trainer.log.updates
    assert (update["update/num_steps"], update["update/num_bad"]) == (0, 1)
    assert ("loss/policy_avg" in update) == (whose == "value"), "what was left out is in no mean"
    assert "loss/value_avg" not in update, "the critic has its turn only after a policy that stepped"
    assert len(read_jsonl(config.output_dir / "bad_batches.jsonl")) == 1
    assert [optimizer.scheduler.last_epoch for optimizer in trainer.optimizers] == [1, 1]


def test_too_many_in_a_row_end_the_run_and_the_last_good_checkpoint_is_marked(tmp_path):
    config = tiny_run(tmp_path, train__max_steps=9, train__save_steps=1, train__max_bad_batches=2, **ONE_STEP)
    with pytest.raises(TrainingError, match=r"The run ends after 2 skipped in a row .*max_bad_batches") as caught:
        train_policy(config, callbacks=[Poison(2, 4, 5, 6)])
    assert [row["update/num_bad"] for row in reproducible(config.output_dir)] == [0, 1, 0, 1, 1]
    assert f"the last good checkpoint is {config.output_dir / 'checkpoint-5'}" in caught.value.__notes__[0]
    *records, mark = read_jsonl(config.output_dir / "bad_batches.jsonl")
    assert [record["step"] for record in records] == [2, 4, 5, 6]
    assert mark == {"step": 6, "last_good_checkpoint": "checkpoint-5"}
    again = tiny_run(tmp_path, train__max_steps=9, train__max_bad_batches=2, resume=True, **ONE_STEP)
    with pytest.raises(TrainingError):  # two of the three in a row were before the checkpoint
        train_policy(again, callbacks=[Poison(6)])
    train_policy(again, callbacks=[])
    assert [record["step"] for record in read_jsonl(config.output_dir / "bad_batches.jsonl")] == [2, 4, 5]


def test_a_rollout_batch_with_a_bad_value_is_left_out_whole(tmp_path):
    config = tiny_run(tmp_path, value__kind="model", ppo__num_mini_batches=2)
    judge = FakeRewards(lambda query, response: len(response) / 10)
    trainer = trainer_of(config, judge, FakeGenerator(ANSWERS), stop_ids={2})
    head = trainer.roles.role("value").head.weight
    before = {name: p.detach().clone() for name, p in trainer.roles.state_dict().items()}
    with torch.no_grad():
        sound = float(head[0, 3])
        head[0, 3] = math.nan
    trainer.train_one_update()
    with torch.no_grad():
        head[0, 3] = sound
    assert_same_weights(trainer.roles.state_dict(), before)
    (bad,) = trainer.log.updates
    assert (bad["update/num_steps"], bad["update/num_bad"]) == (0, 4)
    assert "loss/policy_avg" not in bad and bad["objective/scores"] > 0
    assert trainer.state.bad_batches == 1
    trainer.train_one_update()
    assert (trainer.log.updates[1]["update/num_steps"], trainer.state.bad_batches) == (4, 0)
    assert trainer.optimizers[0].scheduler.last_epoch == 8


def test_an_answer_without_a_score_ends_the_run_before_anything_is_lost(tmp_path):
    changes = {"train__max_steps": 3}
    straight = tiny_run(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    train_policy(straight)
    config = tiny_run(tmp_path, **changes)
    count = "global calls\n    calls += len(completions) > 2"  # it is tried on two answers
    bad = REWARD.replace("return", f"{count}\n    return [float('nan')] * 8 if calls == 2 else")
    (tmp_path / "rewards.py").write_text(f"calls = 0\n{bad}", encoding="utf-8")
    with pytest.raises(RewardResponseError, match=r"returned nan \(float\) for answer 0 of 8"):
        train_policy(config)
    (record,) = read_jsonl(config.output_dir / "bad_batches.jsonl")
    assert record["step"] == 2 and len(record["rollouts"]) == 8 and "returned nan" in record["what"]
    train_policy(tiny_run(tmp_path, resume=True, **changes))  # which writes the sound function again
    assert reproducible(config.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(config.output_dir), weights(straight.output_dir))
    assert read_jsonl(config.output_dir / "bad_batches.jsonl") == []


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path):
    trainer = trainer_of(tiny_run(tmp_path, train__save_total_limit=1), FakeRewards(lambda query, response: 0.0))
    trainer.save()
    trainer.state.step = 1
    with torch.no_grad():
        next(iter(trainer.roles.role("policy").trained.values())).view(-1)[0] = math.inf
    with pytest.raises(TrainingError, match=r"checkpoint-1 is not written: not finite in 1 weight tensor,"):
        trainer.save()
    assert [path.name for path in trainer.config.output_dir.glob("checkpoint-*")] == ["checkpoint-0"]


COLLAPSED = {
    "one word without end": ([[12] * 6] * 8, "nearly all tokens of", 1),
    "the end at once": ([[2]] * 8, "nearly all tokens of", 1),
    "one answer to all": ([[12, 20, 14, 13, 12, 2]] * 8, "nearly always gives the same answer", 1),
    "one word among others": ([[12, 12, 12, 13, 12, 2], [12, 12, 13, 2]] * 4, "", 0.5),
}


@pytest.mark.parametrize(("answers", "told", "share"), COLLAPSED.values(), ids=COLLAPSED)
def test_a_policy_that_says_one_thing_is_noticed_in_its_first_update(tmp_path, answers, told, share):
    trainer = trainer_of(
        tiny_run(tmp_path), FakeRewards(lambda query, response: 0.0), FakeGenerator(answers), stop_ids={2}
    )
    trainer.log.display = display = Heard()
    trainer.train_one_update()
    warned = [text for text in display.said if "collapsed" in text]
    assert len(warned) == bool(told) and all(told in text for text in warned)
    (update,) = trainer.log.updates
    assert update["rollout/top_answer_share"] == share
    assert (update["rollout/top_token_share"] > 0.9) == ("token" in told)


def test_answers_of_one_token_by_configuration_are_no_collapse(tmp_path):
    config = tiny_run(tmp_path, sampling__response_length=1)
    trainer = trainer_of(config, FakeRewards(lambda query, response: 0.0), FakeGenerator([[12]] * 8))
    trainer.log.display = display = Heard()
    trainer.train_one_update()
    assert not any("collapsed" in text for text in display.said)
