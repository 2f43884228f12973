"""Is the run healthy? Each rule looks at one metric, says what it found in a plain sentence, and what to do.

A rule judges the worst stretch of ``STRETCH`` neighbouring updates, so that one noisy update alarms nobody and a bad
phase in the middle of a run is not forgotten; what must hold at the end is judged by the median of the last fifth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tether.report.read import Run, Series
from tether.report.text import counted, number, percent, signed

LEVELS = ("act", "warn", "ok", "info")
"""Levels in the order of urgency; ``info``: there is too little to judge by."""

STRETCH = 5
MIN_UPDATES = 10
"""Updates below which trends are not judged."""
CRITIC_WARM_UP = 20
"""Updates before which the critic is not judged."""

RATIO_ERROR = (1e-3, 1e-2)
RATIO_VAR, RATIO_MAX = 5e-3, 5.0
APPROX_KL = (0.02, 0.05)
CLIP_FRACTION = (0.15, 0.3)
SEQUENCE_KL = (15.0, 25.0)
"""Nats for answers of up to ``KL_LENGTH`` tokens; longer ones may spend as much a token."""
KL_LENGTH = 50
EXPLAINED_VARIANCE = (0.2, 0.0)
LOW_EOS_RATE = 0.8
LOGPROB_GAP = (0.05, 0.2)
TOP_TOKEN_SHARE = TOP_ANSWER_SHARE = 0.9


@dataclass(frozen=True)
class Finding:
    """What one rule found."""

    level: str
    """One of ``LEVELS``."""
    metric: str
    """Name of the metric as in metrics.jsonl; for a pattern over several metrics, the pattern's name."""
    sentence: str
    """What was measured, and the threshold."""
    advice: str = ""
    """What to do; empty where nothing needs doing."""


def diagnose(run: Run) -> list[Finding]:
    """The findings of every rule whose metrics were logged, the most urgent first."""
    if not run.updates:
        return []
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    return sorted(found, key=lambda f: LEVELS.index(f.level))


def kl_limits(run: Run) -> tuple[float, float]:
    """From where on a sequence KL is a warning, and from where on a reason to act, in nats for this run's lengths."""
    scale = max(1.0, (run.series("rollout/length").late or 0.0) / KL_LENGTH)
    return SEQUENCE_KL[0] * scale, SEQUENCE_KL[1] * scale


# Rules on one metric


def not_finite(run: Run) -> Finding | None:
    """Any value that was not a finite number."""
    bad = {
        name: [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]
        for name in run.names()
        if (series := run.series(name)).steps
    }
    bad = {name: steps for name, steps in bad.items() if steps}
    if not bad:
        return Finding("ok", "all metrics", f"Every metric of all {len(run.updates)} updates is a finite number.")
    name = min(bad, key=lambda n: bad[n][0])
    serious = [n for n in bad if n.startswith(("loss/", "objective/", "rewards/")) or "grad_norm" in n]
    return Finding(
        "act" if serious else "warn",
        name,
        f"{len(bad)} metric(s) were not finite numbers at some update, the first was {name} at update {bad[name][0]}.",
        "Look at the answers and scores of that update in samples.jsonl; a smaller train.learning_rate or "
        "train.max_grad_norm 1 helps where losses grew before it."
        if serious
        else "",
    )


def first_ratio(run: Run) -> Finding | None:
    """The first mini-batch of an update must see the policy that sampled."""
    series = run.series("val/first_ratio_error")
    if not series:
        return None
    step, value = max(series.points, key=lambda p: p[1])
    level = _above(value, RATIO_ERROR)
    return Finding(
        level,
        "val/first_ratio_error",
        f"Before an update changes anything, new and old log-probabilities differ by at most {number(value)} in ratio "
        f"(update {step}); up to {number(RATIO_ERROR[0])} is rounding, from {number(RATIO_ERROR[1])} on something is "
        "wrong.",
        ""
        if level == "ok"
        else "The update sees other log-probabilities than the rollout: look for dropout, another "
        "precision or padding, or custom model code that behaves differently from call to call.",
    )


def ratio_spread(run: Run) -> Finding | None:
    """How far single tokens moved within an update."""
    variance, largest = run.series("val/ratio_var"), run.series("val/ratio_max")
    if not variance:
        return None
    spread, step = _worst(variance)
    peak = max(largest.finite, default=1.0)
    level = "act" if peak > RATIO_MAX and spread > RATIO_VAR else "warn" if spread > RATIO_VAR else "ok"
    return Finding(
        level,
        "val/ratio_var",
        f"The variance of the policy ratio reached {number(spread)} (around update {step}; up to {number(RATIO_VAR)} "
        "is usual)"
        + (f"; the largest single ratio was {number(peak)}, usual is below {number(RATIO_MAX)}." if largest else "."),
        "" if level == "ok" else "Updates are too large: halve train.learning_rate or lower ppo.num_ppo_epochs.",
    )


def approx_kl(run: Run) -> Finding | None:
    """How far an update moves the policy."""
    series = run.series("policy/approxkl_avg")
    if not series:
        return None
    value, step = _worst(series)
    level = _above(value, APPROX_KL)
    return Finding(
        level,
        "policy/approxkl_avg",
        f"Within one update the policy moved by up to {number(value)} nats a token (around update {step}); "
        f"{_thresholds(APPROX_KL)}.",
        "" if level == "ok" else "Halve train.learning_rate, or lower ppo.num_ppo_epochs.",
    )


def clip_fraction(run: Run) -> Finding | None:
    """Share of tokens that the clipping holds back."""
    series = run.series("policy/clipfrac_avg")
    if not series:
        return None
    value, step = _worst(series)
    passes = (run.count("ppo.num_ppo_epochs") or 1) * (run.count("ppo.num_mini_batches") or 1)
    if max(series.finite) == 0 and passes > 1 and len(series.finite) >= MIN_UPDATES:
        return Finding(
            "act",
            "policy/clipfrac_avg",
            f"Not one token was clipped in {len(series.finite)} updates of {int(passes)} optimizer steps: "
            "the policy hardly moves.",
            "Raise train.learning_rate.",
        )
    level = _above(value, CLIP_FRACTION)
    return Finding(
        level,
        "policy/clipfrac_avg",
        f"Clipping held back up to {percent(value)} of the tokens (around update {step}); "
        f"{_thresholds(CLIP_FRACTION, percent)}.",
        "" if level == "ok" else "Halve train.learning_rate, or lower ppo.num_ppo_epochs.",
    )


def sequence_kl(run: Run) -> Finding | None:
    """Distance to the reference."""
    series = run.series("objective/kl")
    if not series:
        return None
    value, step = _worst(series)
    limits = kl_limits(run)
    level = _above(value, limits)
    return Finding(
        level,
        "objective/kl",
        f"The policy went up to {number(value)} nats a sequence away from its reference (around update {step}); "
        f"for answers of this length {_thresholds(limits)}.",
        ""
        if level == "ok"
        else "Raise ppo.kl_coef or set ppo.kl_target, stop earlier, and read the last answers: "
        "far from the reference, scores rise for the wrong reasons.",
    )


def negative_kl(run: Run) -> Finding | None:
    """A KL divergence cannot be negative; an estimate can, within noise."""
    series = run.series("objective/kl")
    if not series:
        return None
    # Near the reference the summed log-ratio has mean D and variance 2 D, so a mean over B answers is below -8 / B
    # with less than one chance in 30,000, whatever D is.
    limit = 8 / (run.count("train.rollout_batch_size") or 64)
    low = [step for step, value in series.points if value < -limit]
    if not low:
        return None
    return Finding(
        "act" if len(low) > 1 else "warn",
        "objective/kl",
        f"The KL estimate was negative beyond noise (below {number(-limit)}) in {len(low)} update(s), first at update "
        f"{low[0]}.",
        "Answers were not drawn from the distribution that is scored: look for top-p, top-k or a minimum length in the "
        "generation engine, another temperature, or a reference that is not the start model.",
    )


def explained_variance(run: Run) -> Finding | None:
    """Whether the critic predicts returns."""
    series = run.series("val/explained_variance")
    late = series.late
    if late is None:
        return None
    text = f"The critic explains {percent(late)} of the variance of the returns over the last fifth of the run"
    if run.num_updates < CRITIC_WARM_UP:
        return Finding("info", "val/explained_variance", f"{text}; {CRITIC_WARM_UP} updates are needed to judge it.")
    warn, act = EXPLAINED_VARIANCE
    level = "act" if late < act and run.num_updates >= 100 else "warn" if late < warn else "ok"
    return Finding(
        level,
        "val/explained_variance",
        f"{text}; after warm-up it should be above 30 %, below {percent(warn)} it helps little, below {percent(act)} "
        "it harms.",
        ""
        if level == "ok"
        else "Raise value.learning_rate, start the critic from the reward model (value.init: "
        "reward), and check that ppo.cliprange_value suits the scale of the scores, or set it to null.",
    )


def entropy(run: Run) -> Finding | None:
    """How much choice the policy keeps."""
    series = run.series("policy/entropy_avg")
    early, late = series.early, series.late
    if not early or late is None:
        return None
    text = f"Entropy went from {number(early)} to {number(late)} nats a token"
    if len(series.finite) < MIN_UPDATES:
        return Finding("info", "policy/entropy_avg", f"{text}; {MIN_UPDATES} updates are needed to judge it.")
    planned = max(run.planned_updates or 0, run.num_updates)
    halved = next((step for step, value in _smooth(series) if value < 0.5 * early), None)
    if late < 0.2 * early:
        return Finding(
            "act",
            "policy/entropy_avg",
            f"{text}: less than a fifth is left, the policy gives one answer.",
            "Raise ppo.kl_coef or sampling.temperature, or stop earlier.",
        )
    if late > 2 * early:
        return Finding(
            "act",
            "policy/entropy_avg",
            f"{text}: it more than doubled, the text may fall apart.",
            "Lower train.learning_rate, and read the last answers.",
        )
    if halved is not None and halved <= 0.1 * planned:
        return Finding(
            "warn",
            "policy/entropy_avg",
            f"{text}, and had halved by update {halved}, within the first tenth of the run.",
            "Raise ppo.kl_coef or lower train.learning_rate.",
        )
    return Finding("ok", "policy/entropy_avg", f"{text}; a slow fall is usual.")


def length(run: Run) -> Finding | None:
    """Whether answers become much longer or shorter."""
    series = run.series("rollout/length")
    early, late = run.at_start("eval_length", "rollout/length"), series.late
    if not early or late is None:
        return None
    text = f"Answers went from {number(early)} to {number(late)} tokens"
    if 0.5 <= late / early <= 2:
        return Finding("ok", "rollout/length", f"{text}; within half and twice the start policy's length is healthy.")
    explained = _r_squared(run, "rollout/length", "objective/scores")
    advice = (
        "The judge may reward length itself: fit its score on length, and add a brevity reward."
        if late > early
        else "Check ppo.gamma (1 unless wanted) and ppo.whiten_rewards (off): both shorten answers; and whether the "
        "judge rewards brevity itself."
    )
    return Finding(
        "act" if explained is not None and explained > 0.5 else "warn",
        "rollout/length",
        f"{text}, beyond half or twice the start policy's length"
        + (f"; over the updates length explains {percent(explained)} of the score." if explained is not None else "."),
        advice,
    )


def eos_rate(run: Run) -> Finding | None:
    """Whether answers end by themselves."""
    series = run.series("rollout/eos_rate")
    early, late = run.at_start("eval_eos_rate", "rollout/eos_rate"), series.late
    if early is None or late is None:
        return None
    if run.config and run.setting("sampling.stop_token") is None:
        return Finding("info", "rollout/eos_rate", "sampling.stop_token is null: only the length ends an answer.")
    text = f"{percent(late)} of the answers end by themselves, {percent(early)} at the start"
    # two standard errors of the share at the start, in a batch of this run's size
    noise = 2 * math.sqrt(max(early * (1 - early), 1e-4) / (run.count("train.rollout_batch_size") or 64))
    fell = late < early - noise
    advice = "Set ppo.missing_eos_penalty (or missing_eos_score), and check that sampling.response_length leaves room."
    if late < LOW_EOS_RATE:
        return Finding(
            "act" if fell else "warn",
            "rollout/eos_rate",
            f"{text}; below {percent(LOW_EOS_RATE)} most judges see cut text.",
            advice,
        )
    if fell:
        return Finding("warn", "rollout/eos_rate", f"{text}: the share falls.", advice)
    return Finding("ok", "rollout/eos_rate", f"{text}; {percent(LOW_EOS_RATE)} or more, and not falling, is healthy.")


def held_out(run: Run) -> Finding | None:
    """Whether what is learned carries over to prompts that were not trained on."""
    points = run.evaluated("eval_scores").points
    spread = next(iter(run.evaluated("eval_scores_std").finite), None)
    if len(points) < 2:
        advice = "" if points else "Set data.eval_prompts."
        return Finding(
            "info",
            "eval_scores",
            f"{'One evaluation' if points else 'No evaluation'}: whether gains carry "
            "over to new prompts cannot be said.",
            advice,
        )
    if not spread:
        return None
    change = (points[-1][1] - points[0][1]) / spread
    best_step, best = max(points, key=lambda p: p[1])
    lost = (best - points[-1][1]) / spread
    train = _score_change(run)
    text = f"The held-out score changed by {signed(change)} standard deviations of the start policy"
    if change < -0.1:
        rising = train is not None and train > 0
        return Finding(
            "act",
            "eval_scores",
            f"{text}" + (" while the training score rose." if rising else "."),
            "Stop earlier, raise ppo.kl_coef, or average several judges.",
        )
    if lost > 0.25:
        return Finding(
            "warn",
            "eval_scores",
            f"{text}, and was {number(lost)} higher after update {best_step}.",
            "Keep the best checkpoint: train.metric_for_best_model: eval_scores with load_best_model_at_end: true.",
        )
    if change < 0.1:
        return Finding(
            "warn",
            "eval_scores",
            f"{text}: nothing that carries over was learned (0.1 is noise).",
            "Train longer, raise train.learning_rate or lower ppo.kl_coef.",
        )
    return Finding("ok", "eval_scores", f"{text}, and the last evaluation is the best or close to it.")


def gradient_norm(run: Run) -> Finding | None:
    """Gradients before clipping."""
    names = [name for name in run.names() if "grad_norm" in name and run.series(name)]
    if not names:
        return None
    ratios = {}
    for name in names:
        median = statistics.median(run.series(name).finite)
        step, peak = max(run.series(name).points, key=lambda p: p[1])
        ratios[name] = (peak / median if median > 0 else 1.0, step, median)
    name = max(names, key=lambda n: ratios[n][0])
    ratio, step, median = ratios[name]
    level = "warn" if ratio > 5 else "ok"
    return Finding(
        level,
        name,
        f"The largest gradient norm was {number(ratio)} times its median {number(median)} (update {step}); up to 5 "
        "times is stable.",
        "" if level == "ok" else "Harmless where train.max_grad_norm clips it; if it repeats, lower the learning rate.",
    )


def logprob_gap(run: Run) -> Finding | None:
    """Whether the generation engine and the trainer agree on the policy."""
    series = run.series("rollout/logprob_gap")
    if not series:
        return None
    value, step = _worst(series)
    level = _above(value, LOGPROB_GAP)
    return Finding(
        level,
        "rollout/logprob_gap",
        f"The generation engine's log-probabilities differ from the trainer's by up to {number(value)} a token (around "
        f"update {step}); {_thresholds(LOGPROB_GAP)}.",
        "" if level == "ok" else "Check that both use the same weights, temperature and precision.",
    )


def one_token(run: Run) -> Finding | None:
    """Whether the policy says anything but one token; any single update counts."""
    return _share(
        run,
        "rollout/top_token_share",
        TOP_TOKEN_SHARE,
        "act",
        said="One token made up {share} of the answers of update {step}; above {limit} the policy has collapsed.",
        advice="Go back to a checkpoint from before; raise ppo.kl_coef or lower train.learning_rate.",
    )


def one_answer(run: Run) -> Finding | None:
    """Whether the policy has more than one answer to its prompts; any single update counts."""
    return _share(
        run,
        "rollout/top_answer_share",
        TOP_ANSWER_SHARE,
        "warn",
        said="One and the same answer was {share} of those of update {step}; above {limit} the policy has collapsed, "
        "unless the prompts leave no other.",
        advice="Go back to a checkpoint from before; raise ppo.kl_coef or set ppo.kl_target.",
    )


def _share(run: Run, metric: str, most: float, level: str, *, said: str, advice: str) -> Finding | None:
    """What the largest share of an update says; nothing where answers are of one token by design."""
    series = run.series(metric)
    if not series or run.setting("sampling.response_length") == 1:
        return None
    step, share = max(series.points, key=lambda p: p[1])
    is_fine = share <= most
    text = said.format(share=percent(share), step=step, limit=percent(most))
    return Finding("ok" if is_fine else level, metric, text, "" if is_fine else advice)


def left_out(run: Run) -> Finding | None:
    """Mini-batches that were left out because something in them was not finite."""
    series = run.series("update/num_bad")
    bad = [(step, count) for step, count in series.points if count > 0]
    if not bad:
        return None
    return Finding(
        "warn",
        "update/num_bad",
        f"{counted(round(sum(count for _, count in bad)), 'mini-batch')} of {counted(len(bad), 'update')} held "
        f"something that was not finite, first in update {bad[0][0]}, and trained nothing.",
        "bad_batches.jsonl has their texts; lower train.learning_rate, or set train.bf16 and train.fp16: false.",
    )


def overflows(run: Run) -> Finding | None:
    """Optimizer steps that float16's range cost; a few are the way in which the scale of the losses is found."""
    points = [point for name in ("policy", "value") for point in run.series(f"{name}/num_overflows").points]
    if not (found := [(step, count) for step, count in points if count > 0]):
        return None
    lost, taken = (round(sum(count for _, count in of)) for of in (found, run.series("update/num_steps").points))
    text = (
        f"{counted(lost, 'optimizer step')} left out because scaled gradients were not finite in float16, the last in "
        f"update {max(step for step, _ in found)}; {counted(taken, 'mini-batch')} trained."
    )
    if taken > 10 * lost:
        return Finding("ok", "policy/num_overflows", text)
    advice = "Longer runs find their scale. If it goes on, set train.fp16: false, or train.bf16: true."
    return Finding("warn" if taken else "act", "policy/num_overflows", text, advice)


# Patterns over several metrics


def no_signal(run: Run) -> Finding | None:
    """Score flat, KL near 0, nothing clipped."""
    kl, clipped = run.series("objective/kl").late, run.series("policy/clipfrac_avg").late
    change = _score_change(run)
    if kl is None or clipped is None or change is None:
        return None
    if abs(change) < 0.2 and abs(kl) < 0.05 and clipped < 1e-3:
        return Finding(
            "act",
            "no learning signal",
            f"The score is flat, KL is {number(kl)} and nothing is clipped.",
            "Raise train.learning_rate; check that the scores differ between answers (objective/scores_std).",
        )
    return None


def noise_ascent(run: Run) -> Finding | None:
    """KL rises over the second half of the run, the score does not."""
    kl, change = run.series("objective/kl").finite, _score_change(run, since=0.5)
    if change is None or len(kl) < 2 * MIN_UPDATES:
        return None
    before, after = _ends(kl[len(kl) // 2 :])
    if after - before < 1 or after < 1.25 * before or change > 0.1:
        return None
    falls = change < -0.2
    return Finding(
        "act" if falls else "warn",
        "over-optimisation" if falls else "noise ascent",
        f"Over the second half KL rose from {number(before)} to {number(after)} nats while the score "
        f"{'fell' if falls else 'stayed flat'} ({signed(change)} standard deviations).",
        "Stop earlier or raise ppo.kl_coef; a larger train.rollout_batch_size or a better critic reduces noise.",
    )


def pattern_collapse(run: Run) -> Finding | None:
    """Score and KL up, entropy gone: one answer for every prompt."""
    early, late = run.series("policy/entropy_avg").early, run.series("policy/entropy_avg").late
    kl, change = run.series("objective/kl").late, _score_change(run)
    if not early or late is None or kl is None or change is None or run.num_updates < MIN_UPDATES:
        return None
    if change > 0.2 and kl > kl_limits(run)[0] and late < 0.3 * early:
        return Finding(
            "act",
            "pattern collapse",
            f"The score rose, but KL is {number(kl)} nats and only "
            f"{percent(late / early)} of the entropy is left: answers may be all alike.",
            "Raise ppo.kl_coef, stop earlier, and compare the answers below.",
        )
    return None


def cold_critic(run: Run) -> Finding | None:
    """An early dip of the score that was made good."""
    scores, spread = run.series("objective/scores"), run.score_spread
    if len(scores.finite) < 2 * MIN_UPDATES or not spread:
        return None
    early, third = scores.early, _smooth(scores)[: len(scores.finite) // 3]
    step, low = min(third, key=lambda p: p[1])
    if early is not None and low < early - 0.3 * spread and (scores.late or low) >= early:
        return Finding(
            "warn",
            "early dip",
            f"The score fell by {number((early - low) / spread)} standard deviations by "
            f"update {step} before it recovered: the critic was cold.",
            "Start the critic from the reward model (value.init: reward).",
        )
    return None


def saturated(run: Run) -> Finding | None:
    """The critic predicts well, yet the score does not move."""
    explained, change = run.series("val/explained_variance").late, _score_change(run)
    if explained is None or change is None or explained < 0.5 or abs(change) > 0.1:
        return None
    return Finding(
        "warn",
        "saturated",
        f"The critic explains {percent(explained)} of the returns, but the score does not move.",
        "Raise train.learning_rate, or take harder prompts: all answers may score alike.",
    )


RULES: tuple[Callable[[Run], Finding | None], ...] = (
    held_out, sequence_kl, negative_kl, eos_rate, length, entropy, approx_kl, clip_fraction, explained_variance,
    first_ratio, ratio_spread, gradient_norm, logprob_gap, one_token, one_answer, left_out, overflows, not_finite,
    no_signal, noise_ascent, pattern_collapse, cold_critic, saturated,
)  # fmt: skip
"""Every rule, in the order in which findings of one level are shown."""


# Statistics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _smooth(series: Series) -> list[tuple[int, float]]:
    """(last update, mean) of each stretch of ``STRETCH`` neighbours; of all values where there are fewer."""
    points = series.points
    width = min(STRETCH, len(points))
    return [
        (points[i + width - 1][0], _mean([v for _, v in points[i : i + width]])) for i in range(len(points) - width + 1)
    ]


def _worst(series: Series) -> tuple[float, int]:
    """The largest mean of a stretch and its last update."""
    step, value = max(_smooth(series), key=lambda p: p[1])
    return value, step


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third."""
    third = max(1, len(values) // 3)
    return _mean(values[:third]), _mean(values[-third:])


def _score_change(run: Run, *, since: float = 0.0) -> float | None:
    """Change of the training score from the first to the last third of the updates after the share ``since`` of the
    run, in standard deviations of the start policy; None where there are too few updates to tell."""
    values, spread = run.series("objective/scores").finite, run.score_spread
    part = values[int(since * len(values)) :]
    if len(part) < MIN_UPDATES or not spread:
        return None
    before, after = _ends(part)
    return (after - before) / spread


def _r_squared(run: Run, name: str, other: str) -> float | None:
    """Squared correlation of two metrics over the updates that have both."""
    pairs = {step: value for step, value in run.series(other).points}
    joint = [(value, pairs[step]) for step, value in run.series(name).points if step in pairs]
    if len(joint) < MIN_UPDATES:
        return None
    xs, ys = zip(*joint, strict=True)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    return statistics.correlation(xs, ys) ** 2


def _above(value: float, limits: tuple[float, float]) -> str:
    return "act" if value > limits[1] else "warn" if value > limits[0] else "ok"


def _thresholds(limits: tuple[float, float], show: Callable[[float], str] = number) -> str:
    return f"up to {show(limits[0])} is healthy, above {show(limits[1])} needs acting on"
