"""Evaluates a run's saved policy on prompts with the run's own reward sources: ``tether evaluate``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.algo import ScoreMoments
from tether.config.chat import check_columns
from tether.config.rewards import measured_norms
from tether.config.schema import RunConfig
from tether.data.bad_rows import Limit
from tether.data.prompts import PromptData, load_prompts
from tether.data.queries import PROMPTS_OPTION, QueryFormat
from tether.data.sources import check_source
from tether.data.splits import whole_splits
from tether.errors import ConfigError
from tether.inference.options import named_source
from tether.inference.output import check_outputs, kept, write_metrics
from tether.inference.saved import run_config
from tether.machine.distributed import Dist
from tether.models.fit import check_positions
from tether.models.loading import load_config as load_shape
from tether.models.paths import check_model_path, own_weights
from tether.models.saving import load_policy
from tether.models.tokenizer import load_tokenizer
from tether.rewards.build import check_rewards, try_sources
from tether.rewards.norms import normalised
from tether.train.build import build_parts
from tether.train.display import Display, NullDisplay
from tether.train.evaluate import evaluate
from tether.train.inputs import OF_SCRIPT, RunData, check_judged, first_answer, load_prompt_sets, resolved
from tether.train.norms import read_norms


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a policy on prompts."""

    metrics: dict[str, float]
    """``eval_scores`` and other metrics, as in metrics.jsonl."""
    samples: list[dict[str, Any]]
    """Every prompt with its answer, as in samples.jsonl."""


def evaluate_path(
    run: str | Path,
    prompts: str | Path | None = None,
    *,
    split: str | None = None,
    subset: str | None = None,
    columns: dict[str, str] | None = None,
    output: str | Path | None = None,
    metrics: str | Path | None = None,
    display: Display | None = None,
) -> Evaluation:
    """Answers prompts with the policy that a run saved in ``run`` and scores the answers with the run's reward sources.

    If it is interrupted or fails, answers that are finished by then are still written to ``output``, with scores and
    KL as far as they are known.

    Args:
        run: the run's output folder, or a checkpoint in it.
        prompts: prompts to answer; the run's held-out prompts if omitted.
        split, subset: split and subset to read if ``prompts`` has several; by default the split that the run's
            held-out prompts are from.
        columns: the file's column names by ours, as ``data.columns``; default: the run's, as far as the file has them.
        output: file for the samples, in the format of samples.jsonl.
        metrics: JSON file for the metrics, with the run, the prompts (null: the run's held-out ones) and the settings.

    Raises:
        ConfigError: ``run`` belongs to no run, there are no prompts, the reward sources cannot score them, or
            ``output`` or ``metrics`` exists or cannot be written.
        DataError, ModelError: data or models that the run needs no longer exist.
    """
    run, display = Path(run), display or NullDisplay()
    prompts = None if prompts is None else str(prompts)
    asked = _config(run)
    check_columns(columns)
    _check_prompts(run, asked, prompts, split=split, subset=subset, columns=columns)
    check_model_path(str(run), str(run))
    output, metrics = check_outputs(output, metrics)
    check_rewards(asked.rewards)
    config = _reduced(resolved(asked))
    has_norms = config.ppo.score_norm is not None or measured_norms(config.rewards)
    moments, sources = read_norms(run) if has_norms else (ScoreMoments(), {})
    tokenizer = load_tokenizer(str(run), trust_remote_code=config.model.trust_remote_code)
    data = _prompts(config, tokenizer, prompts, split, subset, columns)
    if data.num_too_long or data.num_bad:
        display.message(f"prompts: {data.note}")
    _check_lengths(run, config, data)
    for note in check_judged(config, [data], tokenizer):
        display.message(f"warning: {note}")
    run_data = RunData(tokenizer, data, data, None)
    try_sources(config.rewards, config.reward_names, first_answer(run_data), tokenizer)
    display.phase("loading models", 0, 1)
    parts = build_parts(config, run_data, None, Dist())
    parts = replace(parts, rewards=normalised(parts.rewards, sources))
    load_policy(parts.roles, run, trust_remote_code=config.model.trust_remote_code)
    rows: list[dict[str, Any]] = []
    with kept(output, lambda: [row for row in rows if row], display):
        numbers, samples, _ = evaluate(parts, config, moments, phase=display.phase, check=lambda: None, rows=rows)
    if metrics is not None:
        write_metrics(
            metrics,
            "evaluate",
            asked,
            run=str(run),
            prompts=prompts,
            split=split,
            subset=subset,
            columns=columns,
            num_prompts=len(samples),
            seed=asked.train.seed,
            metrics=numbers,
        )
    return Evaluation(numbers, samples)


def _config(run: Path) -> RunConfig:
    """The configuration of the run in a folder.

    Raises:
        ConfigError: there is none whose reward sources could be used here.
    """
    config = run_config(run)
    if config is None:
        raise ConfigError(
            f"{run} is neither the folder of a run of `tether ppo`, which has rewards, nor a checkpoint in one"
        )
    if config.data.prompts == OF_SCRIPT and not Path(OF_SCRIPT).exists():
        raise ConfigError(
            f"{run}: its run was started by a script that uses tether.compat.trl, with prompts and rewards that only "
            "the script has; evaluate it there with PPOTrainer.evaluate()"
        )
    return config


def _check_prompts(run: Path, config: RunConfig, prompts: str | None, **how: Any) -> None:
    """Raises ``ConfigError`` or ``DataError`` if there are no prompts to answer, without reading any.

    Args:
        how: values of the options that say how ``prompts`` are read; None where they were left out.
    """
    if prompts is not None:
        check_source(prompts, PROMPTS_OPTION)
    elif any(value is not None for value in how.values()):
        *first, last = (f"--{name}" for name in how)
        raise ConfigError(
            f"{', '.join(first)} and {last} say how --prompts are read, which is missing: add it, or leave them out"
        )
    elif not config.data.has_eval:
        raise ConfigError(f"{run}: its run has no held-out prompts; name a file with --prompts")


def _reduced(config: RunConfig) -> RunConfig:
    """The configuration with the smallest critic, as an evaluation uses none, and with answers by the policy itself,
    for which no engine has to start."""
    smallest = {
        "value": config.value.model_copy(update={"kind": "head", "init": None}),
        "sampling": config.sampling.model_copy(update={"vllm": None}),
    }
    return config.model_copy(update=smallest)


def _prompts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | None,
    split: str | None,
    subset: str | None,
    columns: dict[str, str] | None,
) -> PromptData:
    """The prompts to answer: those that are named, or the run's held-out ones."""
    if prompts is None:
        return load_prompt_sets(config, tokenizer)[1]
    data = config.data
    split = split or whole_splits(data.eval_split)  # held-out parts only exist in the run's own prompts
    named = {"columns": columns, "of_run": data.columns}
    source = named_source(prompts, PROMPTS_OPTION, split=split, subset=subset, **named)
    limit = Limit(data.max_prompt_length, "the run's data.max_prompt_length")
    return load_prompts(source, QueryFormat(tokenizer, **data.chat), limit)


def _check_lengths(run: Path, config: RunConfig, data: PromptData) -> None:
    """Raises ``ConfigError`` if a prompt with its answer exceeds the policy's positions."""
    base, revision = own_weights(str(run))
    shape = load_shape(base, revision=revision, trust_remote_code=config.model.trust_remote_code)
    words = {"key": "the run's sampling.response_length", "way_out": "remove longer prompts"}
    check_positions(shape, data.longest_query, config.sampling.response_length, **words)
