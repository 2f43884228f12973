"""Runs SFT, reward model and PPO in sequence; skips finished stages and resumes interrupted ones.

A stage's folder shows how far the stage is: if it has a manifest whose files are whole, it is finished; if it has a
complete checkpoint, it is resumed; otherwise it starts again. All stages are checked before the first loads a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from tether.config.base import Section, differences
from tether.config.chat import with_now
from tether.config.load import check_kind, parse_config
from tether.config.pipeline import Pipeline
from tether.config.reward_stage import RewardStageConfig
from tether.config.rewards import AdapterReward, EnsembleReward, OwnModelReward, RewardConfig
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftStageConfig
from tether.errors import ConfigError, TetherError
from tether.machine.claim import claimed
from tether.machine.distributed import Dist
from tether.models.saving import is_whole
from tether.stages import reward as reward_stage
from tether.stages import same_run as same_stage
from tether.stages import sft as sft_stage
from tether.stages.begin import as_launched, check_launch
from tether.stages.checkpoints import newest_checkpoint
from tether.stages.engine import stage_engine
from tether.stages.folder import check_folder, clear, is_empty
from tether.stages.reward import RewardStageResult, train_reward_model
from tether.stages.sft import SftResult, train_sft
from tether.stages.watch import check_same_engine
from tether.train import inputs
from tether.train.checkpoint import last_complete
from tether.train.display import Display, NullDisplay
from tether.train.folder import CONFIG, CRITIC, other_contents, prepare_folder, recorded
from tether.train.folder import check_folder as check_run_folder
from tether.train.interrupt import StopRequest
from tether.train.run import check_processes, train_policy, try_outside
from tether.train.same_run import may_change

State = Literal["finished", "begun", "new"]
ResultT = TypeVar("ResultT", SftResult, RewardStageResult)


@dataclass(frozen=True)
class PipelineResult:
    """Result of a pipeline."""

    folders: Mapping[str, Path]
    """Folder of each finished stage by name."""
    interrupted: str | None = None
    """Why it stopped early, with its state saved, or None."""


def run_pipeline(pipeline: Pipeline, *, display: Display | None = None) -> PipelineResult:
    """Runs every stage that is not finished.

    Args:
        display: shows the progress of all stages; None: nothing is shown.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: a mistake in any stage, found before a model is loaded
            wherever possible.
        TetherError: a stage failed. Those before it are finished, and the next call continues from there.
    """
    check_kind(pipeline, Pipeline, "run_pipeline", "load_pipeline(path)")
    shared = pipeline.shared
    dist = Dist(max(config.train.ddp_timeout for config in pipeline.stages.values()))
    display = display if display is not None and dist.is_main else NullDisplay()
    with ExitStack() as stack:
        dist.by_main(lambda: stack.enter_context(claimed(shared.output_dir)))
        states = dist.by_main(
            lambda: {
                name: "new" if shared.overwrite_output_dir else _state(config)
                for name, config in pipeline.stages.items()
            }
        )
        dist.each(lambda: _check_order(pipeline, states))
        dist.each(lambda: _check_kept(pipeline, states))
        ready = dist.by_main(
            lambda: {
                name: _ready(config, states[name])
                for name, config in pipeline.stages.items()
                if states[name] != "finished"
            }
        )
        dist.each(lambda: check_pipeline(pipeline, ready, dist, display))
        if shared.overwrite_output_dir:
            dist.by_main(lambda: _clear_later(pipeline))
        finished: dict[str, Path] = {}
        for name, config in pipeline.stages.items():
            if name not in ready:
                display.message(f"{name}: finished in {config.output_dir}")
                finished[name] = config.output_dir
                continue
            display.message(f"{name}: {'continues' if states[name] == 'begun' else 'starts'} in {config.output_dir}")
            is_finished, asked = run_stage(ready[name], display)
            if is_finished:
                finished[name] = config.output_dir
            if (reason := dist.first(asked)) is not None and len(finished) < len(pipeline.stages):
                return PipelineResult(finished, reason)
        return PipelineResult(finished)


def run_stage(config: Section, display: Display) -> tuple[bool, str | None]:
    """Runs one stage and shows its results. Returns whether it is finished, and why it was asked to stop, if it was: a
    signal may arrive after its last step."""
    if isinstance(config, RunConfig):
        result = train_policy(config, display=display)  # handles signals itself, once it has a state to save
        display.close()
        return result.interrupted is None, result.interrupted
    with StopRequest() as stop:
        if isinstance(config, SftStageConfig):
            reason = run_sft(config, display, stop).interrupted
        else:
            reason = run_reward(config, display, stop).interrupted
    return reason is None, reason or stop.reason


def run_sft(config: SftStageConfig, display: Display, stop: StopRequest | None = None) -> SftResult:
    """Runs ``train_sft``, shown on a display and stopped by signals; by those of ``stop`` if it is given."""
    return _shown(train_sft, config, "policy", display, stop)


def run_reward(config: RewardStageConfig, display: Display, stop: StopRequest | None = None) -> RewardStageResult:
    """Runs ``train_reward_model`` in the same way as ``run_sft``."""
    result = _shown(train_reward_model, config, "reward model", display, stop)
    if result.accuracy_by_length:
        rows = [
            ["-".join(map(str, group["tokens"])), group["pairs"], group["accuracy"]]
            for group in result.accuracy_by_length
        ]
        display.table("accuracy by length", ["tokens of the longer answer", "pairs", "accuracy"], rows)
    return result


def _shown(
    train: Callable[..., ResultT], config: Section, made: str, display: Display, stop: StopRequest | None
) -> ResultT:
    """Trains a stage, shown on a display and stopped by signals.

    Args:
        made: what the stage makes, as the title of its results.
    """
    with nullcontext(stop) if stop is not None else StopRequest() as noticed:
        result = train(config, on_progress=display.update, tell=display.message, stop=lambda: noticed.reason)
    display.close()
    if result.metrics and result.interrupted is None:
        display.table(made, ["metric", "value"], list(result.metrics.items()))
    return result


# Before a model is loaded


def check_pipeline(pipeline: Pipeline, ready: Mapping[str, Section], dist: Dist, display: Display) -> None:
    """Raises for every mistake in every unfinished stage that can be found before a model is loaded.

    A model that an earlier stage has yet to train is replaced by the one that stage starts from, which has the same
    tokens, shape and templates.

    Args:
        ready: each unfinished stage as it will run.
        dist: the launched processes.
        display: shows warnings.
    """
    missing = {_place(config.output_dir): config for config in ready.values()}
    for name in ready:
        try:
            for note in _check(_on_start(pipeline.stages[name], missing), ready[name], name, dist):
                display.message(f"warning: in the section {name}: {note}")
        except TetherError as error:
            error.add_note(f"in the section {name}")
            raise


def _check(config: Section, ready: Section, name: str, dist: Dist) -> list[str]:
    """Checks a stage; returns warnings.

    Args:
        config: the stage, using models that already exist.
        ready: the stage as it will run.
        name: its section, which is also its command.
        dist: the launched processes.
    """
    if isinstance(config, RunConfig):
        inputs.check(config)
        check_processes(config, dist)
        check_run_folder(ready)
        config = inputs.resolved(config)
        data = inputs.load_data(config)
        notes = inputs.check_data(config, data, has_policy=config.model.path == ready.model.path)
        if dist.is_main:
            try_outside(config, data, with_services=True)
        return notes
    stage = sft_stage if isinstance(config, SftStageConfig) else reward_stage
    check_launch(config, dist)
    stage.check(as_launched(config))
    check_folder(ready)
    if ready.resume:
        found = newest_checkpoint(ready.output_dir, lambda text: None)
        check_same_engine(found, stage_engine(dist), dist)
    stage.load_data(config)
    return []


def _on_start(config: Any, missing: Mapping[Path, Any]) -> Any:
    """The stage with the start model of sft in place of the model that sft has yet to train, and without rewards and a
    start of the critic that have yet to be trained.

    Args:
        missing: the unfinished stages by folder.
    """
    made = missing.get(_place(config.model.path))
    if made is not None:
        start = {"path": made.model.path, "revision": made.model.revision}
        changes: dict[str, Any] = {"model": config.model.model_copy(update=start)}
        if config.data.chat_template == "auto" and made.data.chat_template != "none":
            changes["data"] = config.data.model_copy(update={"chat_template": made.data.chat_template})
        config = config.model_copy(update=changes)
    if isinstance(config, RunConfig):
        changes = {"rewards": _there(config.rewards, missing)}
        critic = config.value.init_path or getattr(config.rewards[0], "path", None)
        if critic is not None and _place(critic) in missing:
            changes["value"] = config.value.model_copy(update={"init": "policy"})
        config = config.model_copy(update=changes)
    return config


def _there(rewards: Sequence[RewardConfig], missing: Collection[Path]) -> list[RewardConfig]:
    """The reward sources, and members of ensembles, except models in missing folders."""
    there = []
    for reward in rewards:
        if isinstance(reward, EnsembleReward):
            reward = reward.model_copy(update={"members": _there(reward.members, missing)})
        if not (isinstance(reward, AdapterReward | OwnModelReward) and _place(reward.path) in missing):
            there.append(reward)
    return there


def _place(path: str | Path) -> Path:
    """The resolved path of a folder."""
    return Path(path).resolve()


def _check_kept(pipeline: Pipeline, states: Mapping[str, State]) -> None:
    """Raises ``ConfigError`` if a stage reads a model that a later one would overwrite."""
    later = {name: config.output_dir for name, config in pipeline.stages.items() if states[name] != "finished"}
    for name, config in pipeline.stages.items():
        later.pop(name, None)
        for key, path in _read(config).items() if states[name] != "finished" else ():
            for writer, folder in later.items():
                if _place(path).is_relative_to(_place(folder)):
                    raise ConfigError(
                        f"output_dir: {writer} would overwrite {path}, which {name}.{key} names; choose another "
                        "output_dir, or copy the model to another folder"
                    )


def _read(config: Any) -> dict[str, str]:
    """Key and path of every model that a stage reads."""
    return inputs.model_paths(config) if isinstance(config, RunConfig) else {"model.path": config.model.path}


def _clear_later(pipeline: Pipeline) -> None:
    """Removes what an earlier run wrote to the folders of all stages but the first: a pipeline that is stopped before
    they begin must not find them finished later, or resume from checkpoints of models that no longer exist."""
    for config in list(pipeline.stages.values())[1:]:
        if is_empty(config.output_dir):
            continue
        if isinstance(config, RunConfig):
            with claimed(config.output_dir):
                prepare_folder(_ready(inputs.resolved(config), "new"), None, continues=False, tell=lambda text: None)
        else:
            clear(as_launched(config))


# How far a stage is


def _state(config: Any) -> State:
    """How far a stage is, according to its folder.

    Raises:
        ConfigError: the folder holds the stage with a different configuration.
    """
    folder = config.output_dir
    if not (folder / CONFIG).is_file():
        return "new"
    is_finished = is_whole(folder)
    _check_same(config, folder, is_finished=is_finished)
    if isinstance(config, RunConfig) and config.value.save:
        is_finished = is_finished and is_whole(folder / CRITIC)
    return "finished" if is_finished else "begun"


def _check_order(pipeline: Pipeline, states: Mapping[str, State]) -> None:
    """Raises ``ConfigError`` if a finished stage was made from one that is to run."""
    for name, config in pipeline.stages.items():
        read = {_place(path) for path in _read(config).values()}
        for earlier, before in pipeline.stages.items():
            if states[name] == "finished" and states[earlier] != "finished" and _place(before.output_dir) in read:
                raise ConfigError(
                    f"output_dir: {config.output_dir} holds {name}, made from an earlier {earlier}, which is now to be "
                    f"trained again. Remove it to run {name} anew, or choose another output_dir"
                )


def _check_same(config: Any, folder: Path, *, is_finished: bool) -> None:
    """Raises ``ConfigError`` if the stage in ``folder`` cannot be resumed with this configuration, or if it is finished
    and this configuration would change its result."""
    saved = parse_config((folder / CONFIG).read_text(encoding="utf-8"), type(config), source=str(folder / CONFIG))
    now = inputs.resolved(config) if isinstance(config, RunConfig) else as_launched(config)
    now = with_now(now, saved.data.chat_template_now)
    differing = [
        key for key in differences(saved, now) if not _may_change(config, key, is_finished=is_finished)
    ]
    if differing := differing and _other_contents(now, differing, folder):
        raise ConfigError(
            f"output_dir: {folder} holds this stage with a different {' and '.join(differing[:3])}. Choose another "
            "output_dir, or add --overwrite to run all stages anew"
        )


def _may_change(config: Any, key: str, *, is_finished: bool) -> bool:
    if not isinstance(config, RunConfig):
        return same_stage.may_change(key, is_finished=is_finished)
    return may_change(key, is_finished=is_finished)


def _other_contents(config: Any, changed: Sequence[str], folder: Path) -> list[str]:
    """Keys that changed since the stage in ``folder`` in more than the places of inputs, else sets of other rows."""
    if isinstance(config, RunConfig):
        return other_contents(config, changed, recorded(folder), lambda: inputs.load_data(config))
    stage = sft_stage if isinstance(config, SftStageConfig) else reward_stage
    return same_stage.other_contents(config, changed, stage.read_now)


def _ready(config: Any, state: State) -> Any:
    """The stage as it is to run: from the start, or from its newest complete checkpoint."""
    folder = config.output_dir
    if is_empty(folder):
        return config
    if state == "begun" and _has_checkpoint(config):
        return config.model_copy(update={"resume": True})
    return config.model_copy(update={"overwrite_output_dir": True})


def _has_checkpoint(config: Any) -> bool:
    if not isinstance(config, RunConfig):
        return newest_checkpoint(config.output_dir, lambda text: None) is not None
    return last_complete(config.output_dir, contents=True) is not None
