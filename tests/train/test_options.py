"""Every option of the algorithm in whole runs: it does something, a resumed run goes on exactly, and what it promises.

That what it does is right is shown in ``test_whole_step.py``.
"""

from __future__ import annotations

import json
import math
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.tiny import EOS
from tests.train.runs import PROMPTS, tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tether.errors import USER_ERRORS, TrainingError
from tether.generation.fake import FakeGenerator
from tether.inference.evaluate import evaluate_path
from tether.metrics.writers import read_jsonl
from tether.models.roles import ModelRoles
from tether.rewards.fake import FakeRewards
from tether.train import trainer, update
from tether.train.display import NullDisplay
from tether.train.inputs import load_data, tell_data
from tether.train.run import train_policy

TEXTS = [
    {"prompt": "the cat sees", "completion": "a good dog"}, {"prompt": "you", "completion": "run"},
    {"prompt": "is it red", "completion": "it is not red and not blue but green"},
    {"prompt": "i like", "completion": "the sun"}, {"prompt": "two nice", "completion": "days and nights"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, prompts and demonstrations for all runs."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS), encoding="utf-8")
    return folder


@pytest.fixture
def run(folder, tmp_path):
    """Makes the configuration of a run of three updates with held-out prompts that writes to a folder of its own."""

    def config(name="out", **changes):
        usual = {"train__max_steps": 3, "data__eval_prompts": str(folder / "prompts.jsonl")}
        if changes.get("ppo__ptx_coef"):
            usual["data__ptx"] = str(folder / "ptx.jsonl")
        return tiny_run(folder, output_dir=str(tmp_path / name), **usual | changes)

    return config


def names(result):
    """Every metric that a run logged."""
    return {name for row in (*result.updates, *result.evaluations) for name in row}


def saved(config, step):
    """Weights of the policy that a checkpoint shows, and all trained ones by role."""
    folder = config.output_dir / f"checkpoint-{step}"
    return weights(folder), load_file(folder / "tether_state" / "roles.safetensors")


def distance(one, other):
    """The largest difference of a weight."""
    return max(float((p - other[name]).abs().max()) for name, p in one.items())


# Each option


SCALE_SHOWS = {"train__max_grad_norm": None, "train__adam_epsilon": 1e-2}
OPTIONS = {
    "kl_estimator": {"ppo__kl_estimator": "k2"},
    "kl_in": {"ppo__kl_in": "loss"},
    "kl_target": {"ppo__kl_target": 0.01, "ppo__kl_horizon": 20},
    "num_mini_batches": {"ppo__num_mini_batches": 2},
    "max_approx_kl": {"ppo__max_approx_kl": 1e-4},
    "max_ratio": {"ppo__max_ratio": 1.0001},
    "cliprange_high": {"ppo__cliprange_high": 0.01},
    "dual_clip": {"ppo__dual_clip": 1.001, "ppo__num_mini_batches": 2},
    "cliprange_value": {"ppo__cliprange_value": 1e-4},
    "entropy_coef": {"ppo__entropy_coef": 0.1},
    "sequence_mean": {"ppo__loss_reduction": "sequence_mean"},
    "fixed_length": {"ppo__loss_reduction": "fixed_length", **SCALE_SHOWS},
    "ptx_coef": {"ppo__ptx_coef": 1.0},
    "rloo": {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 2},
    "grpo": {"ppo__advantage_estimator": "grpo", "sampling__num_generations": 4},
    "reinforce_pp": {"ppo__advantage_estimator": "reinforce_pp"},
    "num_generations": {"sampling__num_generations": 4},
    "value_lam": {"ppo__value_lam": 0.0},
    "lam_alpha": {"ppo__lam_alpha": 0.3},
    "whiten_rewards": {"ppo__whiten_rewards": True},
    "whiten_advantages": {"ppo__whiten_advantages": False},
    "advantage_clip": {"ppo__advantage_clip": 0.5},
    "frozen": {"ppo__score_norm": "frozen", "ppo__score_norm_samples": 12},
    "running": {"ppo__score_norm": "running"},
    "reward_clip": {"ppo__reward_clip": 1.0},
    "missing_eos_penalty": {"ppo__missing_eos_penalty": 2.0},
    "missing_eos_score": {"ppo__missing_eos_score": -2.0},
    "overlong_buffer": {"ppo__overlong_buffer": 4, "ppo__overlong_penalty": 3.0},
    "mask_truncated": {"ppo__mask_truncated": True},
    "warmup_steps": {"value__warmup_steps": 2},
    "warmup_steps, head": {"value__warmup_steps": 2, "value__kind": "head"},
    "ema_decay": {"train__ema_decay": 0.5},
    "reduce_lr_on_plateau": {
        "train__lr_scheduler_type": "reduce_lr_on_plateau",
        "train__lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0, "factor": 0.5},
    },
    "greedy": {
        "train__lr_scheduler_type": "greedy",
        "train__lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "min_lr": 1e-6},
    },
    "cosine_with_min_lr": {
        "train__lr_scheduler_type": "cosine_with_min_lr", "train__lr_scheduler_kwargs": {"min_lr_rate": 0.5},
    },
    "all at once": {
        "model__lora": {"r": 4}, "ppo__kl_in": "loss", "ppo__kl_estimator": "k3", "ppo__kl_target": 0.05,
        "ppo__kl_horizon": 50, "ppo__num_mini_batches": 2, "ppo__entropy_coef": 0.01, "ppo__ptx_coef": 0.5,
        "ppo__dual_clip": 3.0, "ppo__cliprange_high": 0.3, "ppo__loss_reduction": "sequence_mean",
        "ppo__score_norm": "frozen", "ppo__score_norm_samples": 12, "ppo__reward_clip": 2.0,
        "ppo__missing_eos_score": -2.0, "ppo__overlong_buffer": 2, "ppo__lam_alpha": 0.5, "ppo__value_lam": 1.0,
        "ppo__max_approx_kl": 0.5, "value__warmup_steps": 1, "train__ema_decay": 0.9,
        "train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 40,
    },
}  # fmt: skip
COMPANIONS = {
    "fixed_length": SCALE_SHOWS,
    "dual_clip": {"ppo__num_mini_batches": 2},
    "warmup_steps, head": {"value__kind": "head"},
    "reduce_lr_on_plateau": {"train__lr_scheduler_type": "constant"},
    "greedy": {"train__lr_scheduler_type": "constant"},
    "all at once": {"model__lora": {"r": 4}},
}
"""What an option is compared with, where it is not the run without any."""


@pytest.fixture(scope="module")
def without(folder, tmp_path_factory):
    """Weights that a run without an option comes to; each such run is made once."""
    known = {}

    def trained(option):
        changes = COMPANIONS.get(option, {})
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            out = str(tmp_path_factory.mktemp("without"))
            train_policy(tiny_run(folder, output_dir=out, train__max_steps=3, **changes))
            known[key] = weights(folder.parent / out)
        return known[key]

    return trained


@pytest.mark.parametrize("option", OPTIONS)
def test_option_changes_the_weights_and_a_resumed_run_goes_on_exactly(run, without, option):
    straight = run(train__save_steps=1, **OPTIONS[option])
    result = train_policy(straight)
    assert len(result.updates) == 3 and len(result.evaluations) == 2
    for row in (*result.updates, *result.evaluations):
        assert all(math.isfinite(value) for value in row.values()), row
    trained, logged = weights(straight.output_dir), reproducible(straight.output_dir)
    assert distance(trained, without(option)) > 1e-5
    assert all(torch.isfinite(p).all() for p in trained.values())

    checkpoint = str(straight.output_dir / "checkpoint-1")
    resumed = train_policy(run(train__save_steps=1, resume=checkpoint, **OPTIONS[option]))
    assert [row["step"] for row in resumed.updates] == [2, 3]
    assert reproducible(straight.output_dir) == logged
    assert_same_weights(weights(straight.output_dir), trained)


# The KL


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "LoRA"])
def test_without_a_coefficient_no_reference_ever_runs(run, monkeypatch, kl_in, lora):
    def refused(*args):
        raise AssertionError("a forward of the reference")

    monkeypatch.setattr(ModelRoles, "ref_logprobs", refused)
    with pytest.raises(AssertionError, match="a forward of the reference"):
        train_policy(run("with", ppo__kl_in=kl_in, model__lora=lora))
    result = train_policy(run("without", model__lora=lora, ppo__kl_coef=0.0))
    assert len(result.updates) == 3 and len(result.evaluations) == 2
    assert not {"objective/kl", "objective/kl_k3", "loss/kl_avg", "eval_kl"} & names(result)
    assert all(row["objective/kl_coef"] == 0.0 == row["objective/non_score_reward"] for row in result.updates)


# Advantages without a critic


OF_THE_CRITIC = {
    "loss/value_avg", "val/values", "val/clipfrac_avg", "val/explained_variance", "value/lr", "value/grad_norm",
}  # fmt: skip


class Roles(NullDisplay):
    """Keeps the names in the table of the roles' parameters."""

    def table(self, title, columns, rows):
        self.names = [row[0] for row in rows]


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "LoRA"])
def test_estimators_without_a_critic_build_none(run, lora):
    display, common = Roles(), {"model__lora": lora, "train__save_steps": 1, "train__max_steps": 1}
    config = run("gae", **common)
    assert names(train_policy(config, display=display)) >= OF_THE_CRITIC
    assert display.names == ["policy", "reference", "value"]
    sizes = {name: p.numel() for name, p in saved(config, 1)[1].items()}
    of_the_policy = {name: size for name, size in sizes.items() if name.startswith("policy.")}
    assert sum(sizes.values()) > sum(of_the_policy.values()) > 0
    for estimator in ("rloo", "grpo", "reinforce_pp"):
        config = run(estimator, ppo__advantage_estimator=estimator, sampling__num_generations=2, **common)
        result = train_policy(config, display=display)
        assert not OF_THE_CRITIC & names(result)
        assert display.names == ["policy", "reference"]
        assert {name: p.numel() for name, p in saved(config, 1)[1].items()} == of_the_policy
        again = evaluate_path(config.output_dir)
        assert again.metrics["eval_scores"] == pytest.approx(result.evaluations[-1]["eval_scores"], abs=1e-5)


def test_answers_to_a_prompt_are_neighbours_and_differ(run):
    config = run(sampling__num_generations=2, train__num_train_epochs=4, train__log_samples=8, train__max_steps=None)
    result = train_policy(config)
    rows = [row for row in read_jsonl(result.output_dir / "samples.jsonl") if row["split"] == "train"]
    assert len(result.updates) == 4 * len(PROMPTS) * 2 / 8 and len(rows) == 40
    assert [row["row"] for row in rows[::2]] == [row["row"] for row in rows[1::2]]
    for epoch in range(4):
        assert sorted(row["row"] for row in rows[10 * epoch : 10 * epoch + 10 : 2]) == list(range(len(PROMPTS)))
    same = sum(one["response"] == other["response"] for one, other in zip(rows[::2], rows[1::2], strict=True))
    assert same <= 2


# Micro-batches and mini-batches


@pytest.fixture
def steps(monkeypatch):
    """Micro-batches of every optimizer step, and those of its demonstrations."""
    answers, texts = [], []
    mini_batches, demonstration_batches = update.mini_batches, update.demonstration_batches

    def noted_answers(*args):
        for group in mini_batches(*args):
            answers.append([item.batch for item in group])
            yield group

    def noted_texts(*args, **kwargs):
        texts.append(demonstration_batches(*args, **kwargs))
        return texts[-1]

    monkeypatch.setattr(update, "mini_batches", noted_answers)
    monkeypatch.setattr(update, "demonstration_batches", noted_texts)
    return answers, texts


@pytest.mark.parametrize("budget", [16, 24, 40, 1000])
def test_token_budget_is_kept_and_changes_nothing(folder, run, steps, budget):
    answers, texts = steps
    common = {"ppo__ptx_coef": 0.3, "ppo__num_ppo_epochs": 1, "train__max_steps": 1, "train__max_grad_norm": None}
    tokens = {"train__micro_batch_size": None, "train__max_tokens_per_micro_batch": budget}
    expected = weights(train_policy(run("rows", train__micro_batch_size=8, **common)).output_dir)
    assert distance(expected, weights(folder / "llama-tied")) > 5e-4
    del answers[:], texts[:]
    got = weights(train_policy(run("tokens", **tokens, **common)).output_dir)
    assert distance(got, expected) < 1e-6
    for (batches,) in (answers, texts):
        assert max(batch.token_ids.numel() for batch in batches) <= budget
        assert (len(batches) > 1) == (budget < 1000)
        assert sorted(row for batch in batches for row in batch.rows) == list(range(8))


def test_mini_batches_of_a_token_budget_are_as_equal_as_can_be(run, steps):
    answers, _ = steps
    train_policy(run(
        ppo__num_mini_batches=4, ppo__num_ppo_epochs=3, train__micro_batch_size=None, train__max_steps=2,
        train__max_tokens_per_micro_batch=28,
    ))  # fmt: skip
    assert len(answers) == 2 * 3 * 4
    for epoch in range(6):
        groups = [[row for batch in group for row in batch.rows] for group in answers[4 * epoch : 4 * epoch + 4]]
        assert sorted(row for group in groups for row in group) == list(range(8))
        largest = max(len(batch.rows) for group in answers for batch in group)
        assert largest == 2
        for number in range(1, 5):
            assert 0 <= sum(map(len, groups[:number])) - 2 * number < largest


def test_every_demonstration_is_read_once_an_epoch_over_all_updates(run, steps):
    _, texts = steps
    train_policy(run(ppo__ptx_coef=0.1, ppo__num_mini_batches=2, train__micro_batch_size=2))
    assert len(texts) == 3 * 2 * 2
    read = []
    for batches in texts:
        drawn = {row: (batch, i) for batch in batches for i, row in enumerate(batch.rows)}
        assert sorted(drawn) == [0, 1, 2, 3]
        read += [tuple(batch.token_ids[i][batch.attention_mask[i]].tolist()) for _, (batch, i) in sorted(drawn.items())]
    epochs = [read[i : i + len(TEXTS)] for i in range(0, 45, len(TEXTS))]
    assert [len(set(epoch)) for epoch in epochs] == [len(TEXTS)] * 9
    assert len(set(map(tuple, epochs))) > 1


# The moving average


def test_demonstrations_of_a_named_dataset_without_an_answer_are_left_out_and_told(run, tmp_path):
    rows = [{"instruction": f"the {word}", "output": out} for word, out in (("cat", "is good"), ("dog", ""))]
    (tmp_path / "stories.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text('{"stories": {"file_name": "stories.json"}}', encoding="utf-8")
    named = {"data__dataset_dir": str(tmp_path), "data__prompts": "stories", "data__eval_prompts": None}
    config, told = run(ppo__ptx_coef=0.1, data__ptx="stories", **named), []
    data, display = load_data(config), NullDisplay()
    display.message = told.append
    tell_data(config, data, display)
    assert [each.row for each in data.demonstrations] == [0] and len(data.prompts.prompts) == 2
    assert "demonstrations: stories: 2 rows, 1 without an answer" in told


def test_the_average_is_evaluated_and_saved_and_training_goes_on_without_it(folder, run):
    common = {"train__save_steps": 1, "train__eval_steps": 1, "train__learning_rate": 1e-2}
    plain, averaged = run("plain", **common), run("averaged", train__ema_decay=0.6, **common)
    train_policy(plain)
    result = train_policy(averaged)
    average = weights(folder / "llama-tied")
    for step in (1, 2, 3):
        raw, trained = saved(plain, step)
        shown, own = saved(averaged, step)
        assert_same_weights(own, trained)
        average = {name: 0.6 * average[name] + 0.4 * raw[name] for name in raw}
        assert distance(shown, average) < 1e-6 < 1e-3 < distance(shown, raw)
        evaluated = evaluate_path(averaged.output_dir / f"checkpoint-{step}").metrics
        assert evaluated == pytest.approx({k: v for k, v in result.evaluations[step].items() if k != "step"}, abs=1e-5)
    assert_same_weights(weights(averaged.output_dir), shown)


def test_the_best_average_is_kept(run):
    config = run(
        train__max_steps=4, train__save_steps=1, train__eval_steps=1, train__learning_rate=1e-2, train__ema_decay=0.6,
        train__metric_for_best_model="eval_kl", train__greater_is_better=False, train__load_best_model_at_end=True,
    )  # fmt: skip
    result = train_policy(config)
    values = [row["eval_kl"] for row in result.evaluations]
    best = min(range(5), key=values.__getitem__)
    assert best < 4, "the last one is the best, which shows nothing"
    assert_same_weights(weights(config.output_dir), saved(config, best)[0])
    evaluated = evaluate_path(config.output_dir).metrics
    assert evaluated["eval_kl"] == pytest.approx(values[best], abs=1e-5)


# Statistics of the scores


@pytest.fixture
def scored(monkeypatch):
    """Raw scores of every batch that the trainer had scored, evaluations apart."""
    seen, raw_scores = [], trainer.raw_scores

    def noted(*args):
        scores, output = raw_scores(*args)
        seen.append(scores.tolist())
        return scores, output

    monkeypatch.setattr(trainer, "raw_scores", noted)
    return seen


def moments(scores):
    mean = sum(scores) / len(scores)
    var = sum((x - mean) ** 2 for x in scores) / len(scores)
    return {"count": len(scores), "mean": pytest.approx(mean, abs=1e-12), "var": pytest.approx(var, abs=1e-12)}


def saved_moments(config):
    """What scores are normalised by, as it was saved with each checkpoint and at the end."""
    files = [config.output_dir / f"checkpoint-{step}" / "tether_state" / "state.json" for step in (1, 2, 3)]
    states = [json.loads(file.read_text(encoding="utf-8"))["score_moments"] for file in files]
    return [*states, json.loads((config.output_dir / "score_norm.json").read_text(encoding="utf-8"))]


@pytest.mark.parametrize("changes", [{}, {"ppo__score_norm_samples": 5}], ids=["256 answers", "5 answers"])
def test_frozen_moments_are_those_of_the_start_policys_answers_and_stay(run, scored, changes):
    config = run(ppo__score_norm="frozen", train__save_steps=1, **changes)
    result = train_policy(config)
    start, *batches = scored
    assert [len(scores) for scores in scored] == [changes.get("ppo__score_norm_samples", 256), 8, 8, 8]
    assert saved_moments(config) == [moments(start)] * 4
    mean, std = sum(start) / len(start), json.loads((config.output_dir / "score_norm.json").read_text())["var"] ** 0.5
    for row, scores in zip(result.updates, batches, strict=True):
        assert row["objective/scores"] == pytest.approx((sum(scores) / 8 - mean) / std, abs=1e-5)
        assert row["rewards/letters"] == pytest.approx(sum(scores) / 8, abs=1e-6)
    check_evaluated_again(config, result)


def test_running_moments_are_those_of_all_scores_so_far(run, scored):
    config = run(ppo__score_norm="running", train__save_steps=1)
    result = train_policy(config)
    assert [len(scores) for scores in scored] == [8, 8, 8]
    so_far = [[x for batch in scored[:number] for x in batch] for number in (1, 2, 3)]
    *of_training, of_evaluations = saved_moments(config)
    assert of_training == [moments(scores) for scores in so_far]
    first = result.evaluations[0]  # before any score of training: by its own
    own = (of_evaluations["mean"], of_evaluations["var"] ** 0.5)
    assert own == pytest.approx((first["eval_rewards/letters"], first["eval_rewards_std/letters"]), abs=1e-6)
    assert first["eval_scores"] == pytest.approx(0.0, abs=1e-5) and first["eval_scores_std"] == pytest.approx(1.0)
    check_evaluated_again(config, result)


def test_evaluations_of_running_moments_share_the_scale_of_the_first(run):
    """Or a better policy would count as worse than an earlier one. Also in a run that goes on."""
    changes = {"ppo__score_norm": "running", "train__save_steps": 1, "train__eval_steps": 1}
    changes |= {"train__learning_rate": 0.05, "train__lr_scheduler_type": "constant"}
    best = {"train__metric_for_best_model": "eval_scores", "train__load_best_model_at_end": True}
    result = train_policy(run(**changes | best, train__max_steps=2))
    result = train_policy(run(**changes | best, train__max_steps=4, resume=True))
    rows = read_jsonl(result.output_dir / "metrics.jsonl")
    first, *others = evaluations = [row for row in rows if "eval_scores" in row]
    assert len(evaluations) == 5 and len({row["eval_rewards/letters"] for row in evaluations}) > 1
    mean, std = first["eval_rewards/letters"], first["eval_rewards_std/letters"]
    for row in others:
        assert row["eval_scores"] == pytest.approx((row["eval_rewards/letters"] - mean) / std, abs=1e-5)


def check_evaluated_again(config, result):
    """The finished run evaluated anew says what its last evaluation said."""
    expected = {name: value for name, value in result.evaluations[-1].items() if name != "step"}
    assert evaluate_path(config.output_dir).metrics == pytest.approx(expected, abs=1e-5)
    own = expected["eval_rewards/letters"]
    assert abs(own - expected["eval_scores"]) > 1e-3, "normalised or not is the same here"


def test_scores_without_any_spread_cannot_be_frozen(run):
    config = run(ppo__score_norm="frozen", ppo__score_norm_samples=12)
    with pytest.raises(TrainingError, match=r"^ppo\.score_norm frozen: all 12 answers .* have the score 0\.5, so "):
        train_policy(config, rewards=FakeRewards(lambda query, response: 0.5))
    assert not (config.output_dir / "metrics.jsonl").exists()


# Answers that were cut


class Cuts(FakeGenerator):
    """Answers that are all cut, or all end, by turns.

    Args:
        turns: whether they are cut, of one rollout batch after the other, then from the first again.
    """

    def __init__(self, *turns):
        super().__init__([])
        self.turns = cycle(turns)

    def generate(self, requests, sampling):
        cut, ended = [[10, 11, 12, 13, 14, 15]], [[10, 11, EOS], [12, 13, 14, EOS], [EOS]]
        return FakeGenerator(cut if next(self.turns) else ended).generate(requests, sampling)


@pytest.fixture
def cut(monkeypatch):
    """Makes runs have such answers."""
    return lambda *turns: monkeypatch.setattr("tether.train.build.build_generator", lambda *_: Cuts(*turns))


class Told(NullDisplay):
    """Keeps the messages of a run."""

    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_an_update_whose_answers_were_all_cut_moves_nothing(folder, run, cut, kind):
    cut(True, False)
    config = run(
        ppo__mask_truncated=True, ppo__max_approx_kl=1.0, value__kind=kind, train__save_steps=1, train__max_steps=4,
        train__weight_decay=0.1, data__eval_prompts=None,
    )  # fmt: skip
    display = Told()
    result = train_policy(config, display=display)
    assert [row["rollout/eos_rate"] for row in result.updates] == [0.0, 1.0, 0.0, 1.0]
    for row in result.updates:
        assert all(math.isfinite(value) for value in row.values())
        is_cut = row["rollout/eos_rate"] == 0.0
        assert ("loss/policy_avg" in row) == ("val/ratio" in row) == ("policy/grad_norm" in row) == (not is_cut)
        assert (row["update/num_steps"], row["update/num_empty"]) == ((0, 2) if is_cut else (2, 0))
    (told,) = [text for text in display.messages if "update/num_empty" in text]
    assert "sampling.response_length" in told and "ppo.mask_truncated" in told
    assert_same_weights(saved(config, 1)[0], weights(folder / "llama-tied"))
    assert_same_weights(saved(config, 3)[1], saved(config, 2)[1])
    assert distance(saved(config, 4)[1], saved(config, 3)[1]) > 1e-5
    assert all(torch.isfinite(p).all() for p in saved(config, 4)[1].values())


def test_a_schedule_moves_on_past_steps_without_a_token(run, cut):
    cut(True, False)
    result = train_policy(run(ppo__mask_truncated=True, train__max_steps=4, data__eval_prompts=None))
    of_last_steps = [row.get("lr") for row in result.updates]
    assert of_last_steps == [None, pytest.approx(1e-3 * 5 / 8), None, pytest.approx(1e-3 * 1 / 8)]


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_run_whose_answers_were_all_cut_fails_and_leaves_no_policy(run, cut, kind):
    cut(True)
    changes = {"ppo__mask_truncated": True, "value__kind": kind, "train__save_steps": 1, "data__eval_prompts": None}
    told = r"none of the answers of 2 updates ended within sampling\.response_length 6, and ppo\.mask_truncated"
    config = run(**changes, train__max_steps=2)
    callback = TrainerCallback()
    callback.on_train_end = lambda *args, **kwargs: pytest.fail("the run came to its end")
    with pytest.raises(TrainingError, match=told) as caught:
        train_policy(config, callbacks=[callback])
    assert not hasattr(caught.value, "__notes__")  # no checkpoint is better than the start
    assert not any((config.output_dir / name).exists() for name in ("model.safetensors", "finished.json"))
    resumed = config.model_copy(update={"resume": True})
    with pytest.raises(TrainingError, match=told):
        train_policy(resumed)
    more = config.train.model_copy(update={"max_steps": 3})
    cut(False)
    train_policy(resumed.model_copy(update={"train": more}))
    assert (config.output_dir / "model.safetensors").exists()


def test_demonstrations_are_tokens_too(run, cut):
    """The policy learns from them where all answers were cut."""
    cut(True, False)
    config = run(ppo__mask_truncated=True, ppo__ptx_coef=0.5, train__max_steps=1, data__eval_prompts=None)
    (row,) = train_policy(config).updates
    assert (row["rollout/eos_rate"], row["update/num_steps"], row["update/num_empty"]) == (0.0, 2.0, 0.0)


# The critic's warm-up


WARM_UPS = {
    "own critic": {"value__kind": "model"},
    "head": {"value__kind": "head"},
    "adapter": {"value__kind": "adapter", "model__lora": {"r": 4}},
    "head on LoRA": {"value__kind": "head", "model__lora": {"r": 4}},
}


@pytest.mark.parametrize("critic", WARM_UPS)
def test_while_the_critic_warms_up_the_policy_stays_bitwise(run, critic):
    config = run(
        value__warmup_steps=2, train__save_steps=1, train__weight_decay=0.1, ppo__ptx_coef=0.5, ppo__entropy_coef=0.1,
        ppo__max_approx_kl=1e-9, **WARM_UPS[critic],
    )  # fmt: skip
    result = train_policy(config)
    (_, first), (_, second), (_, third) = (saved(config, step) for step in (1, 2, 3))
    policy, value = ([name for name in first if name.startswith(role)] for role in ("policy.", "value."))
    assert policy and value and len(policy) + len(value) == len(first)
    assert all(torch.equal(first[name], second[name]) for name in policy)
    assert any(not torch.equal(first[name], second[name]) for name in value)
    assert distance({name: third[name] for name in policy}, second) > 1e-5
    assert [row["objective/kl"] for row in result.updates] == [0.0] * 3
    assert [row["update/num_steps"] for row in result.updates] == [2, 2, 1], "nothing stops while the policy rests"
    of_the_policy = {"loss/policy_avg", "loss/ptx_avg", "policy/approxkl_avg", "val/ratio", "val/first_ratio_error"}
    for row, warms_up in zip(result.updates, (True, True, False), strict=True):
        assert not of_the_policy & row.keys() if warms_up else of_the_policy <= row.keys()
        assert "loss/value_avg" in row


# Mistakes


RLOO = {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 2}
NO_STOP = {"sampling__stop_token": None}
CONTRADICTIONS = [
    (RLOO | {"ppo__value_lam": 0.9}, r"ppo\.value_lam 0\.9: only generalized .* is rloo: leave it"),
    (RLOO | {"ppo__lam_alpha": 0.1}, r"ppo\.lam_alpha 0\.1: only generalized .* is rloo: leave it"),
    (RLOO | {"value__learning_rate": 1e-3}, r"value: there is no critic with ppo\.advantage_estimator rloo; leave the"),
    (RLOO | {"value__warmup_steps": 1}, r"value: there is no critic with ppo\.advantage_estimator rloo; leave the"),
    (
        RLOO | {"sampling__num_generations": 1},
        r"ppo\.advantage_estimator rloo compares .* set sampling\.num_generations to 2 or more, got 1",
    ),
    (
        {"ppo__advantage_estimator": "grpo"},
        r"ppo\.advantage_estimator grpo compares .* set sampling\.num_generations to 2 or more, got 1",
    ),
    (
        {"sampling__num_generations": 3},
        r"sampling\.num_generations 3 must divide train\.rollout_batch_size 8: try 2 or 4",
    ),
    (
        {"train__max_tokens_per_micro_batch": 64},
        r"micro_batch_size \(4\) counts answers and max_tokens_per_micro_batch \(64\) tokens: set one of them",
    ),
    ({"ppo__ptx_coef": 1.5, "data__ptx": None}, r"ppo\.ptx_coef 1\.5 needs data\.ptx, a file of demonstrations"),
    ({"data__ptx": "texts.jsonl"}, r"data\.ptx is not used at ppo\.ptx_coef 0: set the coefficient, or leave"),
    (
        {"ppo__overlong_buffer": 7},
        r"ppo\.overlong_buffer 7 is longer than sampling\.response_length 6: set it to at most 6",
    ),
    (NO_STOP | {"ppo__mask_truncated": True}, r"ppo\.mask_truncated: with sampling\.stop_token null no answer ends"),
    (NO_STOP | {"ppo__missing_eos_score": 0.0}, r"ppo\.missing_eos_score: with sampling\.stop_token null no answer"),
    (
        {"ppo__kl_coef": 0.0, "train__metric_for_best_model": "eval_kl"},
        r"train\.metric_for_best_model: got eval_kl, wanted one of eval_scores, eval_length, eval_eos_rate, eval_rewar",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_options_that_contradict_each_other_are_refused(run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


@pytest.mark.parametrize("rule", [{"ppo__mask_truncated": True}, {"ppo__missing_eos_score": 0.0}])
def test_strings_end_answers_without_a_stop_token(tmp_path, rule):
    sampling = tiny_run(tmp_path, sampling__stop_token=None, sampling__stop_strings=["###"], **rule).sampling
    assert (sampling.stop_token, sampling.stop_strings) == (None, ["###"])
    with pytest.raises(ValueError, match=r"with sampling\.stop_token null no answer ends; set stop_token to eos, or"):
        tiny_run(tmp_path, sampling__stop_token=None, **rule)


MISTAKES = {
    "a warm-up as long as the run": (
        {"value__warmup_steps": 3},
        r"^value\.warmup_steps 3: the run has 3 updates, so the policy would never be trained\. Set it below 3$",
    ),
    "a token budget below one answer": (
        {"train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 13},
        r"^train\.max_tokens_per_micro_batch 13 is less than one answer may need: the longest query has 8 tokens, "
        r"sampling\.response_length is 6\. Set it to at least 14$",
    ),
    "no demonstrations there": (
        {"ppo__ptx_coef": 1.0, "data__ptx": "/nowhere/texts.jsonl"},
        r"^data\.ptx: .*/nowhere/texts\.jsonl",
    ),
    "no demonstration short enough": (
        {"ppo__ptx_coef": 1.0, "data__max_ptx_length": 4},
        r"^data\.ptx: every demonstration of .* \(5 demonstrations\) is longer than "
        r"data\.max_ptx_length 4; the shortest has 6 tokens",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_that_only_the_data_show_is_told_before_a_model_is_loaded(run, monkeypatch, mistake):
    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    for module in ("loading", "classifiers"):
        monkeypatch.setattr(f"tether.models.{module}.from_pretrained", loaded)
    changes, message = MISTAKES[mistake]
    with pytest.raises(USER_ERRORS, match=message):
        train_policy(run(**changes))
