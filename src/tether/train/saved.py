"""What runs and models saved, at work: ``tether evaluate`` and ``tether generate``."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tether.algo import ScoreMoments
from tether.config import text
from tether.config.chat import ChatKeys
from tether.config.load import load_config, read_file
from tether.config.rewards import measured_norms
from tether.config.schema import RunConfig
from tether.data.prompts import load_prompts
from tether.data.sources import check_source
from tether.errors import ConfigError
from tether.generation.hf import HFGenerator
from tether.machine.distributed import Dist
from tether.metrics.writers import JsonlWriter
from tether.models.loading import load_causal_lm, load_tokenizer, stop_token_ids
from tether.models.paths import check_model_path
from tether.models.saving import load_policy
from tether.rewards.build import try_sources
from tether.rewards.norms import normalised
from tether.train.display import Display, NullDisplay
from tether.train.evaluate import evaluate
from tether.train.inputs import RunData, first_answer, load_prompt_sets, resolved
from tether.train.run import CONFIG, OF_SCRIPT, SCORE_NORM, build_parts, sampling_of
from tether.types import Request, Sampling, noise_key


@dataclass(frozen=True)
class Evaluation:
    """A policy judged on prompts."""

    metrics: dict[str, float]
    """``eval_scores`` and the rest, as in metrics.jsonl."""
    samples: list[dict[str, Any]]
    """Every prompt with its answer, as in samples.jsonl."""


def _is_of_ppo(file: Path) -> bool:
    """Whether a run's configuration is of ``tether ppo``, and not of a stage before it, which has no rewards."""
    try:
        data = text.parse(read_file(file)).data
    except text.TextError:
        return True  # the reader of configurations says what is wrong with it
    return not isinstance(data, dict) or "rewards" in data


def run_config(path: Path) -> RunConfig | None:
    """The configuration of the PPO run that a policy is of, at its root or in a checkpoint in it; None if of none."""
    for folder in (path, path.parent):
        if (folder / CONFIG).is_file():
            return load_config(folder / CONFIG) if _is_of_ppo(folder / CONFIG) else None
    return None


def read_norms(run: Path) -> tuple[ScoreMoments, dict[str, ScoreMoments]]:
    """What the run's scores were normalised by, and by name those of sources with ``norm: auto``.

    Raises:
        ConfigError: the run has not measured it yet.
    """
    path = next((folder / SCORE_NORM for folder in (run, run.parent) if (folder / SCORE_NORM).is_file()), None)
    if path is None:
        raise ConfigError(f"{run}: no {SCORE_NORM} beside its {CONFIG}; it is written when the run ends or is stopped")
    record = json.loads(path.read_text(encoding="utf-8"))
    sources = {name: ScoreMoments(**moments) for name, moments in record.pop("sources", {}).items()}
    return ScoreMoments(**record), sources


def evaluate_path(
    run: Path,
    prompts: str | None = None,
    *,
    output: Path | None = None,
    display: Display | None = None,
) -> Evaluation:
    """Answers prompts with the policy that a run saved in ``run`` and scores them by the run's own reward sources.

    Args:
        run: the run's output folder, or a checkpoint in it.
        prompts: prompts to answer; the run's held-out prompts if left out.
        output: file for the rows of samples.jsonl.

    Raises:
        ConfigError: ``run`` belongs to no run, there are no prompts, or ``output`` exists.
        DataError, ModelError: what the run needs is not there any more.
    """
    display = display or NullDisplay()
    config = run_config(run)
    if config is None:
        raise ConfigError(f"{run}: neither it nor the folder it is in holds a run of `tether ppo`, which has rewards")
    if config.data.prompts == OF_SCRIPT and not Path(OF_SCRIPT).exists():
        raise ConfigError(
            f"{run}: its run was made by a script on tether.compat.trl, with prompts and rewards that only the script "
            "has; evaluate there, by PPOTrainer.evaluate()"
        )
    if prompts is not None:
        check_source(prompts, "--prompts")
    elif not config.data.has_eval:
        raise ConfigError(f"{run}: its run has no held-out prompts; name a file with --prompts")
    check_model_path(str(run), str(run))
    check_output(output)
    # The trained policy brings its own weights; the critic is not asked.
    config = resolved(config)
    config = config.model_copy(update={"value": config.value.model_copy(update={"kind": "head", "init": None})})
    has_norms = config.ppo.score_norm is not None or measured_norms(config.rewards)
    moments, sources = read_norms(run) if has_norms else (ScoreMoments(), {})
    tokenizer = load_tokenizer(str(run), trust_remote_code=config.model.trust_remote_code)
    if prompts is None:
        _, data = load_prompt_sets(config, tokenizer)
    else:
        length = config.data.max_prompt_length
        options = {"split": config.data.eval_split, "max_prompt_length": length, "key": "--prompts"}
        options["special_tokens"] = config.data.special_tokens
        data = load_prompts(prompts, tokenizer, **options, **config.data.chat)
    run_data = RunData(tokenizer, data, data, None)
    try_sources(config.rewards, config.reward_names, first_answer(run_data), tokenizer)
    display.phase("loading models", 0, 1)
    parts = build_parts(config, run_data, None, Dist())
    parts = replace(parts, rewards=normalised(parts.rewards, sources))
    load_policy(parts.roles, run)
    metrics, samples = evaluate(parts, config, moments, phase=display.phase, check=lambda: None)
    if output is not None:
        JsonlWriter(output).write_all(samples)
    return Evaluation(metrics, samples)


@torch.no_grad()
def generate_path(
    model: str,
    prompts: str,
    *,
    output: Path | None = None,
    response_length: int | None = None,
    temperature: float | None = None,
    seed: int = 42,
    display: Display | None = None,
) -> list[dict[str, Any]]:
    """Answers prompts with a model, an adapter, or the policy that a run saved, sampled as its run did.

    Args:
        model: folder or hub id.
        prompts: prompts to answer.
        output: JSONL file for the answers.
        response_length: most tokens of an answer; the run's, or 256.
        temperature: 0 takes the most likely token; the run's, or 1.

    Returns:
        A row for each prompt, in order: its number, ``prompt``, ``response`` and ``finish_reason``.

    Raises:
        ConfigError: ``output`` exists.
        DataError, ModelError: prompts or model are not usable.
    """
    display = display or NullDisplay()
    check_model_path(model, "model", takes_gguf=True)
    check_source(prompts, "--prompts")
    check_output(output)
    run = run_config(Path(model))
    code = {"trust_remote_code": run.model.trust_remote_code} if run else {}
    tokenizer = load_tokenizer(model, **code)
    data = load_prompts(
        prompts,
        tokenizer,
        split="train",
        max_prompt_length=run.data.max_prompt_length if run else 2048,
        special_tokens=run.data.special_tokens if run else False,
        key="--prompts",
        **(run.data.chat if run else ChatKeys().chat),
    )
    display.phase("loading the model", 0, 1)
    device = Dist().device
    policy = load_causal_lm(model, dtype=None, **code).to(device)
    stops = stop_token_ids(tokenizer, policy.generation_config, run.sampling.stop_token if run else "eos")
    sampling = sampling_of(run.sampling, stops) if run else Sampling(256, 1.0, stops)
    asked = {"max_new_tokens": response_length, "temperature": temperature}
    sampling = replace(sampling, **{name: value for name, value in asked.items() if value is not None})
    generator = HFGenerator(lambda: nullcontext(policy), batch_size=16, device=device)
    requests = [Request(p.token_ids, noise_key(seed, "generate", p.row, 0)) for p in data.prompts]
    rows: list[dict[str, Any]] = [{} for _ in requests]
    display.phase("answers", 0, len(rows))
    for done, (i, answer) in enumerate(generator.generate(requests, sampling), start=1):
        rows[i] = {
            "row": data.prompts[i].row,
            "prompt": data.prompts[i].source,
            "response": tokenizer.decode(answer.token_ids, skip_special_tokens=True),
            "finish_reason": answer.finish_reason,
        }
        display.phase("answers", done, len(rows))
    if output is not None:
        JsonlWriter(output).write_all(rows)
    return rows


def check_output(output: Path | None) -> None:
    """Raises ``ConfigError`` if the file is there already, so that nothing is written over."""
    if output is not None and output.exists():
        raise ConfigError(f"--output: {output} exists; name a new file")
