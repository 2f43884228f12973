"""Is the run healthy? Each rule looks at one metric, states in a plain sentence what it found, and what to do.

A rule judges the worst stretch of ``STRETCH`` consecutive updates, so that one noisy update raises no alarm and a bad
phase in the middle of a run is not missed; conditions on the end of a run are judged by the median of the last fifth.
Limits are those of ``tether.report.limits``; advice is omitted if there is nothing to do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from tether.config.keys import counted
from tether.report import advice
from tether.report.limits import (
    FEW_STEPS,
    GRADIENT_SPIKE,
    KL_LENGTH,
    LEAST_PROMPTS,
    LIMITS,
    LOGPROB_GAP,
    LOW_EOS_RATE,
    MOST_SHARE,
    MUCH_MISSING,
    STRETCH,
    Limits,
    forward_type,
    scores_alike,
)
from tether.report.read import STAGES, Run, Series, is_missing_share
from tether.report.summary import change_noise, pairs
from tether.report.text import amount, number, one_line, percent, signed
from tether.report.trends import (
    MIN_UPDATES,
    change,
    ends,
    longest_stretch,
    r_squared,
    score_change,
    smooth,
    worst,
)

LEVELS = ("act", "warn", "ok", "info")
"""Levels in order of urgency; ``info``: there is too little data to judge."""
CRITIC_WARM_UP = 20
"""Number of updates before which the critic is not judged."""


@dataclass(frozen=True)
class Finding:
    """The finding of one rule."""

    level: str
    """One of ``LEVELS``."""
    metric: str
    """Name of the metric as in metrics.jsonl; for a pattern across several metrics, the pattern's name."""
    sentence: str
    """What was measured, and the threshold."""
    advice: str = ""
    """What to do; empty if there is nothing to do."""


def diagnose(run: Run) -> list[Finding]:
    """The findings of every rule whose metrics were logged, the most urgent first."""
    if not run.updates:
        return []
    found = [finding for rule in (STAGE_RULES if run.kind in STAGES else RULES) if (finding := rule(run)) is not None]
    return [_told(finding) for finding in sorted(found, key=lambda f: LEVELS.index(f.level))]


def _told(finding: Finding) -> Finding:
    """Advice as a sentence; empty if there is nothing to do."""
    text = "" if finding.level == "ok" else finding.advice
    return replace(finding, advice=text and f"{text[0].upper()}{text[1:].rstrip('.')}.")


def kl_limits(run: Run) -> Limits:
    """Limits of the sequence KL for answers of this run's length."""
    return LIMITS["objective/kl"].scaled(max(1.0, (run.series("rollout/length").late or 0.0) / KL_LENGTH))


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
        return Finding("ok", "all metrics", f"Every metric of all {len(run.updates)} {run.unit}s is a finite number.")
    name = min(bad, key=lambda n: bad[n][0])
    look = "" if run.kind in STAGES else "Look at the answers and scores of that update in samples.jsonl; "
    serious = [n for n in bad if n.startswith(("loss/", "objective/", "rewards/")) or "grad_norm" in n]
    return Finding(
        "act" if serious else "warn",
        name,
        f"{counted(len(bad), 'metric')} had values that are not finite numbers at some {run.unit}; the first "
        f"was {name} at {run.unit} {bad[name][0]}.",
        f"{look}if losses grew before it, lower train.learning_rate or set train.max_grad_norm: 1."
        if serious
        else "",
    )


def first_ratio(run: Run) -> Finding | None:
    """Whether the first mini-batch of an update sees the policy that sampled the answers."""
    series = run.series("val/first_ratio_error")
    if not series:
        return None
    step, value = max(series.points, key=lambda p: p[1])
    limits = LIMITS["val/first_ratio_error"]
    return Finding(
        limits.level(value),
        "val/first_ratio_error",
        f"Before an update changes anything, new and old log-probabilities differ by at most {number(value)} in ratio "
        f"(update {step}); {limits.text()}.",
        "The update sees different log-probabilities than the rollout: look for dropout, other precision or padding, "
        "or custom model code that behaves differently from call to call.",
    )


def ratio_spread(run: Run) -> Finding | None:
    """How far single tokens moved within an update."""
    found = [(name, *worst(series)) for name in ("val/ratio_var", "val/ratio_max") if (series := run.series(name))]
    if not found:
        return None
    name, value, step = min(found, key=lambda f: LEVELS.index(LIMITS[f[0]].level(f[1])))
    what = {"val/ratio_var": "variance of the policy ratio", "val/ratio_max": "largest policy ratio of a token"}[name]
    return Finding(
        LIMITS[name].level(value),
        name,
        f"The {what} reached {number(value)} (around update {step}); {LIMITS[name].text()}.",
        f"Updates are too large: {advice.smaller_updates(run)}",
    )


def approx_kl(run: Run) -> Finding | None:
    """How far an update moves the policy."""
    return _worst_of(
        run,
        "policy/approxkl_avg",
        "Within one update the policy moved by up to {value} nats per token",
        advice.smaller_updates(run),
    )


def clip_fraction(run: Run) -> Finding | None:
    """Share of tokens that the clipping holds back."""
    name, text = "policy/clipfrac_avg", "Clipping held back up to {value} of the tokens"
    clipped = run.series(name).finite
    passes = (run.count("ppo.num_ppo_epochs") or 1) * (run.count("ppo.num_mini_batches") or 1)
    if any(clipped) or passes == 1 or len(clipped) < MIN_UPDATES:
        return _worst_of(run, name, text, advice.smaller_updates(run), show=percent)
    if _always_alike(run):
        return None  # no answer is better than another: there is nothing to learn
    return Finding(
        "act",
        name,
        f"Not one token was clipped in {len(clipped)} updates of {int(passes)} optimizer steps: "
        "the policy hardly moves.",
        "raise train.learning_rate",
    )


def dual_clip(run: Run) -> Finding | None:
    """Share of tokens of bad answers that nevertheless became far more likely."""
    return _worst_of(
        run,
        "policy/dual_clipfrac",
        "The dual clip held back up to {value} of the tokens",
        advice.smaller_updates(run),
        show=percent,
    )


def value_clip(run: Run) -> Finding | None:
    """Share of tokens whose value the clipping holds back; a cold critic's may be large at first."""
    late = run.series("val/clipfrac_avg").late
    if late is None:
        return None
    limits = LIMITS["val/clipfrac_avg"]
    return Finding(
        limits.level(late),
        "val/clipfrac_avg",
        f"Clipping held back the values of {percent(late)} of the tokens over the last fifth of the run; "
        f"{limits.text(percent)}.",
        f"the critic may not move as far as it should: {advice.value_clip(run)}",
    )


def few_steps(run: Run) -> Finding | None:
    """Whether updates end early by ``max_approx_kl`` or ``max_ratio``."""
    series, limits = run.series("update/num_steps"), ("ppo.max_approx_kl", "ppo.max_ratio")
    planned = _planned_steps(run)
    asked = [key for key in limits if run.setting(key) is not None]
    if not series or planned < 2 or not asked:
        return None
    others = [dict(run.series(name).points) for name in ("update/num_empty", "update/num_bad", "policy/num_overflows")]
    values = zip(series.steps, series.values, strict=True)
    reached = [value + sum(of.get(step, 0.0) for of in others) for step, value in values]
    step, taken = min(smooth(Series(series.steps, reached)), key=lambda p: p[1])
    return Finding(
        "warn" if taken < FEW_STEPS * planned else "ok",
        "update/num_steps",
        f"Updates reached {number(taken)} of {number(planned)} mini-batches before {' or '.join(asked)} ended them "
        f"(around update {step}); half of them or more is usual.",
        f"the policy moves too far on one batch: {advice.smaller_updates(run)}",
    )


def sequence_kl(run: Run) -> Finding | None:
    """Distance from the reference."""
    series = run.series("objective/kl")
    if not series:
        return None
    value, step = worst(series)
    limits = kl_limits(run)
    return Finding(
        limits.level(value),
        "objective/kl",
        f"The policy went up to {amount(value, 'nat')} per sequence away from its reference (around update {step}); "
        f"for answers of this length {limits.text()}.",
        f"{advice.steered_kl(run)}, stop earlier, and read the last answers: far from the reference, scores rise for "
        "the wrong reasons",
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
        f"The KL estimate was negative beyond noise (below {number(-limit)}) in {counted(len(low), 'update')}, "
        f"first at update {low[0]}.",
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
    limits = LIMITS["val/explained_variance"]
    level = limits.level(late)
    return Finding(
        "warn" if level == "act" and run.num_updates < 100 else level,  # a cold critic may need that many
        "val/explained_variance",
        f"{text}; {limits.text(percent)}.",
        advice.better_critic(run),
    )


def entropy(run: Run) -> Finding | None:
    """How much diversity the policy keeps."""
    series = run.series("policy/entropy_avg")
    early, late = series.early, series.late
    if not early or late is None:
        return None
    text = f"Entropy went from {number(early)} to {amount(late, 'nat')} per token"
    if len(series.finite) < MIN_UPDATES:
        return Finding("info", "policy/entropy_avg", f"{text}; {MIN_UPDATES} updates are needed to judge it.")
    planned = max(run.planned_updates or 0, run.num_updates)
    halved = next((step for step, value in smooth(series) if value < 0.5 * early), None)
    if late < 0.2 * early:
        return Finding(
            "act",
            "policy/entropy_avg",
            f"{text}: less than a fifth is left; the policy gives one answer.",
            f"{advice.stronger_tether(run)}, raise sampling.temperature, or stop earlier",
        )
    if late > 2 * early:
        return Finding(
            "act",
            "policy/entropy_avg",
            f"{text}: it more than doubled; the text may become incoherent.",
            "Lower train.learning_rate, and read the last answers.",
        )
    if halved is not None and halved <= 0.1 * planned:
        return Finding(
            "warn",
            "policy/entropy_avg",
            f"{text}, and had halved by update {halved}, within the first tenth of the run.",
            f"{advice.stronger_tether(run)}, or lower train.learning_rate",
        )
    return Finding("ok", "policy/entropy_avg", f"{text}; a slow fall is usual.")


def length(run: Run) -> Finding | None:
    """Whether answers become much longer or shorter."""
    series = run.series("rollout/length")
    early, late = run.at_start("eval_length", "rollout/length"), series.late
    if not early or late is None:
        return None
    text = f"Answers went from {number(early)} to {amount(late, 'token')}"
    if 0.5 <= late / early <= 2:
        return Finding("ok", "rollout/length", f"{text}; within half and twice the start policy's length is healthy.")
    explained = r_squared(run, "rollout/length", "objective/scores")
    longer = "The judge may reward length itself: fit its score on length, and add a brevity reward."
    return Finding(
        "act" if explained is not None and explained > 0.5 else "warn",
        "rollout/length",
        f"{text}, beyond half or twice the start policy's length"
        + (f"; over the updates length explains {percent(explained)} of the score." if explained is not None else "."),
        longer if late > early else advice.shorter_than_meant(run),
    )


def eos_rate(run: Run) -> Finding | None:
    """Whether answers end by themselves."""
    series = run.series("rollout/eos_rate")
    early, late = run.at_start("eval_eos_rate", "rollout/eos_rate"), series.late
    if early is None or late is None:
        return None
    if run.config and run.setting("sampling.stop_token") is None and not run.setting("sampling.stop_strings"):
        return Finding("info", "rollout/eos_rate", "sampling.stop_token is null: answers end only at the length limit.")
    text = f"{percent(late)} of the answers end by themselves, {percent(early)} at the start"
    # two standard errors of the share at the start, in a batch of this run's size
    noise = 2 * math.sqrt(max(early * (1 - early), 1e-4) / (run.count("train.rollout_batch_size") or 64))
    fell = late < early - noise
    if late < LOW_EOS_RATE:
        return Finding(
            "act" if fell else "warn",
            "rollout/eos_rate",
            f"{text}; below {percent(LOW_EOS_RATE)} most judges see cut text.",
            advice.missing_ends(run),
        )
    if fell:
        return Finding("warn", "rollout/eos_rate", f"{text}: the share falls.", advice.missing_ends(run))
    return Finding("ok", "rollout/eos_rate", f"{text}; {percent(LOW_EOS_RATE)} or more, and not falling, is healthy.")


def held_out(run: Run) -> Finding | None:
    """Whether improvement carries over to prompts that were not trained on."""
    points, judged = run.evaluated("eval_scores").points, run.judged("eval_scores")
    spread = next(iter(run.evaluated("eval_scores_std").finite), None)
    if judged is None:
        has_prompts = run.setting("data.eval_prompts") or run.setting("data.eval_fraction")
        return Finding(
            "info",
            "eval_scores",
            f"{'Only one evaluation' if points else 'No evaluation'}: it is unknown whether "
            "gains carry over to new prompts.",
            "" if points or has_prompts else "set data.eval_prompts",
        )
    if 0 < run.num_held_out < LEAST_PROMPTS:
        text = f"{counted(run.num_held_out, 'held-out prompt')} cannot tell a change of the score from noise"
        return Finding("info", "eval_scores", f"{text}.", f"Hold out at least {LEAST_PROMPTS}, better hundreds.")
    if not spread:
        return None
    gain, noise = (judged[1][1] - judged[0][1]) / spread, change_noise(run, pairs(run)) / spread
    best_step, best = max(points, key=lambda p: p[1])
    lost = (best - judged[1][1]) / spread
    train = score_change(run)
    text = f"The held-out score changed by {signed(gain)} standard deviations of the start policy"
    if gain < -noise:
        rising = train is not None and train > 0
        return Finding(
            "act",
            "eval_scores",
            f"{text}" + (" while the training score rose." if rising else "."),
            f"Stop earlier, {advice.stronger_tether(run)}, or average several judges.",
        )
    if lost > max(0.25, noise):
        return Finding(
            "warn",
            "eval_scores",
            f"{text}, and was {number(lost)} higher after update {best_step}.",
            advice.best_kept(run),
        )
    if gain <= noise:
        return Finding(
            "warn",
            "eval_scores",
            f"{text}: nothing that carries over was learned ({number(noise)} is noise).",
            f"Train longer, raise train.learning_rate{advice.weaker_tether(run)}.",
        )
    return Finding("ok", "eval_scores", f"{text}, and the policy is the best that was evaluated, or close to it.")


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
    return Finding(
        "warn" if ratio > GRADIENT_SPIKE else "ok",
        name,
        f"The largest gradient norm was {number(ratio)} times its median {number(median)} ({run.unit} {step}); up to "
        f"{number(GRADIENT_SPIKE)} times is stable.",
        "Harmless where train.max_grad_norm clips it; if it repeats, lower the learning rate.",
    )


def logprob_gap(run: Run) -> Finding | None:
    """Whether the generation engine and the trainer agree on the policy."""
    series = run.series("rollout/logprob_gap")
    cuts = run.setting("sampling.top_p") not in (None, 1.0) or run.setting("sampling.top_k") is not None
    if not series or (cuts and run.setting("sampling.vllm") is not None):  # what is cut off is part of that gap
        return None
    value, step = worst(series)
    keys = ("model.dtype", "train.bf16", "train.fp16", "model.quantization")
    settings = {key.split(".")[1]: run.setting(key) for key in keys}
    name = forward_type(**settings) if run.config else "bfloat16"
    return Finding(
        LOGPROB_GAP[name].level(value),
        "rollout/logprob_gap",
        f"The generation engine's log-probabilities differ from the trainer's by up to {number(value)} per token "
        f"(around update {step}); in {name} {LOGPROB_GAP[name].text()}.",
        "Check that both use the same weights, temperature and precision.",
    )


def one_token(run: Run) -> Finding | None:
    """Whether the policy writes anything but one token; any single update counts."""
    return _share(
        run,
        "rollout/top_token_share",
        "act",
        said="One token made up {share} of the answers of update {step}; above {limit} the policy has collapsed.",
        todo=f"Go back to an earlier checkpoint; {advice.stronger_tether(run)} or lower train.learning_rate.",
    )


def one_answer(run: Run) -> Finding | None:
    """Whether the policy has more than one answer to its prompts; any single update counts."""
    return _share(
        run,
        "rollout/top_answer_share",
        "warn",
        said="One answer made up {share} of the answers of update {step}; above {limit} the policy has collapsed, "
        "unless the prompts allow no other.",
        todo=f"Go back to an earlier checkpoint; {advice.steered_kl(run)}.",
    )


def _share(run: Run, metric: str, level: str, *, said: str, todo: str) -> Finding | None:
    """Judges the largest share in an update; None if answers have one token by design."""
    series = run.series(metric)
    if not series or run.setting("sampling.response_length") == 1:
        return None
    step, share = max(series.points, key=lambda p: p[1])
    text = said.format(share=percent(share), step=step, limit=percent(MOST_SHARE))
    return Finding(level if share > MOST_SHARE else "ok", metric, text, todo)


def left_out(run: Run) -> Finding | None:
    """Mini-batches that were skipped because something in them was not finite."""
    series = run.series("update/num_bad")
    bad = [(step, count) for step, count in series.points if count > 0]
    if not bad:
        return None
    return Finding(
        "warn",
        "update/num_bad",
        f"{counted(round(sum(count for _, count in bad)), 'mini-batch')} of {counted(len(bad), 'update')} "
        f"contained non-finite values, first in update {bad[0][0]}, and did not contribute to training.",
        f"their texts are in bad_batches.jsonl; lower train.learning_rate{advice.full_precision(run)}",
    )


def without_token(run: Run) -> Finding | None:
    """Mini-batches that were skipped because ``ppo.mask_truncated`` left none of their answers."""
    series, planned = run.series("update/num_empty"), _planned_steps(run)
    if not series or planned == 0:
        return None
    most, step = worst(series)
    return Finding(
        "warn" if most > 0 else "ok",
        "update/num_empty",
        f"Up to {percent(most / planned)} of an update's mini-batches did not contribute to training (around update "
        f"{step}), because none of their answers ended by itself; 0 % is usual.",
        "raise sampling.response_length, or set ppo.mask_truncated: false",
    )


def without_score(run: Run) -> Finding | None:
    """Answers that got no score from their source, but its ``missing``."""
    shares = [name for name in run.names() if name.startswith("rewards/") and is_missing_share(name)]
    names = [name for name in shares if run.series(name)]
    if not names:
        return None
    name = max(names, key=lambda n: worst(run.series(n))[0])
    share, step = worst(run.series(name))
    return Finding(
        "warn" if share > MUCH_MISSING else "ok",
        name,
        f"Up to {percent(share)} of the answers got no score from their source and count as its `missing` value "
        f"(around update {step}); up to {percent(MUCH_MISSING)} is usual.",
        "Read the answers without a score in samples.jsonl: the source should be able to score all that the "
        "policy writes.",
    )


def overflows(run: Run) -> Finding | None:
    """Optimizer steps lost to float16 overflow; a few are expected while the loss scale is found."""
    points = [point for name in ("policy", "value") for point in run.series(f"{name}/num_overflows").points]
    if not (found := [(step, count) for step, count in points if count > 0]):
        return None
    lost, taken = (round(sum(count for _, count in of)) for of in (found, run.series("update/num_steps").points))
    text = (
        f"{counted(lost, 'optimizer step')} skipped because scaled gradients were not finite in float16, the last in "
        f"update {max(step for step, _ in found)}; {counted(taken, 'mini-batch')} trained."
    )
    return Finding(
        "ok" if taken > 10 * lost else "warn" if taken else "act",
        "policy/num_overflows",
        text,
        "Longer runs find their scale. If this continues, set train.fp16: false, and train.bf16 if supported.",
    )


def same_scores(run: Run) -> Finding | None:
    """Whether the judges distinguish answers: advantages of answers with equal scores are nothing but noise."""
    name = "objective/scores_std"
    spreads = run.series(name)
    if not spreads or run.count("train.rollout_batch_size") == 1:
        return None
    first, count = _alike(run)
    steps = spreads.steps
    if count < min(STRETCH, len(steps)):
        text = f"The scores of one update have a standard deviation of {number(spreads.late)} over the last fifth."
        return Finding("ok", name, text)
    stretch = f"From update {steps[first]} to {steps[first + count - 1]}" if count > 1 else f"In update {steps[first]}"
    text = f"{stretch} all answers of an update had the same score: there was nothing to learn from."
    if count == len(steps):
        return Finding("act", name, text, f"The judge does not distinguish answers: {advice.judge_to_check(run)}")
    return Finding(
        "warn",
        name,
        text,
        "Read the answers of these updates: either the task is solved, and there is nothing more to learn, or the "
        "policy gives a single answer, or it never finds what the judge rewards.",
    )


def same_rewards(run: Run) -> Finding | None:
    """Judges that give every held-out answer the same score, in every evaluation."""
    prefix = "eval_rewards_std/"
    names = [name.removeprefix(prefix) for name in run.evaluated_names() if name.startswith(prefix)]
    names = [name for name in names if not is_missing_share(name)]
    if len({sample.row for sample in run.samples if sample.split == "eval"}) < 2:
        return None
    means = {name: dict(run.evaluated(f"eval_rewards/{name}").points) for name in names}
    flat = [
        name
        for name in names
        if (points := run.evaluated(f"{prefix}{name}").points)
        and all(scores_alike(means[name].get(step, 0.0), std) for step, std in points)
    ]
    if not flat:
        return None
    return Finding(
        "act" if len(flat) == len(names) else "info",
        "eval_rewards_std",
        f"In each evaluation all answers had the same reward by {', '.join(one_line(name, 40) for name in flat)}.",
        advice.judge_to_check(run, flat[0]),
    )


def moving_scale(run: Run) -> Finding | None:
    """Whether the score moves only because of its running normalization."""
    if run.setting("ppo.score_norm") != "running":
        return None
    names = [name for name in run.names() if name.startswith("rewards/") and not is_missing_share(name)]
    spreads = {name: next(iter(run.evaluated(f"eval_rewards_std/{name[8:]}").finite), None) for name in names}
    own = [change(run.series(name).finite, spreads[name]) for name in names]
    total = score_change(run)
    known = [gain for gain in own if gain is not None]
    if total is None or len(known) < max(1, len(own)):
        return None
    is_moved = abs(total) > 0.2 and all(abs(gain) < 0.1 for gain in known)
    return Finding(
        "warn" if is_moved else "ok",
        "moving scale",
        f"On the running scale of ppo.score_norm the score changed by {signed(total)} standard deviations, on the "
        f"judges' own scale by at most {number(max(map(abs, known)))}.",
        "compare by the judges' own scores (rewards/NAME), and set ppo.score_norm: frozen",
    )


# Patterns across several metrics


def no_signal(run: Run) -> Finding | None:
    """Score flat, KL near 0, nothing clipped."""
    kl, clipped = run.series("objective/kl").late, run.series("policy/clipfrac_avg").late
    gain = score_change(run)
    if kl is None or clipped is None or gain is None or _always_alike(run):
        return None
    if abs(gain) < 0.2 and abs(kl) < 0.05 and clipped < 1e-3:
        return Finding(
            "act",
            "no learning signal",
            f"The score is flat, KL is {number(kl)} and nothing is clipped.",
            "raise train.learning_rate",
        )
    return None


def noise_ascent(run: Run) -> Finding | None:
    """KL rises over the second half of the run, but the score does not."""
    kl, gain = run.series("objective/kl").finite, score_change(run, since=0.5)
    if gain is None or len(kl) < 2 * MIN_UPDATES:
        return None
    before, after = ends(kl[len(kl) // 2 :])
    if after - before < 1 or after < 1.25 * before or gain > 0.1:
        return None
    falls = gain < -0.2
    return Finding(
        "act" if falls else "warn",
        "over-optimization" if falls else "noise ascent",
        f"Over the second half KL rose from {number(before)} to {amount(after, 'nat')} while the score "
        f"{'fell' if falls else 'stayed flat'} ({signed(gain)} standard deviations).",
        f"Stop earlier or {advice.stronger_tether(run)}; {advice.less_noise(run)}.",
    )


def pattern_collapse(run: Run) -> Finding | None:
    """Score and KL rise while entropy vanishes: one answer for every prompt."""
    early, late = run.series("policy/entropy_avg").early, run.series("policy/entropy_avg").late
    kl, gain = run.series("objective/kl").late, score_change(run)
    if not early or late is None or kl is None or gain is None or run.num_updates < MIN_UPDATES:
        return None
    if gain > 0.2 and kl > kl_limits(run).warn and late < 0.3 * early:
        return Finding(
            "act",
            "pattern collapse",
            f"The score rose, but KL is {amount(kl, 'nat')} and only "
            f"{percent(late / early)} of the entropy is left: answers may be all alike.",
            f"{advice.stronger_tether(run)}, stop earlier, and compare the answers below",
        )
    return None


def cold_critic(run: Run) -> Finding | None:
    """An early dip of the score that was recovered."""
    scores, spread = run.series("objective/scores"), run.score_spread
    if len(scores.finite) < 2 * MIN_UPDATES or not spread or advice.critic_kind(run) is None:
        return None
    early, third = scores.early, smooth(scores)[: len(scores.finite) // 3]
    step, low = min(third, key=lambda p: p[1])
    if early is not None and low < early - 0.3 * spread and (scores.late or low) >= early:
        return Finding(
            "warn",
            "early dip",
            f"The score fell by {number((early - low) / spread)} standard deviations by "
            f"update {step} before it recovered: the critic was cold.",
            advice.warm_critic(run),
        )
    return None


def saturated(run: Run) -> Finding | None:
    """The critic predicts well, yet the score does not move."""
    explained, gain = run.series("val/explained_variance").late, score_change(run)
    if explained is None or gain is None or explained < 0.5 or abs(gain) > 0.1:
        return None
    return Finding(
        "warn",
        "saturated",
        f"The critic explains {percent(explained)} of the returns, but the score does not move.",
        "Raise train.learning_rate, or use harder prompts: all answers may score alike.",
    )


RULES: tuple[Callable[[Run], Finding | None], ...] = (
    held_out, same_scores, same_rewards, sequence_kl, negative_kl, eos_rate, length, entropy, approx_kl, clip_fraction,
    dual_clip, few_steps, explained_variance, value_clip, first_ratio, ratio_spread, gradient_norm, logprob_gap,
    one_token, one_answer, without_score, left_out, without_token, overflows, not_finite, no_signal, noise_ascent,
    pattern_collapse, cold_critic, saturated, moving_scale,
)  # fmt: skip
"""Every rule, in display order within a level."""
STAGE_RULES = (gradient_norm, not_finite)
"""The rules for a run of a stage before PPO."""


# Parts of rules


def _planned_steps(run: Run) -> float:
    """Mini-batches of all epochs of an update; 0 where the configuration does not say."""
    return (run.count("ppo.num_ppo_epochs") or 0) * (run.count("ppo.num_mini_batches") or 0)


def _worst_of(run: Run, name: str, text: str, todo: str, *, show: Callable[[float], str] = number) -> Finding | None:
    """Judges the worst stretch of a metric by its limits; ``text`` has a placeholder ``{value}``."""
    series = run.series(name)
    if not series:
        return None
    value, step = worst(series)
    limits, said = LIMITS[name], text.format(value=show(value))
    return Finding(limits.level(value), name, f"{said} (around update {step}); {limits.text(show)}.", todo)


def _alike(run: Run) -> tuple[int, int]:
    """Start and length of the longest stretch of updates in each of which all answers got the same score."""
    spreads, means = run.series("objective/scores_std"), dict(run.series("objective/scores").points)
    pairs = zip(spreads.steps, spreads.values, strict=True)
    return longest_stretch([scores_alike(means.get(step, 0.0), std) for step, std in pairs])


def _always_alike(run: Run) -> bool:
    """Whether that holds for all updates, though answers could differ."""
    start, count = _alike(run)
    return count > 0 and start == 0 and count == len(run.updates) and run.count("train.rollout_batch_size") != 1
