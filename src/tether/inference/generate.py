"""Answers prompts with a model, an adapter, or a run's saved policy: ``tether generate``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from tether.config.chat import check_columns
from tether.config.schema import RunConfig
from tether.data.bad_rows import Limit
from tether.data.prompts import load_prompts
from tether.data.queries import PROMPTS_OPTION, QueryFormat
from tether.data.sources import check_source
from tether.errors import ConfigError
from tether.generation.hf import HFGenerator
from tether.inference.options import check_options, named_source
from tether.inference.output import check_output, kept
from tether.inference.saved import DEFAULT_LENGTH, chat_keys, load_saved_policy, policy_config
from tether.models.fit import check_positions, steady_positions, steady_positions_told
from tether.models.loading import load_config as load_shape
from tether.models.paths import check_model_path, own_weights
from tether.models.stop_strings import answer_text
from tether.models.tokenizer import load_tokenizer
from tether.train.display import Display, NullDisplay
from tether.types import Request, noise_key


@torch.no_grad()
def generate_path(
    model: str | Path,
    prompts: str | Path,
    *,
    split: str = "train",
    subset: str | None = None,
    columns: dict[str, str] | None = None,
    output: str | Path | None = None,
    response_length: int | None = None,
    max_prompt_length: int | None = None,
    temperature: float | None = None,
    system: str | None = None,
    seed: int = 42,
    trust_remote_code: bool = False,
    display: Display | None = None,
) -> list[dict[str, Any]]:
    """Answers prompts with a model, an adapter, or a run's saved policy, with the run's sampling settings.

    If it is interrupted or fails, answers that are complete by then are still written to ``output``.

    Args:
        model: folder or hub id.
        prompts: prompts to answer.
        split, subset: split and subset to read if ``prompts`` has several; parts of a split as ``train[:100]``.
        columns: the file's column names by ours, as ``data.columns``; default: the run's, as far as the file has them.
        output: JSONL file for the answers.
        response_length: maximum number of tokens of an answer; default: the run's, or 256.
        max_prompt_length: maximum number of tokens of a query; default: the run's, or what the model's positions leave
            beside an answer, at most 2048.
        temperature: 0 takes the most likely token; default: the run's, or 1.
        system: system prompt; the run's if None, none if empty.
        trust_remote_code: whether to run code that comes with the model, regardless of a configuration beside it.

    Returns:
        A row for each prompt, in order: its number, ``prompt``, ``response`` and ``finish_reason``.

    Raises:
        ConfigError: ``output`` exists or cannot be written, an option is out of range, or prompts and answers do not
            fit into the model's positions.
        DataError, ModelError: prompts or model are not usable.
    """
    model, prompts, display = str(model), str(prompts), display or NullDisplay()
    check_options(response_length=response_length, max_prompt_length=max_prompt_length, temperature=temperature)
    check_columns(columns)
    check_model_path(model, "model", takes_gguf=True)
    check_source(prompts, PROMPTS_OPTION)
    output = check_output(output)
    config = policy_config(Path(model))
    run = config if isinstance(config, RunConfig) else None
    code = {"trust_remote_code": trust_remote_code}
    chat = chat_keys(config) if system is None else chat_keys(config) | {"system_prompt": system or None}
    tokenizer = load_tokenizer(model, **code)
    base, revision = own_weights(model)
    shape = load_shape(base, revision=revision, **code)
    longest_answer = response_length or (run.sampling.response_length if run else DEFAULT_LENGTH)
    longest_prompt = max_prompt_length or (
        run.data.max_prompt_length if run else _room_for_prompts(shape, longest_answer)
    )
    of_run = config.data.columns if config else None
    source = named_source(prompts, PROMPTS_OPTION, split=split, subset=subset, columns=columns, of_run=of_run)
    data = load_prompts(source, QueryFormat(tokenizer, **chat), Limit(longest_prompt, "--max_prompt_length"))
    if data.num_too_long:
        display.message(f"prompts: {data.note}")
    words = {"key": "--response_length", "way_out": "lower it, or --max_prompt_length"}
    check_positions(shape, data.longest_query, longest_answer, **words)
    display.phase("loading the model", 0, 1)
    policy = load_saved_policy(
        model, tokenizer, run, response_length=longest_answer, temperature=temperature, **code
    )
    generator = HFGenerator(
        lambda: nullcontext(policy.model), batch_size=16, device=policy.model.device,
        limits="--response_length or --max_prompt_length", smaller="",
    )  # fmt: skip
    requests = [Request(p.token_ids, noise_key(seed, "generate", p.row, 0), p.before) for p in data.prompts]
    rows: list[dict[str, Any]] = [{} for _ in requests]
    display.phase("answers", 0, len(rows))
    with kept(output, lambda: [row for row in rows if row], display):
        for done, (i, answer) in enumerate(generator.generate(requests, policy.sampling), start=1):
            rows[i] = {
                "row": data.prompts[i].row,
                "prompt": data.prompts[i].source,
                "response": answer_text(answer.token_ids, tokenizer, policy.sampling, data.prompts[i].before),
                "finish_reason": answer.finish_reason,
            }
            display.phase("answers", done, len(rows))
    return rows


def _room_for_prompts(shape: PreTrainedConfig, longest_answer: int) -> int:
    """Maximum number of tokens of a query for a model that belongs to no run."""
    limit = steady_positions(shape)
    if limit is not None and limit <= longest_answer:
        raise ConfigError(
            f"--response_length {longest_answer} leaves no positions for prompts, as the model has "
            f"{steady_positions_told(shape)}: lower it"
        )
    return 2048 if limit is None else min(2048, limit - longest_answer)
