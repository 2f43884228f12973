"""A run from its configuration to its output folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed

from tether.config.load import dump_config, parse_config
from tether.config.schema import ModelConfig, RunConfig, SamplingConfig
from tether.config.secrets import without_keys
from tether.errors import ConfigError
from tether.generation.build import build_generator
from tether.machine.claim import claimed
from tether.machine.distributed import Dist, lost_told
from tether.machine.precision import check_precision
from tether.metrics.trackers import Trackers
from tether.metrics.writers import truncate_after, write_whole
from tether.models.build import build_roles
from tether.models.gguf import gguf_source
from tether.models.loading import end_at, half_dtype, load_causal_lm, load_tokenizer, stop_token_ids
from tether.models.offload import has_own_memory
from tether.models.paths import ADAPTER_CONFIG
from tether.models.roles import ModelRoles
from tether.models.saving import (
    atomic_folder,
    check_can_be_made,
    critic_weights,
    files_written,
    policy_weights,
    save_critic,
    save_policy,
    written_into,
)
from tether.report.card import CARD, write_card
from tether.report.html import REPORT, write_report
from tether.report.read import FINISHED
from tether.rewards.build import build_rewards, check_sharded, try_sources
from tether.train.callbacks import Callbacks
from tether.train.checkpoint import (
    RunState,
    checkpoint_step,
    find_checkpoint,
    kept_whole,
    list_checkpoints,
    read_state,
)
from tether.train.display import Display, NullDisplay
from tether.train.engines.build import build_engine
from tether.train.engines.replicated import Alone
from tether.train.guard import BAD_BATCHES
from tether.train.hub import open_repository, push
from tether.train.inputs import (
    RunData,
    check,
    check_batches,
    check_data,
    first_answer,
    load_data,
    model_paths,
    resolved,
    tell_data,
)
from tether.train.log import METRICS, SAMPLES, RunLog
from tether.train.parts import Parts
from tether.train.process_log import ProcessLog
from tether.train.same_run import check_same_data, check_same_run, fingerprints, told_of_move
from tether.train.sharing import shared, shared_generator
from tether.train.trainer import PPOTrainer
from tether.types import RewardSource, Sampling

CONFIG, SCORE_NORM, CRITIC, BASE = "config.yaml", "score_norm.json", "critic", "base"
OF_SCRIPT = "train_dataset"
"""``data.prompts`` of a run whose prompts were handed over by a script, on ``tether.compat.trl``."""


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
        RewardError: answers could not be scored; the state after the last finished update is saved.
        GenerationError, TrainingError: the run could not go on; its last checkpoint is whole.
        HubError: the policy is saved, but could not be pushed.
    """
    with open_trainer(config, rewards=rewards, display=display, callbacks=callbacks) as trainer:
        config, log, dist = trainer.config, trainer.log, trainer.dist
        with trainer.stop:  # a signal while the end is written comes too late to stop anything
            interrupted = trainer.fit()
            write_end(trainer, finished=interrupted is None)
        is_to_push = config.train.push_to_hub and interrupted is None and dist.is_main
    if is_to_push:
        told = push(config.output_dir, hub_repository(config))
        (display or NullDisplay()).message(f"pushed: {told}")
    return RunResult(config.output_dir, log.updates, log.evaluations, config.output_dir / REPORT, interrupted)


def write_end(trainer: PPOTrainer, *, finished: bool) -> None:
    """Writes what a run leaves behind beside its logs: what scores were normalised by, and at its end the policy, and
    the critic if that was asked for. All processes call it, the main one writes."""
    config, roles, dist = trainer.config, trainer.roles, trainer.dist
    with trainer.checkpoints.may_run_out():
        if config.ppo.score_norm is not None or trainer.state.source_moments:
            dist.by_main(lambda: write_norms(config.output_dir / SCORE_NORM, trainer.state))
        if not finished:
            return
        with trainer.policy_to_keep():
            policy = kept_whole(trainer.engine, policy_weights, roles)
            dist.by_main(lambda: save_final(config.output_dir, roles, trainer.parts.tokenizer, policy))
        if config.value.save:
            critic = kept_whole(trainer.engine, critic_weights, roles)
            dist.by_main(lambda: save_final_critic(config.output_dir, roles, critic))


def hub_repository(config: RunConfig) -> str:
    """The repository that the policy is pushed to, opened."""
    name = config.train.hub_model_id or config.output_dir.absolute().name
    return open_repository(name, private=config.train.hub_private_repo, key="train.push_to_hub")


@contextmanager
def open_trainer(
    config: RunConfig,
    *,
    rewards: RewardSource | None = None,
    display: Display | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Iterator[PPOTrainer]:
    """The trainer of a run with everything loaded, for callers that drive its phases by hand; ``fit`` runs them all.

    The run's folder is kept from other runs until the end, when report.html is written.

    Args:
        rewards, display, callbacks: as ``train_policy``.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: as ``train_policy``.
    """
    dist = Dist(config.train.ddp_timeout)
    dist.each(lambda: check(config))
    dist.each(lambda: check_processes(config, dist))
    display = display or NullDisplay() if dist.is_main else NullDisplay()
    dist.by_main(lambda: check_folder(config))
    config = resolved(config)
    checkpoint = dist.by_main(lambda: find_checkpoint(config, tell=display.message))
    if checkpoint is not None:
        record = dist.each(lambda: read_state(checkpoint))
        saved = dist.each(lambda: parse_config(record["config"], RunConfig))
        is_moved = record["num_processes"] != dist.num_processes
        now = config.model_dump(mode="json")
        before = saved.model_dump(mode="json")
        for change in dist.each(lambda: check_same_run(before, now, checkpoint, is_moved=is_moved)):
            display.message(f"going on with another {change}")
        if (told := told_of_move(saved, record, config, dist, build_engine(dist).name)) is not None:
            display.message(told)
    data = dist.main_first(lambda: load_data(config))
    dist.each(lambda: check_data(config, data))
    if checkpoint is not None:
        held_out, models = data.eval_prompts.prompts if data.eval_prompts else [], model_paths(config)
        read = fingerprints(data.prompts.prompts, held_out, data.demonstrations, models)
        dist.each(lambda: check_same_data(record["data"], read, checkpoint))
    tell_data(config, data, display)
    dist.by_main(lambda: try_outside(config, data, with_services=rewards is None))
    with ExitStack() as stack:
        dist.by_main(lambda: stack.enter_context(claimed(config.output_dir)))
        dist.by_main(lambda: check_folder(config))  # once more: another run may have begun there meanwhile
        dist.by_main(lambda: prepare_folder(config, checkpoint, tell=display.message))
        log = open_log(config, display, dist)
        try:
            engine = build_engine(dist).name
            log.message(f"on {dist.described('tether ppo', None if engine == Alone.name else engine)}")
            if config.model.lora is not None and gguf_source(config.model.path) is not None:
                log.phase("de-quantising the model", 0, 1)
                dist.by_main(lambda: write_base(config.model, config.output_dir / BASE))
            with lost_told(dist.num_processes):  # engines talk to each other while they take models over
                trainer = build_trainer(config, data, rewards, log, callbacks, dist)
            if checkpoint is not None:
                trainer.resume(checkpoint)
                log.message(f"resumed from {checkpoint} after {trainer.state.step} updates")
            yield trainer
            trainer.parts.generator.close()
        except Exception as error:
            if isinstance(log.display, ProcessLog):
                log.display.failed(error)
            raise
        finally:
            log.close()
        dist.by_main(lambda: write_report(config.output_dir))


def check_processes(config: RunConfig, dist: Dist) -> None:
    """Raises ``ConfigError`` if the batches cannot be divided over the processes, or the launch does not fit."""
    check_precision(config)
    check_batches(config, dist.num_processes)
    engine = build_engine(dist)
    engine.check(resolved(config))
    if dist.num_processes > 1:
        check_sharded(config.rewards, engine.name, spreads=engine.spreads_weights)


def try_outside(config: RunConfig, data: RunData, *, with_services: bool) -> None:
    """Asks reward services for a first score and opens the repository on the hub, so that a run does not find out
    later that it cannot."""
    if with_services:
        try_sources(config.rewards, config.reward_names, first_answer(data), data.tokenizer)
    if config.train.push_to_hub:
        hub_repository(config)


def open_log(config: RunConfig, display: Display, dist: Dist) -> RunLog:
    """Where this process's numbers and texts go: only the main one writes metrics, samples and trackers."""
    folder, report_to = config.output_dir, config.train.report_to if dist.is_main else "none"
    if dist.num_processes > 1:
        display = ProcessLog(folder / "logs" / f"process-{dist.rank}.log", display)
    trackers = Trackers(
        report_to,
        run_name=config.train.run_name or folder.name,
        logging_dir=folder / "logs",
        config=without_keys(config.model_dump(mode="json")),
    )
    return RunLog(folder if dist.is_main else None, display, trackers, logging_steps=config.train.logging_steps)


def check_folder(config: RunConfig) -> None:
    """Raises ``ConfigError`` if ``output_dir`` cannot be written, or holds another run."""
    folder = config.output_dir
    try:
        holds_run = (folder / METRICS).exists() or bool(list_checkpoints(folder))
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be looked into: {error.strerror}") from error
    goes_on = config.resume is True or (config.resume and Path(config.resume).resolve().parent == folder.resolve())
    if holds_run and not goes_on and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {folder} holds an earlier run. Add --resume to go on with it, choose another output_dir, "
            "or add --overwrite to replace it"
        )
    if not holds_run and any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(f"output_dir: {folder} holds a model, which the trained policy would replace; name another")
    check_models_kept(folder, model_paths(config))
    is_new = not holds_run and not config.overwrite_output_dir
    check_files(folder, is_new=is_new, way_out="add --overwrite to replace it")
    check_can_be_made(folder, "output_dir")


def check_models_kept(folder: Path, read: Mapping[str, str]) -> None:
    """Raises ``ConfigError`` if a run that writes to ``folder`` would remove or write over a model that it reads.

    Args:
        read: key and path of every model that the run reads.
    """
    removed = [path.resolve() for path in (*list_checkpoints(folder), folder / CRITIC, folder / BASE)]
    for key, path in read.items():
        source = Path(path).resolve()
        if source == folder.resolve() or any(source.is_relative_to(path) for path in removed):
            raise ConfigError(f"output_dir: this run would write over {path}, which {key} names; choose another")


def check_files(folder: Path, *, is_new: bool, way_out: str) -> None:
    """Raises ``ConfigError`` if a run that writes to ``folder`` would write elsewhere, or over what no run wrote.

    Args:
        is_new: whether no earlier run is gone on with or replaced.
        way_out: what to do but name another folder, for the message.
    """
    written = {METRICS, SAMPLES, BAD_BATCHES, CONFIG, SCORE_NORM, FINISHED}
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.name.removeprefix(".").removesuffix(".tmp") in written and (path.is_symlink() or not path.is_file()):
            kind = "a link" if path.is_symlink() else "no file"
            raise ConfigError(f"output_dir: {path} is {kind}, and a run writes to files of its own alone: remove it")
        is_others = path.name in (SAMPLES, REPORT, CARD) or (path.name == CONFIG and not _is_dumped(path))
        if is_new and is_others:
            raise ConfigError(
                f"output_dir: {folder} holds a {path.name}, which the run would write over; name another folder, or "
                f"{way_out}"
            )


def _is_dumped(path: Path) -> bool:
    """Whether a configuration is one that a run wrote, which somebody's own file hardly ever is."""
    try:
        text = path.read_text(encoding="utf-8")
        return dump_config(parse_config(text, RunConfig)) == text
    except (ConfigError, UnicodeDecodeError):
        return False


def build_trainer(
    config: RunConfig,
    data: RunData,
    rewards: RewardSource | None,
    log: RunLog,
    callbacks: Sequence[TrainerCallback],
    dist: Dist,
) -> PPOTrainer:
    """Loads the models and puts the trainer together."""
    set_seed((config.train.seed + dist.rank) % 2**32)
    events = Callbacks(callbacks, config, len(data.prompts.prompts))
    if config.train.offload_idle_roles and not has_own_memory(dist.device):
        log.message(f"train.offload_idle_roles: nothing moves, as {dist.device} and the CPU have one memory")
    log.phase("loading models", 0, 1)
    parts = build_parts(config, data, rewards, dist)
    log.display.table("roles", *role_table(parts.roles))
    return PPOTrainer(config, parts, log=log, callbacks=events)


def build_parts(config: RunConfig, data: RunData, rewards: RewardSource | None, dist: Dist) -> Parts:
    """Models, generator and reward sources as the resolved configuration asks for them."""
    tokenizer = data.tokenizer
    config = with_base(config)
    engine = build_engine(dist)
    device = torch.device("cpu") if engine.spreads_weights else dist.device
    precision = half_dtype(config.train, dist.device)
    roles = dist.each(lambda: build_roles(config, tokenizer, device=device, autocast_dtype=precision))
    if rewards is not None:
        source = shared(lambda _: rewards, dist=dist)
    else:
        source = build_rewards(
            config.rewards,
            config.reward_names,
            roles=roles,
            tokenizer=tokenizer,
            device=dist.device,
            offload_idle=config.train.offload_idle_roles,
            shards=engine.spreads_weights,
            shared=partial(shared, dist=dist, engine=engine),
        )
    engine.place(roles)
    stops = stop_token_ids(tokenizer, roles.policy.generation_config, config.sampling.stop_token)
    if config.sampling.stop_token == "eos":
        end_at(roles.policy, stops)
    return Parts(
        roles=roles,
        generator=shared_generator(
            build_generator(config, roles), dist, engine, gather=config.train.ds3_gather_for_generation
        ),
        rewards=source,
        tokenizer=tokenizer,
        sampling=sampling_of(config.sampling, stops),
        prompts=data.prompts.prompts,
        eval_prompts=data.eval_prompts.prompts if data.eval_prompts else [],
        demonstrations=data.demonstrations,
        dist=dist,
        engine=engine,
    )


def with_base(config: RunConfig) -> RunConfig:
    """The configuration with the folder that ``write_base`` wrote in the policy's place, if it did."""
    base = config.output_dir / BASE
    if gguf_source(config.model.path) is None or not base.is_dir():
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(base), "revision": None})})


def write_base(model: ModelConfig, folder: Path) -> None:
    """Writes a GGUF model as a plain folder in float32, unless it is there: the base that a saved adapter names."""
    if folder.is_dir():
        return
    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    with atomic_folder(folder) as partial:
        load_causal_lm(model.path, dtype=torch.float32, **options).save_pretrained(partial)
        load_tokenizer(model.path, **options).save_pretrained(partial)


def sampling_of(config: SamplingConfig, stop_token_ids: frozenset[int]) -> Sampling:
    """How a run draws its answers."""
    return Sampling(config.response_length, config.temperature, stop_token_ids, config.top_p, config.top_k)


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
    if checkpoint is not None and checkpoint.resolve().parent == folder.resolve():
        state = read_state(checkpoint)
        for path in list_checkpoints(folder)[::-1]:
            if checkpoint_step(path) > state["step"]:  # its updates are made anew, and so is it
                tell(f"removing {path}, as the run goes on from {checkpoint}")
                shutil.rmtree(path)
        evaluated = -1 if state["evaluated_step"] is None else state["evaluated_step"]
        for name in (METRICS, SAMPLES, BAD_BATCHES):
            truncate_after(folder / name, state["step"], evaluated)
    elif config.overwrite_output_dir:
        for path in (*list_checkpoints(folder), folder / CRITIC, folder / BASE):
            shutil.rmtree(path, ignore_errors=not path.exists())
        # the policy too: an adapter beside another run's full model would be loaded together with it
        for name in (METRICS, SAMPLES, BAD_BATCHES, FINISHED, REPORT, SCORE_NORM, *files_written(folder)):
            (folder / name).unlink(missing_ok=True)
    write_whole(folder / CONFIG, dump_config(config).encode())


def write_norms(path: Path, state: RunState) -> None:
    """Writes what the run's scores, and those of sources with ``norm: auto``, were normalised by, for evaluations."""
    record = asdict(state.score_moments)
    if state.source_moments:
        record["sources"] = {name: asdict(moments) for name, moments in state.source_moments.items()}
    write_whole(path, json.dumps(record).encode() + b"\n")


def save_final(
    folder: Path, roles: ModelRoles, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, Tensor] | None
) -> None:
    """Puts the policy at the root of ``folder``, each file whole or not there."""
    with written_into(folder) as temporary:
        save_policy(roles, tokenizer, temporary, weights)
        write_card(temporary, folder)


def save_final_critic(folder: Path, roles: ModelRoles, weights: Mapping[str, Tensor] | None) -> None:
    """Puts the critic into a folder of its own in ``folder``, complete or not there."""
    with atomic_folder(folder / CRITIC) as temporary:
        save_critic(roles, temporary, weights)
        write_card(temporary, folder, role="critic")
