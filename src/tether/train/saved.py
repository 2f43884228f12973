"""What runs and models saved, at work: ``tether evaluate`` and ``tether generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from tether.algo import ScoreMoments
from tether.config import text
from tether.config.chat import ChatKeys
from tether.config.load import load_config, read_file
from tether.config.rewards import measured_norms
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftStageConfig
from tether.data.prompts import PromptData, load_prompts
from tether.data.sources import check_source
from tether.data.splits import whole_splits
from tether.errors import ConfigError
from tether.generation.hf import HFGenerator
from tether.machine.distributed import Dist
from tether.metrics.writers import JsonlWriter
from tether.models.bitsandbytes import placed
from tether.models.checkpoints import run_folders
from tether.models.fit import check_positions, steady_positions, steady_positions_told
from tether.models.loading import load_causal_lm
from tether.models.loading import load_config as load_shape
from tether.models.paths import check_model_path, own_weights
from tether.models.saving import check_can_be_made, load_policy
from tether.models.tokenizer import load_tokenizer, stop_token_ids
from tether.rewards.build import check_rewards, try_sources
from tether.rewards.norms import normalised
from tether.train.build import build_parts, sampling_of
from tether.train.display import Display, NullDisplay
from tether.train.evaluate import evaluate
from tether.train.folder import CONFIG
from tether.train.inputs import OF_SCRIPT, RunData, check_judged, first_answer, load_prompt_sets, resolved
from tether.train.norms import read_norms
from tether.types import Request, Sampling, noise_key


@dataclass(frozen=True)
class Evaluation:
    """A policy judged on prompts."""

    metrics: dict[str, float]
    """``eval_scores`` and the rest, as in metrics.jsonl."""
    samples: list[dict[str, Any]]
    """Every prompt with its answer, as in samples.jsonl."""


def _section(file: Path) -> type[RunConfig] | type[SftStageConfig] | None:
    """The class of a file called config.yaml, by its keys; None if it is of nothing that makes policies."""
    try:
        data = text.parse(read_file(file)).data
    except text.TextError:
        return RunConfig  # the reader of configurations says what is wrong with it
    if not isinstance(data, dict) or "rewards" in data:
        return RunConfig
    read = data.get("data")
    return SftStageConfig if isinstance(read, dict) and "demonstrations" in read else None


def run_config(path: Path) -> RunConfig | None:
    """The configuration of the PPO run that a policy is of, at its root or in a checkpoint in it; None if of none."""
    config = policy_config(path)
    return config if isinstance(config, RunConfig) else None


def policy_config(path: Path) -> RunConfig | SftStageConfig | None:
    """The configuration of the run of PPO or SFT that a policy is of, at its root or in a checkpoint in it."""
    file = next((folder / CONFIG for folder in run_folders(path) if (folder / CONFIG).is_file()), None)
    section = None if file is None else _section(file)
    return None if section is None else load_config(file, section=section)


def evaluate_path(
    run: str | Path,
    prompts: str | Path | None = None,
    *,
    output: str | Path | None = None,
    display: Display | None = None,
) -> Evaluation:
    """Answers prompts with the policy that a run saved in ``run`` and scores them by the run's own reward sources.

    Args:
        run: the run's output folder, or a checkpoint in it.
        prompts: prompts to answer; the run's held-out prompts if left out.
        output: file for the rows of samples.jsonl.

    Raises:
        ConfigError: ``run`` belongs to no run, there are no prompts, the reward sources cannot judge these, or
            ``output`` exists or cannot be written.
        DataError, ModelError: what the run needs is not there any more.
    """
    run, output, display = Path(run), _file(output), display or NullDisplay()
    config = run_config(run)
    if config is None:
        raise ConfigError(
            f"{run} is neither the folder of a run of `tether ppo`, which has rewards, nor a checkpoint in one"
        )
    if config.data.prompts == OF_SCRIPT and not Path(OF_SCRIPT).exists():
        raise ConfigError(
            f"{run}: its run was made by a script on tether.compat.trl, with prompts and rewards that only the script "
            "has; evaluate there, by PPOTrainer.evaluate()"
        )
    if prompts is not None:
        prompts = str(prompts)
        check_source(prompts, "--prompts")
    elif not config.data.has_eval:
        raise ConfigError(f"{run}: its run has no held-out prompts; name a file with --prompts")
    check_model_path(str(run), str(run))
    check_output(output)
    check_rewards(config.rewards)
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
        # parts that are held out are parts of the run's own prompts
        options = {"split": whole_splits(config.data.eval_split), "max_prompt_length": length, "key": "--prompts"}
        options["columns"] = config.data.columns
        data = load_prompts(prompts, tokenizer, **options, **config.data.chat)
    if data.num_too_long:
        display.message(f"prompts: {data.note}")
    base, revision = own_weights(str(run))
    shape = load_shape(base, revision=revision, trust_remote_code=config.model.trust_remote_code)
    words = {"key": "the run's sampling.response_length", "way_out": "leave longer prompts out"}
    check_positions(shape, _longest(data), config.sampling.response_length, **words)
    for note in check_judged(config, [data], tokenizer):
        display.message(f"warning: {note}")
    run_data = RunData(tokenizer, data, data, None)
    try_sources(config.rewards, config.reward_names, first_answer(run_data), tokenizer)
    display.phase("loading models", 0, 1)
    parts = build_parts(config, run_data, None, Dist())
    parts = replace(parts, rewards=normalised(parts.rewards, sources))
    load_policy(parts.roles, run, trust_remote_code=config.model.trust_remote_code)
    metrics, samples = evaluate(parts, config, moments, phase=display.phase, check=lambda: None)
    if output is not None:
        JsonlWriter(output).write_all(samples)
    return Evaluation(metrics, samples)


@torch.no_grad()
def generate_path(
    model: str | Path,
    prompts: str | Path,
    *,
    output: str | Path | None = None,
    response_length: int | None = None,
    max_prompt_length: int | None = None,
    temperature: float | None = None,
    system: str | None = None,
    seed: int = 42,
    trust_remote_code: bool = False,
    display: Display | None = None,
) -> list[dict[str, Any]]:
    """Answers prompts with a model, an adapter, or the policy that a run saved, sampled as its run did.

    Answers that are there when it is interrupted, or fails, are in ``output`` all the same.

    Args:
        model: folder or hub id.
        prompts: prompts to answer.
        output: JSONL file for the answers.
        response_length: most tokens of an answer; the run's, or 256.
        max_prompt_length: tokens of the longest query that is answered; the run's, or what the model's positions leave
            beside an answer, 2048 at most.
        temperature: 0 takes the most likely token; the run's, or 1.
        system: system prompt; the run's if None, none if empty.
        trust_remote_code: whether code that comes with the model is run, whatever a configuration beside it says.

    Returns:
        A row for each prompt, in order: its number, ``prompt``, ``response`` and ``finish_reason``.

    Raises:
        ConfigError: ``output`` exists or cannot be written, or prompts and answers do not fit into the model's
            positions.
        DataError, ModelError: prompts or model are not usable.
    """
    model, prompts, output, display = str(model), str(prompts), _file(output), display or NullDisplay()
    check_model_path(model, "model", takes_gguf=True)
    check_source(prompts, "--prompts")
    check_output(output)
    config = policy_config(Path(model))
    run = config if isinstance(config, RunConfig) else None
    code = {"trust_remote_code": trust_remote_code}
    chat = chat_keys(config) if system is None else chat_keys(config) | {"system_prompt": system or None}
    tokenizer = load_tokenizer(model, **code)
    base, revision = own_weights(model)
    shape = load_shape(base, revision=revision, **code)
    longest_answer = response_length or (run.sampling.response_length if run else 256)
    data = load_prompts(
        prompts,
        tokenizer,
        split="train",
        max_prompt_length=max_prompt_length
        or (run.data.max_prompt_length if run else _room_for_prompts(shape, longest_answer)),
        key="--prompts",
        columns=config.data.columns if config else None,
        **chat,
    )
    if data.num_too_long:
        display.message(f"prompts: {data.note}")
    words = {"key": "--response_length", "way_out": "lower it, or --max_prompt_length"}
    check_positions(shape, _longest(data), longest_answer, **words)
    display.phase("loading the model", 0, 1)
    device = Dist().device
    policy = load_causal_lm(model, dtype=None, device=device, **code)
    placed(policy, device)
    stops = stop_token_ids(tokenizer, policy.generation_config, run.sampling.stop_token if run else "eos")
    sampling = sampling_of(run.sampling, stops) if run else Sampling(256, 1.0, stops)
    sampling = replace(sampling, max_new_tokens=longest_answer)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    generator = HFGenerator(lambda: nullcontext(policy), batch_size=16, device=device)
    requests = [Request(p.token_ids, noise_key(seed, "generate", p.row, 0)) for p in data.prompts]
    rows: list[dict[str, Any]] = [{} for _ in requests]
    display.phase("answers", 0, len(rows))
    with kept(output, lambda: [row for row in rows if row], display):
        for done, (i, answer) in enumerate(generator.generate(requests, sampling), start=1):
            rows[i] = {
                "row": data.prompts[i].row,
                "prompt": data.prompts[i].source,
                "response": tokenizer.decode(answer.token_ids, skip_special_tokens=True),
                "finish_reason": answer.finish_reason,
            }
            display.phase("answers", done, len(rows))
    return rows


def chat_keys(config: RunConfig | SftStageConfig | None) -> dict[str, Any]:
    """How conversations become text for a policy of this run; as by default for one of none."""
    return ChatKeys().chat if config is None else config.data.chat


def _file(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _longest(data: PromptData) -> int:
    """Tokens of the longest query."""
    return max(len(prompt.token_ids) for prompt in data.prompts)


def _room_for_prompts(shape: PreTrainedConfig, longest_answer: int) -> int:
    """Tokens of the longest query that a model of no run is given."""
    limit = steady_positions(shape)
    if limit is not None and limit <= longest_answer:
        raise ConfigError(
            f"--response_length {longest_answer} leaves no positions for prompts, the model has "
            f"{steady_positions_told(shape)}: lower it"
        )
    return 2048 if limit is None else min(2048, limit - longest_answer)


@contextmanager
def kept(output: Path | None, rows: Callable[[], Sequence[Mapping[str, Any]]], display: Display) -> Iterator[None]:
    """Writes rows to ``output``, if it is not None, on the way out, be that the end or an exception.

    Args:
        rows: those that are complete by then, in order; where there are none after an exception, no file is made.
    """
    try:
        yield
    except BaseException:
        if output is not None and (complete := rows()):
            JsonlWriter(output).write_all(complete)
            display.message(f"{len(complete)} complete rows are in {output}")
        raise
    if output is not None:
        JsonlWriter(output).write_all(rows())


def check_output(output: Path | None) -> None:
    """Raises ``ConfigError`` if the file cannot be made, or is there already, so that nothing is written over."""
    if output is None:
        return
    try:
        if output.is_dir():
            raise ConfigError(f"--output: {output} is a folder; name a new file")
        if output.exists():
            raise ConfigError(f"--output: {output} exists; name a new file")
        check_can_be_made(output.parent, "--output")
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be looked for: {error.strerror}; name another file") from error
