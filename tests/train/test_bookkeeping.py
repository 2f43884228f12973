"""Around the formulas: which prompts, which noise, which order, which weights, and what the judge is given."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch

from tests.operators import operators
from tests.tiny import EOS
from tests.train.runs import PROMPTS, tiny_run
from tests.train.test_run import CrashAfter, assert_same_weights, reproducible, weights
from tests.train.trainers import collate_by, trainer_of
from tether.algo import ScoreMoments
from tether.data.collate import collate
from tether.generation.fake import FakeGenerator
from tether.machine.distributed import Dist
from tether.metrics.writers import read_jsonl
from tether.rewards.fake import FakeRewards
from tether.train.batches import micro_batch_plan, micro_batches, mini_batches
from tether.train.inputs import load_data
from tether.train.rollout import Answers, shaped_scores
from tether.train.run import train_policy
from tether.train.update import Update
from tether.types import Completion, Experience, Prompt, noise_key

ANSWERS = [[10, 11, 12, EOS], [20, EOS], [13, 14, 15, 16, 17, 18], [21, 22, EOS]]
SEED = 7


class Recorder(FakeGenerator):
    """Keeps the requests of every call, and how often it had been given weights by then."""

    def __init__(self):
        super().__init__(ANSWERS)
        self.calls, self.syncs_before = [], []

    def generate(self, requests, sampling):
        self.calls.append(list(requests))
        self.syncs_before.append(self.num_syncs)
        return super().generate(requests, sampling)


def recorded(folder, monkeypatch, *, rewards=None, **changes):
    """A run on answers known beforehand: its configuration, its generator and its result."""
    generator = Recorder()
    monkeypatch.setattr("tether.train.build.build_generator", lambda config, roles: generator)
    config = tiny_run(folder, train__seed=SEED, **changes)
    return config, generator, train_policy(config, rewards=rewards)


def keys_by_prompt(config, requests):
    """Row of a prompt → keys of its answers, in the order in which they were asked for."""
    rows = {prompt.token_ids: prompt.row for prompt in load_data(config).prompts.prompts}
    keys = defaultdict(list)
    for request in requests:
        keys[rows[tuple(request.token_ids)]].append(request.key)
    return keys


# Prompts and noise


def test_no_two_answers_of_a_run_share_their_noise(tmp_path, monkeypatch):
    """Five prompts in updates of four, two answers each: after five updates every prompt was drawn four times."""
    config, generator, _ = recorded(tmp_path, monkeypatch, sampling__num_generations=2, train__max_steps=5)
    assert [len(call) for call in generator.calls] == [8] * 5
    for call in generator.calls:
        assert [request.token_ids for request in call[::2]] == [request.token_ids for request in call[1::2]]
    everything = [request for call in generator.calls for request in call]
    for epoch in range(4):
        drawn = [request.token_ids for request in everything[10 * epoch : 10 * epoch + 10 : 2]]
        assert len(set(drawn)) == 5
    wanted = {row: [noise_key(SEED, "train", row, sample) for sample in range(8)] for row in range(5)}
    assert keys_by_prompt(config, everything) == wanted


def test_evaluations_share_their_noise_with_each_other_and_with_nothing_else(tmp_path, monkeypatch):
    config, generator, _ = recorded(
        tmp_path, monkeypatch, data__eval_prompts=str(tmp_path / "prompts.jsonl"), train__eval_steps=1
    )
    assert [len(call) for call in generator.calls] == [5, 8, 5, 8, 5]
    evaluations = [keys_by_prompt(config, call) for call in generator.calls[::2]]
    assert evaluations == [{row: [noise_key(SEED, "eval", row, 0)] for row in range(5)}] * 3


def test_scores_are_frozen_on_answers_of_their_own(tmp_path, monkeypatch):
    config, generator, _ = recorded(
        tmp_path, monkeypatch, ppo__score_norm="frozen", ppo__score_norm_samples=12, train__max_steps=1
    )
    assert [len(call) for call in generator.calls] == [12, 8]
    keys = keys_by_prompt(config, generator.calls[0])
    assert sorted(keys) == list(range(5)) and {len(own) for own in keys.values()} == {2, 3}
    for row, own in keys.items():
        assert own == [noise_key(SEED, "score_norm", row, sample) for sample in range(len(own))]


def test_the_engine_has_the_weights_of_the_last_update(tmp_path, monkeypatch):
    _, generator, _ = recorded(tmp_path, monkeypatch, train__max_steps=3)
    assert generator.syncs_before == [0, 1, 2] and generator.num_syncs == 3


def test_the_engine_has_the_average_in_evaluations_alone(tmp_path, monkeypatch):
    _, generator, _ = recorded(
        tmp_path, monkeypatch, train__ema_decay=0.5, train__eval_steps=1,
        data__eval_prompts=str(tmp_path / "prompts.jsonl"),
    )  # fmt: skip
    # the average for an evaluation, the policy after it, the policy after an update
    assert generator.syncs_before == [1, 2, 4, 5, 7]


def test_the_judge_is_given_each_answer_with_its_own_prompt(tmp_path, monkeypatch):
    path = tmp_path / "numbered.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "number": i}) + "\n" for i, text in enumerate(PROMPTS)))
    judge = FakeRewards(lambda query, response: len(response))
    config, generator, _ = recorded(
        tmp_path, monkeypatch, rewards=judge, data__prompts=str(path), train__max_steps=1
    )
    (batch,), (requests,) = judge.batches, generator.calls
    tokenizer = load_data(config).tokenizer
    assert batch.query_ids == [list(request.token_ids) for request in requests]
    assert batch.response_ids == ANSWERS * 2  # the fake engine finishes the shortest first
    assert batch.responses == [tokenizer.decode([i for i in ids if i != EOS]) for ids in ANSWERS * 2]
    assert batch.prompts == [PROMPTS[number] for number in batch.columns["number"]]
    for query, prompt, ids in zip(batch.queries, batch.prompts, batch.query_ids, strict=True):
        assert prompt in query and query != prompt and tokenizer(query, add_special_tokens=False)["input_ids"] == ids
    # what is trained on lies in the same rows
    trained_on = [(row["query"], row["length"]) for row in read_jsonl(config.output_dir / "samples.jsonl")]
    assert trained_on == list(zip(batch.queries, map(len, ANSWERS * 2), strict=True))


def test_the_overlong_penalty_is_measured_by_the_longest_length_there_may_be(tmp_path):
    config = tiny_run(tmp_path, ppo__overlong_buffer=4)
    assert config.sampling.response_length == 6
    completions = [Completion(ids, "stop") for ids in ([8, 9, EOS], [8, 9, 8, EOS], [EOS])]
    answers = Answers([Prompt(0, "a", "a", (8,))] * 3, completions, ["", "", ""])
    shaped = shaped_scores(torch.tensor([1.0, 1.0, 1.0]), answers, config, ScoreMoments())
    assert shaped.tolist() == [0.75, 0.5, 1.0]


def test_micro_batches_keep_to_the_token_budget(tmp_path):
    config = tiny_run(tmp_path, train__micro_batch_size=None, train__max_tokens_per_micro_batch=12)
    queries, responses = [[8] * n for n in (1, 2, 3, 4, 5, 6, 2, 2)], [[9] * n for n in (6, 1, 2, 5, 3, 1, 4, 2)]
    plan = micro_batch_plan(config, queries, responses)
    sizes = [len(rows) * max(len(queries[i]) + len(responses[i]) for i in rows) for rows in plan]
    assert sorted(row for rows in plan for row in rows) == list(range(8))
    assert max(sizes) <= 12 and max(map(len, plan)) > 1


@pytest.mark.parametrize("halvings", [0, 1])
def test_micro_batches_know_where_their_answers_are_before_they_are_on_the_device(tmp_path, halvings):
    """Also those that are a part of one: an accelerator would be waited for."""
    completions = [Completion(ids, "stop") for ids in ANSWERS]
    answers = Answers([Prompt(0, "a", "a", (8,))] * len(ANSWERS), completions, [""] * len(ANSWERS))
    batches = micro_batches(answers, tiny_run(tmp_path), Dist(), halvings=halvings)
    assert [len(batch.rows) for batch in batches] == [4 // 2**halvings] * 2**halvings

    def read():
        for batch in batches:
            assert len(batch.response_index) == len(batch.response_places) and not batch.has_padding_before
            assert len(batch.sampled_columns) > 0

    assert not {"aten::nonzero", "aten::_local_scalar_dense"} & operators(read).keys()


def test_an_evaluation_pads_each_answer_once(tmp_path, monkeypatch):
    trainer = trainer_of(tiny_run(tmp_path), FakeRewards(lambda query, response: 0.0))
    padded = []
    collate_by(monkeypatch, lambda batch: (padded.extend(batch.rows), batch)[1])
    trainer.evaluate()
    assert sorted(padded) == list(range(len(PROMPTS)))


# The order of an update


def orders(folder, *, seed, step):
    """Rows of every mini-batch of an update of three epochs of two, from micro-batches of one row."""
    config = tiny_run(
        folder, ppo__num_ppo_epochs=3, ppo__num_mini_batches=2, train__micro_batch_size=1, train__seed=seed
    )
    nothing, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    items = [Experience(collate([[8]], [[EOS]], [row]), nothing, nothing, mask) for row in range(8)]
    groups = list(mini_batches(items, config, step))
    return [tuple(row for item in group for row in item.batch.rows) for group in groups]


def test_epochs_updates_and_seeds_differ_in_their_order(tmp_path):
    seen = []
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        groups = orders(tmp_path, seed=seed, step=step)
        assert groups == orders(tmp_path, seed=seed, step=step)
        assert [len(group) for group in groups] == [4] * 6
        seen += [first + second for first, second in zip(groups[::2], groups[1::2], strict=True)]
    assert all(sorted(epoch) == list(range(8)) for epoch in seen)
    assert len({*seen, tuple(range(8))}) == 10


# Where an update stops


def test_no_step_follows_one_that_went_too_far(tmp_path, monkeypatch):
    said = iter([False, True, False, False])
    monkeypatch.setattr(Update, "is_too_far", lambda self, drift: next(said, False))
    _, _, result = recorded(tmp_path, monkeypatch, ppo__num_ppo_epochs=4, train__max_steps=1)
    assert result.updates[0]["update/num_steps"] == 1.0


def test_an_update_stops_where_the_mean_over_its_tokens_is_too_large(tmp_path, monkeypatch):
    """At the first of two steps the policy has not moved, so at the second the drift is twice the logged mean."""

    def run(**changes):
        config = {"overwrite_output_dir": True, "train__max_steps": 1, "train__learning_rate": 1e-2, **changes}
        return recorded(tmp_path, monkeypatch, **config)[2].updates[0]

    free = run()
    drift = 2 * free["policy/approxkl_avg"]
    assert free["update/num_steps"] == 2.0 and drift > 1e-4
    assert run(ppo__max_approx_kl=0.99 * drift)["update/num_steps"] == 1.0
    assert run(ppo__max_approx_kl=1.01 * drift)["update/num_steps"] == 2.0


# What goes on over updates


def test_the_coefficient_follows_the_kl_of_whole_answers(tmp_path):
    changes = {"train__learning_rate": 1e-2, "train__max_steps": 3, "ppo__kl_coef": 0.1, "overwrite_output_dir": True}
    first, second, _ = (row["objective/kl"] for row in train_policy(tiny_run(tmp_path, **changes)).updates)
    assert first == 0.0 and second > 1e-3
    result = train_policy(tiny_run(tmp_path, ppo__kl_target=second / 1.1, ppo__kl_horizon=20, **changes))
    # 8 answers an update: a KL of 0 is further below the target than the controller heeds, then 1.1 is a tenth above
    lower, higher = 1 - 0.2 * 8 / 20, 1 + 0.1 * 8 / 20
    wanted = [0.1, 0.1 * lower, 0.1 * lower * higher]
    assert [row["objective/kl_coef"] for row in result.updates] == pytest.approx(wanted, rel=1e-5)


def test_the_coefficient_waits_while_the_policy_does(tmp_path):
    steered = {"ppo__kl_target": 0.5, "ppo__kl_horizon": 50, "ppo__kl_coef": 0.1}
    result = train_policy(tiny_run(tmp_path, value__warmup_steps=2, train__max_steps=4, **steered))
    *waiting, moved = (row["objective/kl_coef"] for row in result.updates)
    assert waiting == [0.1] * 3 and moved < 0.1


@pytest.mark.parametrize(("slope", "rates"), [(1.0, [1.0, 1.0, 1.0, 1.0]), (-1.0, [1.0, 1.0, 0.5, 0.25])])
def test_a_schedule_that_follows_a_metric_follows_the_score(tmp_path, monkeypatch, slope, rates):
    judged = iter(range(32))
    judge = FakeRewards(lambda query, response: slope * (next(judged) // 8))
    _, _, result = recorded(
        tmp_path, monkeypatch, rewards=judge, train__max_steps=4, train__learning_rate=1e-3,
        train__lr_scheduler_type="reduce_lr_on_plateau", train__lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
    )  # fmt: skip
    assert [row["objective/scores"] for row in result.updates] == [0.0, slope, 2 * slope, 3 * slope]
    assert [row["lr"] for row in result.updates] == pytest.approx([1e-3 * rate for rate in rates])


def test_evaluations_and_the_result_are_those_of_the_average(tmp_path):
    changes = {"data__eval_prompts": str(tmp_path / "prompts.jsonl"), "train__learning_rate": 1e-2}
    changes |= {"train__max_steps": 2, "ppo__num_ppo_epochs": 4}
    plain = tiny_run(tmp_path, output_dir=str(tmp_path / "plain"), **changes)
    averaged = tiny_run(tmp_path, output_dir=str(tmp_path / "averaged"), train__ema_decay=1 - 1e-9, **changes)
    moved, kept = train_policy(plain), train_policy(averaged)
    assert moved.evaluations[-1]["eval_kl"] > 1e-3
    assert abs(kept.evaluations[-1]["eval_kl"]) < 1e-6, "an average that has not left the start"
    start, end = weights(tmp_path / "llama-tied"), weights(averaged.output_dir)
    assert max(float((end[name] - p).abs().max()) for name, p in start.items()) < 1e-6
    for name in ("objective/kl", "loss/policy_avg", "loss/value_avg"):  # training does not see it
        assert [row[name] for row in kept.updates] == [row[name] for row in moved.updates]


STATISTICS = {
    "frozen moments": {"ppo__score_norm": "frozen", "ppo__score_norm_samples": 8},
    "running moments, adaptive coefficient, average": {
        "ppo__score_norm": "running", "ppo__kl_target": 0.05, "ppo__kl_horizon": 20, "train__ema_decay": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", STATISTICS)
def test_a_resumed_run_has_the_statistics_of_the_one_before(tmp_path, case):
    changes = {"train__max_steps": 3, "train__learning_rate": 1e-2, **STATISTICS[case]}
    straight = tiny_run(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    train_policy(straight)
    broken = {"output_dir": str(tmp_path / "broken"), "train__save_steps": 1, **changes}
    with pytest.raises(OSError, match="went away"):
        train_policy(tiny_run(tmp_path, **broken), callbacks=[CrashAfter(2)])
    resumed = tiny_run(tmp_path, resume=str(tmp_path / "broken" / "checkpoint-1"), **broken)
    train_policy(resumed)
    assert reproducible(resumed.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(resumed.output_dir), weights(straight.output_dir))
    coefficients = {row["objective/kl_coef"] for row in reproducible(straight.output_dir)}
    assert (len(coefficients) == 3) == ("ppo__kl_target" in changes)
