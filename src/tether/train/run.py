"""A run from its configuration to its output folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed

from tether.algo import ScoreMoments
from tether.config.load import dump_config, parse_config
from tether.config.schema import RunConfig
from tether.data.demonstrations import DemonstrationData, load_demonstrations
from tether.data.prompts import PromptData, load_prompts
from tether.data.sources import check_source
from tether.errors import ConfigError
from tether.generation.build import build_generator
from tether.metrics.trackers import Trackers, check_report_to
from tether.metrics.writers import truncate_after
from tether.models.adapters import check_targets
from tether.models.loading import (
    bf16_supported,
    check_classifier,
    load_generation_config,
    load_tokenizer,
    stop_token_ids,
)
from tether.models.loading import load_config as load_model_config
from tether.models.paths import ADAPTER_CONFIG, adapter_base, check_model_path, is_adapter
from tether.models.roles import ModelRoles, build_roles
from tether.models.saving import atomic_folder, files_written, save_critic, save_policy
from tether.report.html import REPORT, write_report
from tether.rewards.build import build_rewards, check_rewards
from tether.train.callbacks import Callbacks
from tether.train.checkpoint import check_same_run, checkpoint_step, find_checkpoint, list_checkpoints, read_state
from tether.train.claim import claimed
from tether.train.display import Display, NullDisplay
from tether.train.distributed import Dist
from tether.train.log import METRICS, SAMPLES, RunLog
from tether.train.optim import check_schedule
from tether.train.parts import Parts
from tether.train.trainer import PPOTrainer
from tether.types import RewardSource, Sampling

CONFIG, SCORE_NORM, CRITIC = "config.yaml", "score_norm.json", "critic"


@dataclass(frozen=True)
class RunResult:
    """What a run left behind."""

    output_dir: Path
    """The trained policy and everything else that the run wrote."""
    updates: list[dict[str, float]] = field(repr=False)
    """Metrics of every update that this call ran."""
    evaluations: list[dict[str, float]]
    """Metrics of every evaluation that this call ran."""
    report: Path
    """report.html."""
    interrupted: str | None = None
    """Why the run stopped before its end with its state saved, or None."""


def train_policy(
    config: RunConfig,
    *,
    rewards: RewardSource | None = None,
    display: Display | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunResult:
    """Trains a policy by PPO and writes it, with metrics, samples and a report, to ``config.output_dir``.

    Args:
        rewards: judge of answers to use in place of ``config.rewards``, for callers with one of their own.
        display: told of progress; silent if left out.
        callbacks: ``transformers`` callbacks; one step is one update.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: a mistake that the user can mend; before a model is loaded
            wherever it can be seen by then.
        RewardError, GenerationError, TrainingError: the run could not go on; its last checkpoint is whole.
    """
    display = display or NullDisplay()
    check(config)
    check_folder(config)
    config = resolved(config)
    checkpoint = find_checkpoint(config, tell=display.message)
    if checkpoint is not None:
        saved = parse_config(read_state(checkpoint)["config"], RunConfig)
        check_same_run(saved.model_dump(mode="json"), config.model_dump(mode="json"), checkpoint)
    tokenizer, prompts, eval_prompts = load_data(config)
    ptx = load_ptx(config, tokenizer)
    check_data(config, tokenizer, prompts, eval_prompts, ptx=ptx)
    check_updates(config, len(prompts.prompts))
    tell_data(config, prompts, eval_prompts, ptx, display)
    with claimed(config.output_dir):
        check_folder(config)  # once more: another run may have begun there meanwhile
        prepare_folder(config, checkpoint, tell=display.message)
        trackers = Trackers(
            config.train.report_to,
            run_name=config.train.run_name or config.output_dir.name,
            logging_dir=config.output_dir / "logs",
            config=config.model_dump(mode="json"),
        )
        log = RunLog(config.output_dir, display, trackers, logging_steps=config.train.logging_steps)
        try:
            trainer = build_trainer(config, tokenizer, prompts, eval_prompts, ptx, rewards, log, callbacks)
            if checkpoint is not None:
                trainer.state = trainer.checkpoints.restore(checkpoint)
                trainer.callbacks.resume(trainer.state.step, trainer.state.best_metric)
                display.message(f"resumed from {checkpoint} after {trainer.state.step} updates")
            interrupted = trainer.fit()
            if config.ppo.score_norm is not None:
                write_moments(config.output_dir / SCORE_NORM, trainer.state.score_moments)
            if interrupted is None:
                with trainer.policy_to_keep():
                    save_final(config.output_dir, trainer.roles, tokenizer)
                if config.value.save:
                    with atomic_folder(config.output_dir / CRITIC) as folder:
                        save_critic(trainer.roles, folder)
            trainer.parts.generator.close()
        finally:
            log.close()
        report = write_report(config.output_dir)
        return RunResult(config.output_dir, log.updates, log.evaluations, report, interrupted)


def check(config: RunConfig) -> None:
    """Raises for every mistake that shows without loading a tokenizer or a model."""
    check_model_path(config.model.path, "model.path")
    check_source(config.data.prompts, "data.prompts")
    if config.data.eval_prompts is not None:
        check_source(config.data.eval_prompts, "data.eval_prompts")
    if config.data.ptx is not None:
        check_source(config.data.ptx, "data.ptx")
    check_rewards(config.rewards)
    check_report_to(config.train.report_to)
    if config.value.init not in (None, "reward", "policy"):
        check_model_path(config.value.init, "value.init")
        if config.value_kind == "model":
            check_classifier(config.value.init, "value.init")


def resolved(config: RunConfig) -> RunConfig:
    """The configuration with the defaults filled in that depend on this machine."""
    return config.resolved(bf16=bf16_supported("cuda" if torch.cuda.is_available() else "cpu"))


def check_folder(config: RunConfig) -> None:
    """Raises ``ConfigError`` if ``output_dir`` cannot be written, or holds another run."""
    folder = config.output_dir
    holds_run = (folder / METRICS).exists() or bool(list_checkpoints(folder))
    goes_on = config.resume is True or (config.resume and Path(config.resume).resolve().parent == folder.resolve())
    if holds_run and not goes_on and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {folder} holds an earlier run. Add --resume to go on with it, choose another output_dir, "
            "or add --overwrite to replace it"
        )
    if not holds_run and any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(f"output_dir: {folder} holds a model, which the trained policy would replace; name another")
    replaced = {path.resolve() for path in (folder, *list_checkpoints(folder))}
    for key, path in model_paths(config).items():
        if Path(path).resolve() in replaced:
            raise ConfigError(f"output_dir: this run would write over {path}, which {key} names; choose another")
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ConfigError(f"output_dir: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"output_dir: {nearest} is not writable")


def model_paths(config: RunConfig) -> dict[str, str]:
    """Key and path of every model that the run reads."""
    rewards = {f"rewards.{i}.path": reward.path for i, reward in enumerate(config.rewards) if reward.type != "function"}
    critic = {"value.init": config.value.init} if config.value.init not in (None, "reward", "policy") else {}
    return {"model.path": config.model.path} | rewards | critic


def load_data(config: RunConfig) -> tuple[PreTrainedTokenizerBase, PromptData, PromptData | None]:
    """The policy's tokenizer, and the prompts as its token ids."""
    tokenizer = load_tokenizer(
        config.model.path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    data = config.data
    same = {
        "max_prompt_length": data.max_prompt_length,
        "chat_template": data.chat_template,
        "system_prompt": data.system_prompt,
    }
    prompts = load_prompts(data.prompts, tokenizer, split=data.split, key="data.prompts", **same)
    if data.eval_prompts is None:
        return tokenizer, prompts, None
    return tokenizer, prompts, load_prompts(
        data.eval_prompts, tokenizer, split=data.eval_split, key="data.eval_prompts", **same
    )


def load_ptx(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DemonstrationData | None:
    """The demonstrations of the SFT loss, if there is one."""
    data, model = config.data, config.model
    if data.ptx is None:
        return None
    generation = load_generation_config(model.path, revision=model.revision)
    return load_demonstrations(
        data.ptx,
        tokenizer,
        split=data.ptx_split,
        max_length=data.max_ptx_length,
        chat_template=data.chat_template,
        system_prompt=data.system_prompt,
        end_ids=stop_token_ids(tokenizer, generation, "eos"),
        key="data.ptx",
    )


def check_data(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *datasets: PromptData | None,
    ptx: DemonstrationData | None = None,
) -> None:
    """Raises ``ConfigError`` for what only the data and the policy's own configuration show: a column that a reward
    function asks for and that is not there, tokens without an embedding, a stop token that is none, LoRA targets that
    the policy has not, texts that do not fit into its positions."""
    used = [data for data in datasets if data is not None]
    for data in used:
        check_rewards(config.rewards, columns=data.columns)
    path = config.model.path
    base = adapter_base(path, config.model.revision) if is_adapter(path, config.model.revision) else path
    revision = config.model.revision if base == path else None
    shape = load_model_config(base, revision=revision, trust_remote_code=config.model.trust_remote_code)
    text, prompts = shape.get_text_config(), [prompt for data in used for prompt in data.prompts]
    demonstrations = ptx.demonstrations if ptx is not None else []
    texts = [("prompt", prompt.row, prompt.token_ids) for prompt in prompts]
    texts += [("demonstration", each.row, each.query_ids + each.response_ids) for each in demonstrations]
    for kind, row, ids in texts:
        if (highest := max(ids)) >= text.vocab_size:
            raise ConfigError(
                f"model.path: {path} knows {text.vocab_size} tokens, its tokenizer more: token {highest}, "
                f"{tokenizer.decode([highest])!r}, of the {kind} in row {row} has no embedding. One of the two "
                "belongs to another model"
            )
    if config.sampling.stop_token not in (None, "eos"):
        (stop,) = stop_token_ids(tokenizer, None, config.sampling.stop_token)
        if stop >= text.vocab_size:
            raise ConfigError(
                f"sampling.stop_token {config.sampling.stop_token} is token {stop}, but the model knows only "
                f"{text.vocab_size} tokens"
            )
    if config.model.freeze_layers >= text.num_hidden_layers:
        raise ConfigError(
            f"model.freeze_layers {config.model.freeze_layers}: the model has {text.num_hidden_layers} layers, so none "
            f"would train. Set it below {text.num_hidden_layers}"
        )
    if config.model.lora is not None and base == path:
        check_targets(config.model.lora, shape, trust_remote_code=config.model.trust_remote_code)
    limit = getattr(text, "max_position_embeddings", None)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    budget = config.train.max_tokens_per_micro_batch
    if budget is not None and longest + config.sampling.response_length > budget:
        raise ConfigError(
            f"train.max_tokens_per_micro_batch {budget} is less than one answer may need: the longest query has "
            f"{longest} tokens, sampling.response_length is {config.sampling.response_length}. Set it to at least "
            f"{longest + config.sampling.response_length}"
        )
    if limit is not None and longest + config.sampling.response_length > limit:
        raise ConfigError(
            f"sampling.response_length {config.sampling.response_length} after the longest query of {longest} tokens "
            f"needs {longest + config.sampling.response_length} positions, the model has {limit}: lower it, or "
            "data.max_prompt_length"
        )
    longest = max((len(each.query_ids) + len(each.response_ids) for each in demonstrations), default=0)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_ptx_length {config.data.max_ptx_length}: the longest demonstration in {config.data.ptx} has "
            f"{longest} tokens, the model has {limit} positions. Set it to at most {limit}"
        )


def check_updates(config: RunConfig, num_prompts: int) -> None:
    """Raises ``ConfigError`` for what only the number of updates shows: a schedule that does not fit, or a warm-up of
    the critic that leaves the policy none."""
    updates = config.num_updates(num_prompts)
    if config.value.warmup_steps >= updates:
        raise ConfigError(
            f"value.warmup_steps {config.value.warmup_steps}: the run makes {updates} updates, so the policy would "
            f"never train. Set it below {updates}"
        )
    check_schedule(config, updates)


def tell_data(
    config: RunConfig,
    prompts: PromptData,
    eval_prompts: PromptData | None,
    ptx: DemonstrationData | None,
    display: Display,
) -> None:
    """Says how many prompts there are, which were dropped, and how they fill the updates."""
    for name, data in (("prompts", prompts), ("held-out prompts", eval_prompts)):
        if data is not None:
            display.message(f"{name}: {data.note}")
    if ptx is not None:
        dropped = f", {ptx.num_too_long} of them dropped as too long" if ptx.num_too_long else ""
        display.message(f"demonstrations: {config.data.ptx}: {ptx.num_rows} rows{dropped}")
    display.message(f"the first query as the policy reads it: {prompts.prompts[0].text!r}")
    size, updates = config.train.rollout_batch_size, config.num_updates(len(prompts.prompts))
    asked, count = config.prompts_per_update, len(prompts.prompts)
    if count < asked:
        display.message(f"{count} prompts are fewer than the {asked} of an update: each update cycles through them")
    display.message(
        f"{updates} updates of {size} answers = {updates * size} episodes, "
        f"{updates * asked / count:.3g} passes over the prompts"
    )


def build_trainer(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptData,
    eval_prompts: PromptData | None,
    ptx: DemonstrationData | None,
    rewards: RewardSource | None,
    log: RunLog,
    callbacks: Sequence[TrainerCallback],
) -> PPOTrainer:
    """Loads the models and puts the trainer together."""
    set_seed(config.train.seed)
    events = Callbacks(callbacks, config, len(prompts.prompts))
    dist = Dist()
    log.phase("loading models", 0, 1)
    parts = build_parts(config, tokenizer, prompts, eval_prompts, rewards, dist, ptx=ptx)
    log.display.table("roles", *role_table(parts.roles))
    return PPOTrainer(config, parts, dist=dist, log=log, callbacks=events)


def build_parts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptData | None,
    eval_prompts: PromptData | None,
    rewards: RewardSource | None,
    dist: Dist,
    *,
    ptx: DemonstrationData | None = None,
) -> Parts:
    """Models, generator and reward sources as the resolved configuration asks for them."""
    roles = build_roles(config, tokenizer, device=dist.device, mixed_precision=config.train.bf16)
    if rewards is None:
        names = config.reward_names
        rewards = build_rewards(config.rewards, names, roles=roles, tokenizer=tokenizer, device=dist.device)
    stops = stop_token_ids(tokenizer, roles.policy.generation_config, config.sampling.stop_token)
    return Parts(
        roles=roles,
        generator=build_generator(config, roles),
        rewards=rewards,
        tokenizer=tokenizer,
        sampling=Sampling(config.sampling.response_length, config.sampling.temperature, stops),
        prompts=prompts.prompts if prompts else [],
        eval_prompts=eval_prompts.prompts if eval_prompts else [],
        demonstrations=ptx.demonstrations if ptx else [],
    )


def role_table(roles: ModelRoles) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of roles."""
    header = ["role", "source", "parameters", "trainable", "dtype", "sharing"]
    return header, [
        [row.role, row.source, f"{row.parameters:,}", f"{row.trainable:,}", row.dtype, row.sharing]
        for row in roles.table()
    ]


def prepare_folder(config: RunConfig, checkpoint: Path | None, *, tell: Callable[[str], None]) -> None:
    """Makes ``output_dir`` ready: empty of an earlier run, or cut back to the checkpoint that the run goes on from."""
    folder = config.output_dir
    if checkpoint is not None:
        state = read_state(checkpoint)
        for path in list_checkpoints(folder)[::-1]:
            if checkpoint_step(path) > state["step"]:  # its updates are made anew, and so is it
                tell(f"removing {path}, as the run goes on from {checkpoint}")
                shutil.rmtree(path)
        evaluated = -1 if state["evaluated_step"] is None else state["evaluated_step"]
        for name in (METRICS, SAMPLES):
            truncate_after(folder / name, state["step"], evaluated)
    elif config.overwrite_output_dir:
        for path in (*list_checkpoints(folder), folder / CRITIC):
            shutil.rmtree(path, ignore_errors=not path.exists())
        # the policy too: an adapter beside another run's full model would be loaded together with it
        for name in (METRICS, SAMPLES, REPORT, SCORE_NORM, *files_written(folder)):
            (folder / name).unlink(missing_ok=True)
    text = dump_config(config)
    temporary = folder / f".{CONFIG}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / CONFIG)


def write_moments(path: Path, moments: ScoreMoments) -> None:
    """Writes what the run's scores were normalised by, for evaluations after it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(asdict(moments)) + "\n", encoding="utf-8")
    temporary.replace(path)


def save_final(folder: Path, roles: ModelRoles, tokenizer: PreTrainedTokenizerBase) -> None:
    """Puts the policy at the root of ``folder``, each file whole or not there."""
    with atomic_folder(folder / "final.tmp") as temporary:
        save_policy(roles, tokenizer, temporary)
    for path in sorted((folder / "final.tmp").iterdir()):
        path.replace(folder / path.name)
    (folder / "final.tmp").rmdir()
