import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.runs import CONFIG, answer, evaluation, update, write
from tether.report.health import diagnose
from tether.report.read import read_run
from tether.report.summary import pairs, verdict

N = 40


def findings(
    folder: Path,
    change: Callable[[int, float], dict] = lambda step, p: {},
    *,
    n=N,
    evals=None,
    samples=None,
    config=CONFIG,
):
    """The most urgent finding on each metric of a healthy run whose updates are changed."""
    metrics = [update(i, i / n, **change(i, i / n)) for i in range(1, n + 1)]
    metrics += evals if evals is not None else [evaluation(0, 0.0), evaluation(n, 1.0)]
    found = diagnose(read_run(write(folder, metrics, samples, config=config)))
    assert len({(f.metric, f.sentence) for f in found}) == len(found)
    by_metric = {}
    for finding in found:
        by_metric.setdefault(finding.metric, finding)
    return by_metric


def test_a_single_collapsed_update_is_enough_unless_answers_have_one_token_anyway(tmp_path):
    def change(step, p):
        return {f"rollout__top_{what}_share": 0.99 if step == 7 else 0.1 for what in ("token", "answer")}

    config = CONFIG.replace("response_length: 48", "response_length: 1")
    named, short = findings(tmp_path / "a", change), findings(tmp_path / "b", change, config=config)
    for name in ("rollout/top_token_share", "rollout/top_answer_share"):
        assert "update 7" in named[name].sentence and name not in short


def test_a_healthy_run_has_nothing_to_report(tmp_path):
    found = findings(tmp_path)
    assert {f.level for f in found.values()} == {"ok"}
    assert all(not f.advice for f in found.values())


def test_mini_batches_without_an_answer_that_ended_are_told_and_are_no_early_stop(tmp_path):
    config = CONFIG.replace("num_mini_batches: 1", "num_mini_batches: 2, max_approx_kl: 0.05, mask_truncated: true")
    found = findings(tmp_path, lambda step, p: {"update__num_steps": 1.0, "update__num_empty": 7.0}, config=config)
    assert found["update/num_steps"].level == "ok"
    empty = found["update/num_empty"]
    assert empty.level == "warn" and "88 %" in empty.sentence and "sampling.response_length" in empty.advice
    found = findings(tmp_path, lambda step, p: {"update__num_steps": 8.0, "update__num_empty": 0.0}, config=config)
    assert found["update/num_empty"].level == "ok"


@pytest.mark.parametrize(("share", "level"), [(0.04, "ok"), (0.3, "warn")])
def test_answers_without_a_score_are_told(tmp_path, share, level):
    config = CONFIG.replace("kl_coef: 0.05", "kl_coef: 0.05, score_norm: running")
    evals = [evaluation(i, i / N, **{"eval_rewards_std/brevity": 1.0}) for i in (0, N)]
    found = findings(tmp_path, lambda step, p: {"rewards__brevity__missing": share}, evals=evals, config=config)
    assert found["rewards/brevity/missing"].level == level
    assert found["moving scale"].level == "ok"  # the share has no scale of its own


@pytest.mark.parametrize(
    ("metric", "change", "level", "words"),
    [
        ("val/first_ratio_error", {"val__first_ratio_error": 5e-3}, "warn", "0.005"),
        ("val/first_ratio_error", {"val__first_ratio_error": 0.1}, "act", "rollout"),
        ("val/ratio_var", {"val__ratio_var": 0.02}, "warn", "0.005"),
        ("val/ratio_max", {"val__ratio_var": 0.02, "val__ratio_max": 9.0}, "act", "learning_rate"),
        ("val/ratio_max", {"val__ratio_max": 2.0}, "warn", "1.8"),
        ("policy/approxkl_avg", {"policy__approxkl_avg": 0.03}, "warn", "0.02"),
        ("policy/approxkl_avg", {"policy__approxkl_avg": 0.06}, "act", "learning_rate"),
        ("policy/clipfrac_avg", {"policy__clipfrac_avg": 0.2}, "warn", "15 %"),
        ("policy/clipfrac_avg", {"policy__clipfrac_avg": 0.4}, "act", "num_ppo_epochs"),
        ("policy/clipfrac_avg", {"policy__clipfrac_avg": 0.0}, "act", "Raise train.learning_rate"),
        ("objective/kl", {"objective__kl": 20.0}, "warn", "15"),
        ("objective/kl", {"objective__kl": 30.0}, "act", "ppo.kl_coef"),
        ("objective/kl", {"objective__kl": -0.3}, "act", "temperature"),
        ("val/explained_variance", {"val__explained_variance": 0.1}, "warn", "value.learning_rate"),
        ("rollout/eos_rate", {"rollout__eos_rate": 0.5}, "act", "missing_eos_penalty"),
        ("rollout/length", {"rollout__length": 100.0}, "warn", "length"),
        ("rollout/length", {"rollout__length": 10.0}, "warn", "rewards brevity"),
        ("rollout/logprob_gap", {"rollout__logprob_gap": 0.005}, "warn", "temperature"),
        ("rollout/logprob_gap", {"rollout__logprob_gap": 0.04}, "act", "float32"),
        ("policy/dual_clipfrac", {"policy__dual_clipfrac": 0.1}, "act", "5.0 %"),
        ("val/clipfrac_avg", {"val__clipfrac_avg": 0.4}, "warn", "ppo.cliprange_value"),
        ("rollout/top_token_share", {"rollout__top_token_share": 0.95}, "act", "collapsed"),
        ("rollout/top_answer_share", {"rollout__top_answer_share": 0.95}, "warn", "unless the prompts allow no other"),
        ("update/num_bad", {"update__num_bad": 2.0}, "warn", "80 mini-batches of 40 updates"),
        (
            "policy/num_overflows",
            {"policy__num_overflows": 1.0, "value__num_overflows": 1.0, "update__num_steps": 2.0},
            "warn",
            "were not finite in float16, the last in update 40; 80 mini-batches trained",
        ),
        ("policy/num_overflows", {"policy__num_overflows": 2.0, "update__num_steps": 0.0}, "act", "train.fp16: false"),
    ],
)
def test_a_bad_metric_is_named_with_its_threshold_and_a_way_out(tmp_path, metric, change, level, words):
    found = findings(tmp_path, lambda step, p: change)
    assert found[metric].level == level
    assert words in found[metric].sentence + found[metric].advice
    assert found[metric].advice


@pytest.mark.parametrize(
    ("settings", "levels"),
    [
        ("bf16: true, ", ["ok", "warn", "act"]),
        ("fp16: true, ", ["warn", "act", "act"]),
        ("bf16: false, ", ["act", "act", "act"]),
    ],
)
def test_how_far_decoding_may_differ_from_the_forward_depends_on_the_type(tmp_path, settings, levels):
    config = CONFIG.replace("train: {", f"train: {{{settings}")
    found = [
        findings(tmp_path / str(gap), lambda i, p, gap=gap: {"rollout__logprob_gap": gap}, config=config, n=5)
        for gap in (0.04, 0.15, 0.5)
    ]
    assert [f["rollout/logprob_gap"].level for f in found] == levels


@pytest.mark.parametrize(
    ("cuts", "vllm", "is_judged"), [("top_k: 5", "{}", False), ("top_p: 1.0", "{}", True), ("top_k: 5", "null", True)]
)
def test_what_top_k_cuts_off_is_no_gap_of_vllm(tmp_path, cuts, vllm, is_judged):
    config = CONFIG.replace("sampling: {", f"sampling: {{{cuts}, vllm: {vllm}, ")
    assert config != CONFIG
    found = findings(tmp_path, lambda i, p: {"rollout__logprob_gap": 0.5}, config=config, n=5)
    assert ("rollout/logprob_gap" in found) == is_judged


def test_answers_that_shorten_by_a_discount_are_told_its_key(tmp_path):
    config = CONFIG.replace("kl_coef: 0.05", "kl_coef: 0.05, gamma: 0.9, whiten_rewards: true")
    advice = findings(tmp_path, lambda i, p: {"rollout__length": 10.0}, config=config)["rollout/length"].advice
    assert "ppo.gamma 0.9" in advice and "ppo.whiten_rewards" in advice


@pytest.mark.parametrize(
    ("asked", "steps", "level"),
    [("max_approx_kl: 0.02", 1.0, "warn"), ("max_ratio: 5", 3.0, "ok"), ("gamma: 1.0", 1.0, None)],
)
def test_updates_that_end_early_are_told_where_that_was_asked_for(tmp_path, asked, steps, level):
    config = CONFIG.replace("kl_coef: 0.05", f"kl_coef: 0.05, {asked}")
    found = findings(tmp_path, lambda i, p: {"update__num_steps": steps}, config=config)
    assert (found["update/num_steps"].level if "update/num_steps" in found else None) == level


GRPO = CONFIG.replace("temperature: 1.0", "temperature: 1.0, num_generations: 4").replace(
    "kl_coef: 0.05", "kl_coef: 0.05, advantage_estimator: grpo"
)


@pytest.mark.parametrize("config", [CONFIG, GRPO])
@pytest.mark.parametrize("score", [0.0, 0.1])
def test_a_judge_that_tells_no_answers_apart_is_named_and_no_larger_step_advised(tmp_path, config, score):
    def course(step, p):
        nothing = dict.fromkeys(("objective__kl", "policy__clipfrac_avg", "policy__approxkl_avg"), 0.0)
        return nothing | {"objective__scores": score, "objective__scores_std": 0.0}

    config = config.replace("type: function, path: my_rewards.py", "type: regex, pattern: x")
    evals = [evaluation(i, 0.0, eval_scores=score, eval_scores_std=0.0) for i in (0, N)]
    found = findings(tmp_path, course, evals=evals, config=config)
    assert found["objective/scores_std"].level == "act"
    assert "check its pattern" in found["objective/scores_std"].advice
    assert not any("train.learning_rate" in f.advice for f in found.values())


def test_scores_that_were_alike_for_a_while_are_to_be_looked_at_and_one_answer_an_update_says_nothing(tmp_path):
    def course(step, p):
        return {"objective__scores_std": 0.0 if 20 <= step < 25 else 1.0}

    found = findings(tmp_path / "a", course)["objective/scores_std"]
    assert found.level == "warn" and "From update 20 to 24 all answers" in found.sentence
    short = findings(tmp_path / "b", lambda i, p: {"objective__scores_std": float(not 20 <= i < 24)})
    assert short["objective/scores_std"].level == "ok"
    config = CONFIG.replace("rollout_batch_size: 64", "rollout_batch_size: 1")
    alone = findings(tmp_path / "c", lambda i, p: {"objective__scores_std": 0.0}, config=config)
    assert "objective/scores_std" not in alone


def test_one_of_several_judges_that_tells_no_answers_apart_is_named(tmp_path):
    spreads = {"eval_rewards_std/brevity": 0.5, "eval_rewards_std/other": 0.0, "eval_rewards/other": 0.0}
    lines = [update(1, 0.1), evaluation(0, 0.0) | spreads, evaluation(1, 1.0) | spreads]
    for rows, is_told in ((2, True), (1, False)):
        samples = [answer(0, row, 1.0) for row in range(rows)]
        found = {f.metric: f for f in diagnose(read_run(write(tmp_path / str(rows), lines, samples)))}
        assert ("eval_rewards_std" in found) == is_told
    silent = {"eval_rewards_std/brevity/missing": 0.0, "eval_rewards/brevity/missing": 0.0}
    lines[1:] = [line | {"eval_rewards_std/brevity": 0.0} | silent for line in lines[1:]]
    found = {f.metric: f for f in diagnose(read_run(write(tmp_path, lines, [answer(0, row, 1.0) for row in (0, 1)])))}
    assert found["eval_rewards_std"].level == "act" and "by brevity, other." in found["eval_rewards_std"].sentence


@pytest.mark.parametrize(("own", "level"), [(0.0, "warn"), (1.0, "ok")])
def test_scores_that_move_by_their_running_scale_alone_are_told(tmp_path, own, level):
    config = CONFIG.replace("kl_coef: 0.05", "kl_coef: 0.05, score_norm: running")
    evals = [evaluation(i, 0.0) | {"eval_rewards_std/brevity": 1.0} for i in (0, N)]
    course = {"rewards__brevity/missing": 0.0}
    found = findings(tmp_path, lambda i, p: {"rewards__brevity": own * p} | course, evals=evals, config=config)
    assert found["moving scale"].level == level
    assert "moving scale" not in findings(tmp_path / "fixed", evals=evals)


def test_the_held_out_score_is_that_of_the_policy_which_was_kept(tmp_path):
    evals = [evaluation(step, 0.0, eval_scores=score) for step, score in ((0, 0.0), (20, 2.0), (N, 1.0))]
    best = CONFIG.replace("train: {", "train: {metric_for_best_model: eval_scores, load_best_model_at_end: true, ")
    metrics = [update(i, i / N) for i in range(1, N + 1)] + evals
    run = read_run(write(tmp_path, metrics, config=best, finished={"step": N, "kept_step": 20}))
    (found,) = [f for f in diagnose(run) if f.metric == "eval_scores"]
    assert found.level == "ok" and "+2" in found.sentence
    run.finished_step = run.kept_step = None
    (found,) = [f for f in diagnose(run) if f.metric == "eval_scores"]
    assert found.level == "warn" and found.advice == ""  # it goes on, and the best will be kept


def test_one_noisy_update_alarms_nobody_but_a_bad_stretch_in_the_middle_does(tmp_path):
    once = findings(tmp_path / "a", lambda i, p: {"policy__approxkl_avg": 0.04 if i == 20 else 0.01})
    stretch = findings(tmp_path / "b", lambda i, p: {"policy__approxkl_avg": 0.04 if 10 <= i < 15 else 0.01})
    assert once["policy/approxkl_avg"].level == "ok"
    assert stretch["policy/approxkl_avg"].level == "warn"
    assert "around update 14" in stretch["policy/approxkl_avg"].sentence


def test_a_slightly_negative_kl_is_noise(tmp_path):
    found = findings(tmp_path, lambda i, p: {"objective__kl": -0.1 if i < 4 else 4 * p})
    assert found["objective/kl"].level == "ok"


def test_kl_limits_grow_with_the_answers(tmp_path):
    config = CONFIG.replace("response_length: 48", "response_length: 500")
    long = {"rollout__length": 400.0, "objective__kl": 30.0}
    evals = [evaluation(0, 0.0, eval_length=400.0), evaluation(N, 1.0, eval_length=400.0)]
    assert findings(tmp_path, lambda i, p: long, evals=evals, config=config)["objective/kl"].level == "ok"


def test_answers_that_end_more_often_than_at_the_start_are_a_warning_at_most(tmp_path):
    evals = [evaluation(0, 0.0, eval_eos_rate=0.2), evaluation(N, 1.0, eval_eos_rate=0.6)]
    found = findings(tmp_path, lambda i, p: {"rollout__eos_rate": 0.2 + 0.4 * p}, evals=evals)
    assert found["rollout/eos_rate"].level == "warn"


def test_without_a_stop_token_the_eos_rate_is_not_judged(tmp_path):
    config = CONFIG.replace("stop_token: eos", "stop_token: null")
    found = findings(tmp_path, lambda i, p: {"rollout__eos_rate": 0.0}, config=config)
    assert found["rollout/eos_rate"].level == "info"
    config = config.replace("stop_token: null", "stop_token: null, stop_strings: [x]")
    found = findings(tmp_path, lambda i, p: {"rollout__eos_rate": 0.0}, config=config)
    assert found["rollout/eos_rate"].level != "info"


def test_length_that_explains_the_score_is_acted_on(tmp_path):
    found = findings(tmp_path, lambda i, p: {"rollout__length": 30 + 60 * p})
    assert found["rollout/length"].level == "act"
    assert "brevity reward" in found["rollout/length"].advice


@pytest.mark.parametrize(
    ("course", "level"),
    [(lambda p: 2 - 1.8 * p, "act"), (lambda p: 2 + 3 * p, "act"), (lambda p: 2.0 if p < 0.05 else 0.9, "warn")],
)
def test_entropy(tmp_path, course, level):
    assert (
        findings(tmp_path, lambda i, p: {"policy__entropy_avg": course(p)}, n=100)["policy/entropy_avg"].level == level
    )


def test_a_critic_is_judged_after_its_warm_up(tmp_path):
    bad = {"val__explained_variance": -0.5}
    levels = [findings(tmp_path / str(n), lambda i, p: bad, n=n)["val/explained_variance"].level for n in (10, 40, 120)]
    assert levels == ["info", "warn", "act"]


@pytest.mark.parametrize(
    ("scores", "level", "words"),
    [
        ([0.0, 1.0], "ok", "+1"),
        ([0.0, 0.05], "warn", "nothing that carries over"),
        ([0.0, 1.5, 1.0], "warn", "load_best_model_at_end"),
        ([0.0, -0.5], "act", "while the training score rose"),
        ([0.0], "info", "Only one evaluation"),
        ([], "info", "data.eval_prompts"),
    ],
)
def test_held_out_scores(tmp_path, scores, level, words):
    evals = [evaluation(10 * i, 0.0, eval_scores=score) for i, score in enumerate(scores)]
    found = findings(tmp_path, evals=evals)["eval_scores"]
    assert found.level == level
    assert words in found.sentence + found.advice


@pytest.mark.parametrize(("change", "level"), [(-0.5, "warn"), (-2.0, "act"), (0.5, "warn"), (2.0, "ok")])
def test_a_change_within_two_standard_errors_of_the_answers_is_noise_as_in_the_headline(tmp_path, change, level):
    spread = [change + 0.8 * (-1) ** row for row in range(10)]  # ± 0.53, two standard errors
    samples = [answer(step, row, (step > 0) * spread[row]) for step in (0, 10) for row in range(10)]
    evals = [evaluation(10 * i, 0.0, eval_scores=change * i) for i in range(2)]
    found = findings(tmp_path, evals=evals, samples=samples)["eval_scores"]
    assert found.level == level and ("(0.533 is noise)" in found.sentence) == (level == "warn")
    run = read_run(tmp_path)
    assert verdict(run, pairs(run)).level == level


@pytest.mark.parametrize(("count", "level"), [(7, "info"), (8, "ok")])
def test_few_held_out_prompts_tell_nothing(tmp_path, count, level):
    evals = [evaluation(10 * i, 0.0, eval_scores=float(i)) for i in range(2)]
    found = findings(tmp_path, evals=evals, samples=[answer(0, row, 0.0) for row in range(count)])["eval_scores"]
    assert found.level == level and (level == "ok" or "Hold out at least 8" in found.advice)


def test_a_gradient_spike_and_a_value_that_is_not_finite(tmp_path):
    found = findings(
        tmp_path,
        lambda i, p: {"policy__grad_norm": 50.0 if i == 7 else 1.0, "loss__value_avg": math.nan if i == 9 else 0.1},
    )
    assert found["policy/grad_norm"].level == "warn" and "update 7" in found["policy/grad_norm"].sentence
    assert found["loss/value_avg"].level == "act" and "update 9" in found["loss/value_avg"].sentence


def flat(step: int, p: float) -> dict:
    return {"objective__scores": 0.5, "objective__kl": 0.0, "policy__clipfrac_avg": 0.0}


def collapse(step: int, p: float) -> dict:
    return {"objective__kl": 30 * p, "policy__entropy_avg": 2 - 1.7 * p}


def ascent(step: int, p: float) -> dict:
    return {"objective__scores": min(1.0, 4 * p), "objective__kl": 10 * p}


def overdone(step: int, p: float) -> dict:
    return {"objective__scores": 2 - 2 * abs(p - 0.5), "objective__kl": 10 * p}


def dip(step: int, p: float) -> dict:
    return {"objective__scores": -0.8 if 0.1 < p < 0.3 else 2 * p}


def stuck(step: int, p: float) -> dict:
    return {"objective__scores": 1.0, "val__explained_variance": 0.8}


@pytest.mark.parametrize(
    ("course", "pattern"),
    [
        (flat, "no learning signal"),
        (collapse, "pattern collapse"),
        (ascent, "noise ascent"),
        (overdone, "over-optimization"),
        (dip, "early dip"),
        (stuck, "saturated"),
    ],
)
def test_patterns_over_several_metrics(tmp_path, course, pattern):
    assert findings(tmp_path, course)[pattern].level in ("act", "warn")


def test_urgent_findings_come_first_and_a_short_run_is_not_judged_by_trends(tmp_path):
    found = findings(tmp_path / "a", lambda i, p: {"policy__approxkl_avg": 0.06, "val__explained_variance": 0.1})
    order = [f.level for f in found.values()]
    assert order == sorted(order, key=["act", "warn", "ok", "info"].index)
    assert all(f.level in ("ok", "info") for f in findings(tmp_path / "b", n=1).values())


def test_no_update_no_findings(tmp_path):
    assert diagnose(read_run(write(tmp_path, [evaluation(0, 0.0)]))) == []


def test_overflows_by_which_the_scale_was_found_are_no_fault(tmp_path):
    found = findings(tmp_path, lambda step, p: {"update__num_steps": 4.0, "policy__num_overflows": float(step == 3)})
    assert found["policy/num_overflows"].level == "ok"
    assert "1 optimizer step skipped" in found["policy/num_overflows"].sentence
