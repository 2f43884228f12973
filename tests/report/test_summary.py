import math

import pytest

from tests.report.runs import answer, evaluation, healthy, update, write
from tether.report.read import read_run
from tether.report.summary import pairs, tiles, verdict


def _verdict(folder, scores, samples=(), std=1.0):
    metrics = [update(1, 0.1), update(2, 0.2)]
    metrics += [evaluation(i, 0.0, eval_scores=s, eval_scores_std=std) for i, s in enumerate(scores)]
    run = read_run(write(folder, metrics, list(samples)))
    return verdict(run, pairs(run))


def test_a_gain_is_told_in_standard_deviations_of_the_start_policy(tmp_path):
    found = _verdict(tmp_path, [1.0, 4.0], std=2.0)
    assert (found.level, found.answer) == ("ok", "Yes.")
    assert "by 1.5 standard deviations of the start policy" in found.sentence
    assert "From 1 to 4 after 1 update" in found.detail


def test_worse_and_within_noise(tmp_path):
    assert _verdict(tmp_path / "a", [1.0, 0.5]).level == "act"
    assert _verdict(tmp_path / "b", [1.0, 1.05]).level == "warn"


def test_noise_is_two_standard_errors_of_the_change_on_the_same_prompts(tmp_path):
    changes = [1.0, -1.0] * 8 + [0.4] * 4
    samples = [answer(0, i, 0.0) for i in range(20)] + [answer(1, i, c) for i, c in enumerate(changes)]
    mean = sum(changes) / 20
    error = math.sqrt(sum((c - mean) ** 2 for c in changes) / 19 / 20)
    found = _verdict(tmp_path / "a", [0.0, mean], samples)
    assert found.level == "warn" and f"{2 * error:.3g} standard deviations" in found.detail
    same = [answer(0, i, 0.0) for i in range(20)] + [answer(1, i, 0.08 + 0.001 * i) for i in range(20)]
    assert _verdict(tmp_path / "b", [0.0, 0.0895], same).level == "ok"


@pytest.mark.parametrize(("count", "answered"), [(7, "Not known."), (8, "Yes.")])
def test_few_prompts_cannot_tell_a_change_from_noise(tmp_path, count, answered):
    samples = [answer(step, row, float(step)) for step in (0, 1) for row in range(count)]
    found = _verdict(tmp_path, [0.0, 1.0], samples)
    assert found.answer == answered
    assert answered == "Yes." or found.sentence.startswith("7 held-out prompts cannot tell a change from noise")


def test_without_two_evaluations_the_training_score_is_no_verdict(tmp_path):
    found = _verdict(tmp_path / "a", [1.0])
    assert found.level == "info" and "Only one evaluation" in found.detail
    found = _verdict(tmp_path / "b", [])
    assert found.level == "info" and "On training prompts" in found.sentence


def test_without_a_spread_a_change_may_be_noise(tmp_path):
    metrics = [{"step": 0, "eval_scores": 1.0}, {"step": 5, "eval_scores": 2.0}, {"step": 1, "lr": 1.0}]
    run = read_run(write(tmp_path, metrics))
    assert verdict(run, []).level == "info"


def test_pairs_match_prompts_by_row_over_the_first_and_last_evaluation(tmp_path):
    samples = [answer(step, row, step + row) for step in (0, 5, 10) for row in (4, 2, 7) if (step, row) != (10, 7)]
    samples.append(answer(10, 99, 1.0))
    samples.append(answer(10, 2, 1.0, split="train"))
    found = pairs(read_run(write(tmp_path, [], samples)))
    assert [(p.before.row, p.before.step, p.after.row, p.after.step) for p in found] == [(2, 0, 2, 10), (4, 0, 4, 10)]
    assert [p.after.score - p.before.score for p in found] == [10, 10]


def test_one_evaluation_shows_its_answers_alone(tmp_path):
    found = pairs(read_run(write(tmp_path, [], [answer(0, row, 1.0) for row in range(3)])))
    assert [p.after for p in found] == [None] * 3


def test_tiles(tmp_path):
    run = read_run(healthy(tmp_path))
    shown = {tile.label: (tile.value, tile.detail) for tile in tiles(run, pairs(run))}
    assert shown["Held-out score"] == ("0.1 → 2.1", "+2 sd of the start policy")
    assert shown["KL spent"][0] == "4 nats"
    assert shown["Length"] == ("30 → 26", "tokens, of 48 at most")
    assert shown["Ended by itself"][0] == "90 % → 95 %"
    assert shown["Better answers"] == ("16 of 16", "held-out prompts")
    assert shown["Updates"] == ("25 of 25", "2 min 18 s, 1,600 answers")


def test_an_unfinished_run_and_a_run_without_kl_say_so(tmp_path):
    lines = [update(i, 0.1) for i in range(1, 4)]
    for line in lines:
        del line["objective/kl"]
    run = read_run(write(tmp_path, lines, config="ppo: {kl_coef: 0.0}\ntrain: {max_steps: 9}"))
    shown = {tile.label: (tile.value, tile.detail) for tile in tiles(run, [])}
    assert shown["KL spent"] == ("–", "not measured: ppo.kl_coef is 0")
    assert shown["Updates"][0] == "3 of 9" and "interrupted" in shown["Updates"][1]


def kept(folder, kept_step, scores=(0.0, 2.0, 1.0)):
    """A run of ten updates whose best policy was put in the place of the last."""
    metrics = [update(i, i / 10) for i in range(1, 11)]
    metrics += [
        evaluation(5 * i, 0.0, eval_scores=score, eval_kl=float(i), eval_length=30.0 - i)
        for i, score in enumerate(scores)
    ]
    samples = [answer(5 * i, row, score) for i, score in enumerate(scores) for row in range(8)]
    config = "train: {max_steps: 25, metric_for_best_model: eval_scores, load_best_model_at_end: true}"
    return read_run(write(folder, metrics, samples, config=config, finished={"step": 10, "kept_step": kept_step}))


def test_a_run_that_kept_its_best_policy_is_judged_by_that_one(tmp_path):
    run = kept(tmp_path, 5)
    compared = pairs(run)
    found = verdict(run, compared)
    assert found.answer == "Yes." and "rose by 2 standard deviations of the start policy" in found.sentence
    assert "From 0 to 2 after 5 updates" in found.detail and "update 5 of 10, the best by eval_scores" in found.detail
    assert {pair.after.response for pair in compared} == {f"answer {row} at 5" for row in range(8)}
    shown = {tile.label: (tile.value, tile.detail) for tile in tiles(run, compared)}
    assert shown["Held-out score"][0] == "0 → 2" and shown["Length"][0] == "30 → 29"
    assert shown["KL spent"][0] == "1 nat"
    assert shown["Updates"][0] == "10 of 25" and shown["Updates"][1].startswith("ended early, kept: update 5 of 10")


def test_a_run_that_kept_the_start_policy_did_not_make_it_better(tmp_path):
    run = kept(tmp_path, 0, scores=(3.0, 2.0, 1.0))
    compared = pairs(run)
    assert verdict(run, compared).answer == "No."
    assert "first one, whose policy was kept" in verdict(run, compared).sentence
    assert [pair.after for pair in compared] == [None] * 8


@pytest.mark.parametrize("score", [math.nan, None])
def test_answers_without_a_score_are_not_counted_as_better(tmp_path, score):
    samples = [answer(0, 0, 1.0), answer(1, 0, score), answer(0, 1, 1.0), answer(1, 1, 2.0)]
    run = read_run(write(tmp_path, [update(1, 0.1)], samples))
    assert next(t.value for t in tiles(run, pairs(run)) if t.label == "Better answers") == "1 of 1"


@pytest.mark.parametrize("kl", [0.5, -0.01])
def test_a_kl_below_0_is_explained_where_it_is_shown(kl, tmp_path):
    run = read_run(write(tmp_path, [update(1, 0.5), update(2, 1), evaluation(0, 0), evaluation(2, 1, eval_kl=kl)]))
    (detail,) = [tile.detail for tile in tiles(run, []) if tile.label == "KL spent"]
    assert ("below 0 by chance" in detail) == (kl < 0)
