"""Advice in terms of keys that the run's own configuration accepts."""

from __future__ import annotations

from typing import Any

from tether.config.schema import COPIED
from tether.report.read import Run


def critic_kind(run: Run) -> str | None:
    """``head``, ``adapter`` or ``model``; None if advantages need no critic."""
    if run.setting("ppo.advantage_estimator") not in (None, "gae"):
        return None
    return run.setting("value.kind") or ("model" if run.setting("model.lora") is None else "adapter")


def smaller_updates(run: Run) -> str:
    """Advice on making updates smaller."""
    epochs = run.count("ppo.num_ppo_epochs")
    return "halve train.learning_rate" + ("" if epochs == 1 else ", or lower ppo.num_ppo_epochs")


def stronger_tether(run: Run) -> str:
    """Advice on keeping the policy closer to its reference."""
    return "lower ppo.kl_target" if run.setting("ppo.kl_target") is not None else "raise ppo.kl_coef"


def weaker_tether(run: Run) -> str:
    """Advice on letting the policy move further from its reference, as an additional way; empty if nothing holds it."""
    if run.setting("ppo.kl_target") is not None:
        return " or raise ppo.kl_target"
    return "" if run.count("ppo.kl_coef") == 0 else " or lower ppo.kl_coef"


def steered_kl(run: Run) -> str:
    """The same, with a KL target as another way if there is none."""
    can_be_set = run.setting("ppo.kl_target") is None and run.count("ppo.kl_coef") != 0
    return stronger_tether(run) + (" or set ppo.kl_target" if can_be_set else "")


def warm_critic(run: Run) -> str:
    """Advice on warming up the critic before the policy learns from it; empty where all of it was done."""
    ways, steps = [], min(50, (run.planned_updates or run.num_updates) // 5)
    if steps > (run.count("value.warmup_steps") or 0):
        ways.append(f"let the critic warm up (value.warmup_steps: {steps})")
    if _can_start_from_reward(run):
        ways.append("start it from the reward model (value.init: reward)")
    return ", or ".join(ways)


def better_critic(run: Run) -> str:
    """Advice on improving the critic."""
    faster = "raise ppo.vf_coef" if critic_kind(run) == "head" else "raise value.learning_rate"
    ways = [way for way in (faster, warm_critic(run), value_clip(run)) if way]
    return ", and ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)


def value_clip(run: Run) -> str:
    """Advice on letting the critic move as far as the scores require; empty where nothing is clipped."""
    ppo = run.setting("ppo")
    if isinstance(ppo, dict) and "cliprange_value" in ppo and ppo["cliprange_value"] is None:
        return ""
    return "check that ppo.cliprange_value suits the scale of the scores, or set it to null"


def best_kept(run: Run) -> str:
    """Advice on keeping the best policy instead of the last."""
    if not run.setting("train.load_best_model_at_end"):
        return "keep the best checkpoint: train.metric_for_best_model: eval_scores, train.load_best_model_at_end: true"
    if run.finished_step is None:
        return ""  # it will be kept, at the end
    metric = run.setting("train.metric_for_best_model")
    if metric == "eval_scores":
        return "see the run's log for why the best checkpoint could not be put in place"
    return f"the best by {metric} was kept; train.metric_for_best_model: eval_scores keeps the best by the judge"


def less_noise(run: Run) -> str:
    """Advice on making advantages less noisy."""
    if critic_kind(run) is not None:
        return "a larger train.rollout_batch_size or a better critic reduces noise"
    if run.setting("ppo.advantage_estimator") in ("rloo", "grpo"):
        return "a larger train.rollout_batch_size, or more answers per prompt (sampling.num_generations), reduces noise"
    return "a larger train.rollout_batch_size reduces noise"


def missing_ends(run: Run) -> str:
    """Advice on making answers end by themselves."""
    if run.setting("ppo.missing_eos_score") is not None:
        rule = "lower ppo.missing_eos_score"
    elif run.setting("ppo.missing_eos_penalty") is not None:
        rule = "raise ppo.missing_eos_penalty"
    else:
        rule = "set ppo.missing_eos_penalty (or ppo.missing_eos_score)"
    return f"{rule}, and check that sampling.response_length leaves room"


def shorter_than_meant(run: Run) -> str:
    """Why answers may become short."""
    causes = []
    if run.count("ppo.gamma") not in (None, 1):
        causes.append(f"the discount of ppo.gamma {run.count('ppo.gamma'):g} shortens answers: set it to 1")
    if run.setting("ppo.whiten_rewards"):
        causes.append("so does ppo.whiten_rewards: set it to false" if causes else "set ppo.whiten_rewards: false")
    return "; ".join([*causes, "check whether the judge rewards brevity itself"])


def full_precision(run: Run) -> str:
    """Advice on running forwards in the weights' own dtype, as an additional way; empty if they do already."""
    on = [key for key in ("train.bf16", "train.fp16") if run.setting(key)]
    return f", or set {on[0]}: false" if on else ""


def judge_to_check(run: Run, name: str | None = None) -> str:
    """What may be wrong with a judge that does not distinguish answers.

    Args:
        name: name of a source; None for all of them.
    """
    every = _sources(run.setting("rewards"))
    sources = [source for own, source in every if name is None or f"{own}/".startswith(f"{name}/")]
    causes = {
        "regex": "its pattern",
        "exact_match": "its column, and what it contains besides the answer",
        "math_match": "its column, and what it contains besides the answer",
        "function": "what the function reads and returns",
    }
    found = dict.fromkeys(causes.get(str(source.get("type")), "what it receives and returns") for source in sources)
    what = " or ".join(found) or "its pattern or column"
    return (
        f"check {what}, and read answers and scores in samples.jsonl. If they are right, the prompts are too hard or "
        "too easy for this policy: use others"
    )


def _can_start_from_reward(run: Run) -> bool:
    """Whether the critic could be copied from the first reward but was not: that is the default of ``value.init``."""
    kind, rewards = critic_kind(run), run.setting("rewards")
    first = rewards[0].get("type") if isinstance(rewards, list) and rewards and isinstance(rewards[0], dict) else None
    return first in COPIED.get(str(kind), ()) and run.setting("value.init") not in (None, "reward")


def _sources(rewards: Any, prefix: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Name in the metrics and configuration section of every reward source; ensembles are replaced by their members."""
    found = []
    for i, source in enumerate(rewards if isinstance(rewards, list) else ()):
        if isinstance(source, dict):
            kind = source.get("type")
            name = f"{prefix}{source.get('name') or (kind if len(rewards) == 1 else f'{kind}_{i}')}"
            found += _sources(source.get("members"), f"{name}/") if kind == "ensemble" else [(name, source)]
    return found
