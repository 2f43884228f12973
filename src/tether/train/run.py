"""A complete run, from its configuration to its output folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import TrainerCallback

from tether.config.chat import present, with_now
from tether.config.keys import counted
from tether.config.load import check_kind, parse_config
from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.machine.claim import claimed
from tether.machine.distributed import Dist, lost_told
from tether.machine.precision import check_precision
from tether.metrics.trackers import LOGS, trackers_of
from tether.models.paths import is_adapter
from tether.models.saving import critic_weights, policy_weights
from tether.report.html import REPORT, write_report
from tether.rewards.base import check_source
from tether.rewards.build import check_sharded, try_sources
from tether.train.build import build_trainer
from tether.train.callbacks import callbacks_of
from tether.train.checkpoint import find_checkpoint, kept_whole, read_state
from tether.train.display import Display, NullDisplay, check_display
from tether.train.engines.build import build_engine
from tether.train.engines.replicated import Alone, Replicated
from tether.train.folder import check_folder, goes_on_in, is_finished, prepare_folder, save_final, save_final_critic
from tether.train.gguf import is_from_gguf, write_base
from tether.train.hub import open_repository, push
from tether.train.inputs import (
    RunData,
    check,
    check_batches,
    check_data,
    first_answer,
    load_data,
    place_digests,
    resolved,
    tell_data,
)
from tether.train.log import RunLog
from tether.train.norms import SCORE_NORM, write_norms
from tether.train.process_log import ProcessLog
from tether.train.same_run import check_same_data, check_same_run, fingerprints, told_of_move
from tether.train.trainer import PPOTrainer
from tether.types import RewardSource


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    output_dir: Path
    """Folder of the trained policy and everything else that the run wrote."""
    updates: list[dict[str, float]] = field(repr=False)
    """Metrics of every update that this call ran."""
    evaluations: list[dict[str, float]]
    """Metrics of every evaluation that this call ran."""
    report: Path
    """Path of report.html."""
    interrupted: str | None = None
    """Why the run stopped early with its state saved, or None."""


def train_policy(
    config: RunConfig,
    *,
    rewards: RewardSource | None = None,
    display: Display | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunResult:
    """Trains a policy by PPO and writes it, with metrics, samples and a report, to ``config.output_dir``. With
    ``resume: auto``, a run that has already finished there is left unchanged.

    Args:
        rewards: a reward source of the caller's own, used instead of ``config.rewards``.
        display: shows progress; nothing is shown if omitted.
        callbacks: ``transformers`` callbacks; one step is one update.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: a mistake that the user can fix; raised before models are
            loaded wherever possible.
        RewardError: answers could not be scored; the state after the last finished update is saved.
        GenerationError, TrainingError: the run could not continue; its last checkpoint is complete.
        HubError: the policy is saved, but could not be pushed.
    """
    check_kind(config, RunConfig, "train_policy")
    dist = Dist(config.train.ddp_timeout)
    if dist.by_main(lambda: is_finished(config)):
        return _finished_before(config, dist, display or NullDisplay())
    with open_trainer(config, rewards=rewards, display=display, callbacks=callbacks) as trainer:
        config, log, dist = trainer.config, trainer.log, trainer.dist
        with trainer.stop:  # a signal while the final files are written must not interrupt that
            interrupted = trainer.fit()
            write_end(trainer, finished=interrupted is None)
        is_to_push = config.train.push_to_hub and interrupted is None and dist.is_main
    if is_to_push:
        _push(config, display or NullDisplay())
    return RunResult(config.output_dir, log.updates, log.evaluations, config.output_dir / REPORT, interrupted)


def _finished_before(config: RunConfig, dist: Dist, display: Display) -> RunResult:
    """The result of a run with nothing left to train; pushes again, as that may have failed or be newly requested."""
    if dist.is_main:
        display.message(f"finished: {config.output_dir} holds the policy after the run's last update")
        if config.train.push_to_hub:
            _push(config, display)
    return RunResult(config.output_dir, [], [], config.output_dir / REPORT)


def _push(config: RunConfig, display: Display) -> None:
    told = push(config.output_dir, hub_repository(config))
    display.message(f"pushed: {told}")


def write_end(trainer: PPOTrainer, *, finished: bool) -> None:
    """Writes the results of a run other than its logs: the moments for score normalization and, if the run finished,
    the policy, and the critic if requested. All processes must call it; the main process writes."""
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
    """Opens the repository that the policy is pushed to; returns its name."""
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
    """The trainer of a run with everything loaded, for callers that run its phases by hand; ``fit`` runs all of them.

    No other run can use the run's folder until this context ends. report.html is written at the end.

    Args:
        rewards, display, callbacks: as in ``train_policy``.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: as in ``train_policy``.
    """
    check_kind(config, RunConfig, "open_trainer")
    callbacks = callbacks_of(callbacks)
    if rewards is not None:
        check_source(rewards)
    check_display(display)
    dist = Dist(config.train.ddp_timeout)
    display = display or NullDisplay() if dist.is_main else NullDisplay()
    run = begin(config, dist, display)
    config, checkpoint = run.config, run.checkpoint
    dist.by_main(lambda: try_outside(config, run.data, with_services=rewards is None))
    with ExitStack() as stack:
        dist.by_main(lambda: stack.enter_context(claimed(config.output_dir)))
        dist.by_main(lambda: check_folder(config))  # again: another run may have started there in the meantime
        log = open_log(config, display, dist)
        try:
            engine = build_engine(dist).name
            log.message(f"on {dist.described('tether ppo', None if engine == Alone.name else engine)}")
            if is_from_gguf(config):
                log.phase("de-quantizing the model", 0, 1)
                is_kept = goes_on_in(config.output_dir, checkpoint)
                dist.by_main(lambda: write_base(config, is_kept=is_kept))
            with lost_told(dist.num_processes):  # engines communicate while they take over models
                trainer = build_trainer(
                    config, run.data, dist, read=run.read, rewards=rewards, log=log, callbacks=callbacks
                )
            continues = dist.by_main(lambda: is_adapter(config.model.path, config.model.revision))
            dist.by_main(lambda: prepare_folder(config, checkpoint, continues=continues, tell=display.message))
            if checkpoint is not None:
                trainer.resume(checkpoint)
                log.message(f"resumed from {checkpoint} after {counted(trainer.state.step, 'update')}")
                if trainer.state.step > trainer.num_updates:
                    asked = counted(trainer.num_updates, "update")
                    log.message(f"nothing is left to train: the configuration asks for {asked}")
            try:
                yield trainer
            finally:
                trainer.parts.generator.close()
        except Exception as error:
            if isinstance(log.display, ProcessLog):
                log.display.failed(error)
            raise
        finally:
            log.close()
        dist.by_main(lambda: write_report(config.output_dir))


@dataclass(frozen=True)
class CheckedRun:
    """A run as ``begin`` leaves it: checked, with its data loaded, and without its models."""

    config: RunConfig
    """The configuration with its defaults filled in, and with the date on which the run began."""
    checkpoint: Path | None
    """What the run resumes from."""
    data: RunData
    """Prompts and demonstrations."""
    read: Mapping[str, str]
    """``fingerprints`` of what the run reads."""


def begin(config: RunConfig, dist: Dist, display: Display) -> CheckedRun:
    """Finds the checkpoint to resume from, loads the data, and checks all that can be checked without the models.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: a mistake; raised in all processes.
    """
    dist.each(lambda: check(config))
    dist.each(lambda: check_processes(config, dist))
    dist.by_main(lambda: check_folder(config))
    config = resolved(config)
    checkpoint, now = dist.by_main(lambda: (find_checkpoint(config, tell=display.message), present()))
    if checkpoint is not None:
        record = dist.each(lambda: read_state(checkpoint))
        saved = dist.each(lambda: parse_config(record["config"], RunConfig))
        now = saved.data.chat_template_now
    config = with_now(config, now)
    places = dist.each(lambda: place_digests(config))
    if checkpoint is not None:
        for change in dist.each(lambda: check_same_run(saved, config, checkpoint, record["data"], places)):
            display.message(f"resuming with a change, {change}")
        if (told := told_of_move(saved, record, config, dist, build_engine(dist).name)) is not None:
            display.message(told)
    data = dist.main_first(lambda: load_data(config))
    for note in dist.each(lambda: check_data(config, data)):
        display.message(f"warning: {note}")
    read = fingerprints(data.prompts.prompts, data.held_out, data.demonstrations, places)
    if checkpoint is not None:
        dist.each(lambda: check_same_data(record["data"], read, checkpoint))
    tell_data(config, data, display)
    return CheckedRun(config, checkpoint, data, read)


def check_processes(config: RunConfig, dist: Dist) -> None:
    """Raises ``ConfigError`` if the batches cannot be divided over the processes, or the launch settings do not fit."""
    check_precision(config)
    check_batches(config, dist.num_processes)
    engine = build_engine(dist)
    engine.check(resolved(config))
    if config.sampling.vllm is not None and engine.name not in (Alone.name, Replicated.name):
        raise ConfigError(
            f"sampling.vllm: wanted one process or DDP, got {engine.name}, which does not pass weights on to vLLM: "
            "launch the run with examples/accelerate/ddp.yaml, or leave sampling.vllm out"
        )
    if dist.num_processes > 1:
        check_sharded(config.rewards, engine.name, spreads=engine.spreads_weights)


def try_outside(config: RunConfig, data: RunData, *, with_services: bool) -> None:
    """Requests a first score from reward services and opens the repository on the hub, so that problems show before
    training."""
    if with_services:
        try_sources(config.rewards, config.reward_names, first_answer(data), data.tokenizer)
    if config.train.push_to_hub:
        hub_repository(config)


def open_log(config: RunConfig, display: Display, dist: Dist) -> RunLog:
    """The log of this process; only the main process writes metrics, samples and trackers."""
    folder = config.output_dir
    if dist.num_processes > 1:
        display = ProcessLog(folder / LOGS / f"process-{dist.rank}.log", display)
    trackers = trackers_of(config, is_main=dist.is_main)
    return RunLog(folder if dist.is_main else None, display, trackers, logging_steps=config.train.logging_steps)
