"""checkpoint-N folders: the policy as a plain model folder, and next to it what is needed to resume the run.

    checkpoint-N/
      config.json, model.safetensors, … or adapter_config.json, …     the policy, for transformers or PEFT
      tether_state/state.json        counters, KL coefficient, score statistics, best evaluation, configuration
      tether_state/roles.safetensors trained weights of policy and critic, in the dtypes used in training
      tether_state/optimizers.pt     optimizers and schedules, tensors and numbers only
      tether_state/average.safetensors    moving average of the trained weights, if kept; the policy above is then it
      tether_state/random.pt         states of the random generators of Python, NumPy and torch in each process, which
                                     reward functions may draw from
      manifest.json                  size and SHA-256 of every file

A folder appears complete or not at all. Sampling and shuffling draw from keys made of seed and counters, so the
counters are their entire random state.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.algo import ScoreMoments
from tether.config.keys import counted
from tether.config.load import dump_config, parse_config
from tether.config.schema import RunConfig, TrainConfig
from tether.errors import CheckpointError, ConfigError, TrainingError
from tether.machine.claim import claimed
from tether.machine.distributed import met_by_all
from tether.metrics.reduce import improves
from tether.metrics.writers import read_jsonl
from tether.models.checkpoints import METRICS, list_checkpoints, way_on
from tether.models.roles import ModelRoles
from tether.models.saving import (
    TRIAL,
    atomic_folder,
    files_written,
    may_run_out,
    policy_weights,
    put_back,
    save_policy,
    verify_manifest,
)
from tether.report.card import write_card
from tether.report.text import byte_size
from tether.train.ema import PolicyAverage
from tether.train.engines.base import Engine
from tether.train.optim import MOMENT_BYTES, PassOptimizer
from tether.train.parts import Parts
from tether.train.random_state import random_states, set_random_states

STATE_DIR, STATE, ROLES = "tether_state", "state.json", "roles.safetensors"
OPTIMIZERS, AVERAGE, RANDOM = "optimizers.pt", "average.safetensors", "random.pt"


@dataclass
class RunState:
    """The state of a run apart from weights and optimizers."""

    kl_coef: float
    """Current coefficient of the KL penalty."""
    score_moments: ScoreMoments = field(default_factory=ScoreMoments)
    """Moments that scores are normalized by: those of the start policy's scores, or of all scores so far."""
    eval_moments: ScoreMoments = field(default_factory=ScoreMoments)
    """With ``score_norm: running``, moments that evaluations normalize scores by: those of the first evaluation."""
    source_moments: dict[str, ScoreMoments] = field(default_factory=dict)
    """Moments of the start policy's scores, for each source with ``norm: auto``, by name."""
    step: int = 0
    """Number of finished updates."""
    evaluated_step: int | None = None
    """Update after which the last evaluation ran."""
    saved_step: int | None = None
    """Update after which the last checkpoint was written."""
    best_metric: float | None = None
    """Best value of ``metric_for_best_model`` so far."""
    best_step: int | None = None
    """Update that ``best_metric`` belongs to."""
    had_tokens: bool = False
    """Whether a token took part in the losses of any update so far."""
    bad_batches: int = 0
    """Number of consecutive batches skipped because something in them was not finite."""
    halvings: int = 0
    """How often micro-batches were halved because they did not fit into memory."""
    decode_batch_size: int | None = None
    """Number of answers decoded at once, less than ``sampling.batch_size`` if that many did not fit into memory; None
    in the trial checkpoint at the start."""
    is_critic_scaled: bool = False
    """Whether a critic that is a copy of the first reward source was put on the scale of the scores to train on."""
    callbacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """States of the callbacks that have one, by class, in the format of ``transformers``."""

    def note_evaluation(self, metrics: dict[str, float], train: TrainConfig) -> bool:
        """Records an evaluation; returns whether it is the best so far, in a run that keeps the best."""
        name = train.metric_for_best_model
        if name is None:
            return False
        value = metrics[name]
        if not improves(value, self.best_metric, greater_is_better=train.greater_is_better):
            return False
        self.best_metric, self.best_step = value, self.step
        return True


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, gathered from all processes."""

    step: int
    """Number of finished updates."""
    record: dict[str, Any]
    """Contents of state.json."""
    policy: Mapping[str, Tensor] | None
    """Weights of the policy's folder, if no process holds them as a whole."""
    roles: Mapping[str, Tensor]
    """Trained weights of policy and critic."""
    optimizers: Mapping[str, Any]
    """States of optimizers and schedules, by name."""
    average: Mapping[str, Tensor] | None
    """The moving average of the policy's trained weights, if one is kept."""
    random: list[dict[str, Any]]
    """States of the random generators, of each process."""


class Checkpoints:
    """Writes, finds, restores and deletes the checkpoints of one run.

    Args:
        read: ``fingerprints`` of what the run reads.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        optimizers: list[PassOptimizer],
        average: PolicyAverage | None,
        read: Mapping[str, str],
    ) -> None:
        self.config, self.roles, self.tokenizer = config, parts.roles, parts.tokenizer
        self.dist, self.engine = parts.dist, parts.engine
        self.optimizers, self.average, self.read = optimizers, average, read

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` updates."""
        return self.config.output_dir / f"checkpoint-{step}"

    def try_saving(self, state: RunState, num_updates: int) -> None:
        """Writes a trial checkpoint at the start, reads it back and deletes it, so that problems show before training.

        Raises:
            ConfigError: it cannot be written, or the disk has no room for the checkpoints of the run.
        """
        contents = self._contents(state)

        def write() -> None:
            trial = self.config.output_dir / TRIAL
            try:
                with atomic_folder(trial) as folder:
                    self._write(folder, contents)
                verify_manifest(trial)
                size = sum(file.stat().st_size for file in trial.rglob("*") if file.is_file())
                policy = sum(file.stat().st_size for file in trial.iterdir() if file.is_file())
            except (OSError, RuntimeError, SafetensorError) as error:
                raise ConfigError(f"output_dir: no checkpoint can be written to {self._where()}: {error}") from error
            finally:
                shutil.rmtree(trial, ignore_errors=True)
            self._check_room(size + self._moments_to_come(contents), policy, num_updates)

        self.dist.by_main(write)

    def save(self, state: RunState) -> Path:
        """Writes checkpoint-N for the current state, then deletes checkpoints beyond ``save_total_limit``.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are unchanged.
            TrainingError: a weight is not finite, so training could not resume from it.
        """
        path = self.path(state.step)
        self._check_weights(path)
        before, state.saved_step = state.saved_step, state.step
        contents = self._contents(state)

        def write() -> None:
            try:
                with atomic_folder(path) as folder:
                    self._write(folder, contents)
            except (OSError, RuntimeError, SafetensorError) as error:
                state.saved_step = before
                raise CheckpointError(
                    f"{path} could not be written to {self._where()}: {error}. {self.way_on()}"
                ) from error
            self._drop_old(state)

        self.dist.by_main(write)
        return path

    def way_on(self) -> str:
        """Names the checkpoint to resume from, in a sentence for the message that a run ends with."""
        return way_on(last_complete(self.config.output_dir))

    def may_run_out(self) -> AbstractContextManager[None]:
        """Within this context, errors of the disk become a message that names the checkpoint to resume from.

        Raises:
            CheckpointError: the disk cannot be written to any more.
        """
        return may_run_out(self.config.output_dir, self.way_on)

    def _where(self) -> str:
        folder = self.config.output_dir
        return f"{folder} ({byte_size(shutil.disk_usage(folder).free)} free)"

    def _contents(self, state: RunState) -> Contents:
        """Gathers the contents of a checkpoint from all processes."""
        with self._averaged():
            policy = kept_whole(self.engine, policy_weights, self.roles)
        averaged = self.average
        return Contents(
            step=state.step,
            record={
                **asdict(state),
                "config": dump_config(self.config),
                "data": dict(self.read),
                "num_processes": self.dist.num_processes,
                "engine": self.engine.name,
            },
            policy=policy,
            roles=self.engine.full(self.roles.trained),
            optimizers={o.name: self.engine.optimizer_state(o) for o in self.optimizers},
            average=None if averaged is None else self.engine.full(averaged.parameters, averaged.state_dict()),
            random=self.dist.gathered(random_states()),
        )

    def _write(self, folder: Path, contents: Contents) -> None:
        with self._averaged():
            save_policy(self.roles, self.tokenizer, folder, contents.policy)
        write_card(folder, self.config.output_dir, step=contents.step)
        inner = folder / STATE_DIR
        inner.mkdir()
        (inner / STATE).write_text(json.dumps(contents.record, indent=1), encoding="utf-8")
        save_file({k: v.contiguous() for k, v in contents.roles.items()}, inner / ROLES)
        if contents.average is not None:
            save_file(contents.average, inner / AVERAGE)
        torch.save(contents.optimizers, inner / OPTIMIZERS)
        torch.save(contents.random, inner / RANDOM)

    def _averaged(self) -> AbstractContextManager[None]:
        """Within this context, the policy has the weights of its moving average, if one is kept."""
        return nullcontext() if self.average is None else self.average.applied()

    def _check_weights(self, path: Path) -> None:
        parts = {name: self.engine.part(p) for name, p in self.roles.trained.items()}
        found = self.dist.gathered([name for name, x in parts.items() if not bool(torch.isfinite(x).all())])
        bad = [name for name in parts if any(name in theirs for theirs in found)]
        if bad:
            told = f"{path} is not written: not finite in {counted(len(bad), 'weight tensor')}, the first is {bad[0]}"
            raise met_by_all(TrainingError(told))

    def _moments_to_come(self, contents: Contents) -> int:
        """Size in bytes of the optimizer moments that a checkpoint at the start does not contain yet. Engines differ in
        when they create moments, and hold only parts of the parameters here. A user's optimizer may hold others too,
        which do not train and never get moments."""
        sizes, count = {id(p): contents.roles[name].numel() for name, p in self.roles.trained.items()}, 0
        for optimizer in self.optimizers:
            held = contents.optimizers[optimizer.name]["optimizer"]["state"]
            parameters = (p for group in optimizer.optimizer.param_groups for p in group["params"])
            count += sum(sizes.get(id(p), 0) for i, p in enumerate(parameters) if i not in held)
        return int(MOMENT_BYTES[self.config.train.optim] * count)

    def _check_room(self, size: int, policy: int, num_updates: int) -> None:
        """Raises ``ConfigError`` if there is no room for the trained policy and as many checkpoints of ``size`` bytes
        as will exist at once."""
        train = self.config.train
        kept = most_checkpoints(train, num_updates)
        if train.save_total_limit is not None:  # a new one is written before an old one is deleted
            keeps_best = train.metric_for_best_model is not None
            kept = min(kept, train.save_total_limit + 1 + keeps_best)
        free = shutil.disk_usage(self.config.output_dir).free
        if (needed := kept * size + policy) > free:
            raise ConfigError(
                f"output_dir: {counted(kept, 'checkpoint')} of {byte_size(size)} and the trained policy need "
                f"{byte_size(needed)}, {self.config.output_dir} has {byte_size(free)} free. Make room, name a folder "
                "on another disk, or keep fewer of them with train.save_total_limit"
            )

    def restore(self, path: Path) -> RunState:
        """Restores roles and optimizers from ``path``; returns the run's state.

        Raises:
            CheckpointError: a part of it is missing, cannot be read, or belongs to another run.
        """
        try:
            return self._restored(path)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise CheckpointError(f"{path} does not fit this run: {type(error).__name__}: {error}") from error

    def _restored(self, path: Path) -> RunState:
        record = read_state(path)
        self.restore_weights_from(path)
        states = _loaded(path, OPTIMIZERS, mapped=True)
        missing = {o.name for o in self.optimizers} ^ set(states)
        if missing:
            raise CheckpointError(f"{path}: optimizer state does not fit the run's roles: {', '.join(sorted(missing))}")
        for optimizer in self.optimizers:
            self.engine.load_optimizer_state(optimizer, states[optimizer.name])
        saved = parse_config(record["config"], RunConfig)
        own = {each.name: record[each.name] for each in fields(RunState)}
        sources = {name: ScoreMoments(**moments) for name, moments in own["source_moments"].items()}
        moments = {name: ScoreMoments(**own[name]) for name in ("score_moments", "eval_moments")}
        state = RunState(**own | moments | {"source_moments": sources})
        self._fit_memory(state, saved)
        if _criterion(self.config) != _criterion(saved) or not self._has_best(state):
            state.best_metric = state.best_step = None  # measured by another criterion, or its checkpoint is gone
        states = _loaded(path, RANDOM)
        set_random_states(states[self.dist.rank if self.dist.rank < len(states) else 0])
        return state

    def _fit_memory(self, state: RunState, saved: RunConfig) -> None:
        """Discards sizes that were found to fit into memory if the configuration now sets others."""
        sizes = [(c.train.micro_batch_size, c.train.max_tokens_per_micro_batch) for c in (saved, self.config)]
        if sizes[0] != sizes[1]:
            state.halvings = 0
        before, most = saved.sampling.batch_size, self.config.sampling.batch_size
        if state.decode_batch_size is not None and before != most:
            state.decode_batch_size = most if state.decode_batch_size == before else min(state.decode_batch_size, most)

    def restore_weights(self, step: int) -> None:
        """Restores the weights of policy and critic, and the average, to those after ``step`` updates."""
        self.dist.each(lambda: verify(self.path(step)))
        self.restore_weights_from(self.path(step))

    def restore_weights_from(self, path: Path) -> None:
        """Restores the weights of policy and critic, and the average, from ``path``."""
        self.roles.load_state_dict(_tensors(path, ROLES), self.engine.fill)
        if self.average is not None:
            self.average.load_state_dict(_tensors(path, AVERAGE), self.engine.cut)

    def _has_best(self, state: RunState) -> bool:
        return state.best_step is not None and self.path(state.best_step).is_dir()

    def _drop_old(self, state: RunState) -> None:
        limit = self.config.train.save_total_limit
        if limit is None:
            return
        paths = list_checkpoints(self.config.output_dir)
        best = self.path(state.best_step if state.best_step is not None else -1)
        dropped = [path for path in paths[:-limit] if path != best]
        if dropped:
            verify(self.path(state.step))  # read back what stays before deleting anything
        for path in dropped:
            shutil.rmtree(path)


def most_checkpoints(train: TrainConfig, num_updates: int) -> int:
    """Number of checkpoints that a run writes, if every evaluation is the best so far. Counted, not listed: a run that
    trains until it is stopped may be given any number of updates."""
    saves = _times(train.save_steps, num_updates)
    own = saves or 1  # one if the run is stopped
    if train.metric_for_best_model is None:
        return own
    periods = [steps for steps in (train.save_steps, train.eval_steps) if steps is not None]
    both = num_updates // math.lcm(*periods) if len(periods) == 2 else 0
    at_end = all(num_updates % steps for steps in periods)
    return own + _times(train.eval_steps, num_updates) - both + 1 + at_end  # one before the first update


def _times(steps: int | None, num_updates: int) -> int:
    """How often something happens every ``steps`` updates."""
    return 0 if steps is None else num_updates // steps


def _criterion(config: RunConfig) -> tuple[str | None, bool]:
    """The criterion for the best evaluation."""
    return config.train.metric_for_best_model, config.train.greater_is_better


def kept_whole(
    engine: Engine, weights: Callable[[ModelRoles], Mapping[str, Tensor]], roles: ModelRoles
) -> dict[str, Tensor] | None:
    """Weights for a folder, gathered for the main process; None if every process has all of them."""
    return engine.full(weights(roles)) if engine.spreads_weights else None


def verify(path: Path, *, contents: bool = True) -> None:
    """Checks that a checkpoint is as it was written, and has every file that all runs need.

    Args:
        contents: as in ``verify_manifest``.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
    """
    verify_manifest(path, contents=contents)
    listed = files_written(path)
    for name in (STATE, ROLES, OPTIMIZERS, RANDOM):
        _piece(path, name)
        if f"{STATE_DIR}/{name}" not in listed:
            raise CheckpointError(f"{path}: its manifest does not list {STATE_DIR}/{name}")


def last_complete(
    output_dir: Path, *, contents: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Path | None:
    """The newest checkpoint in ``output_dir`` that has all its files, or None.

    Args:
        contents: as in ``verify``. By default only the length of files is checked, so that the message at the end of a
            run does not wait for gigabytes to be read.
        tell: called with a line about every damaged checkpoint that is skipped.
    """
    for path in reversed(list_checkpoints(output_dir)):
        try:
            verify(path, contents=contents)
        except CheckpointError as error:
            tell(f"{error}; trying the checkpoint before it")
            continue
        return path
    return None


def find_checkpoint(config: RunConfig, *, tell: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, verified; None if the run starts from scratch.

    A damaged one is skipped in favor of the one before it, and ``tell`` is called with a line about it. With
    ``resume: auto``, a run starts from scratch if no update was recorded.

    Raises:
        CheckpointError: ``resume`` is set, but there is no complete checkpoint.
    """
    if config.resume is False:
        return None
    if isinstance(config.resume, str) and config.resume != "auto":
        path = Path(config.resume)
        if not (path / STATE_DIR / STATE).is_file():
            raise CheckpointError(f"resume: {path} is not a checkpoint of a run (no {STATE_DIR}/{STATE})")
        verify(path)
        return path
    for replaced in config.output_dir.glob(".checkpoint-*.replaced"):
        with claimed(config.output_dir):
            put_back(replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced")))
    path = last_complete(config.output_dir, contents=True, tell=tell)
    if path is not None:
        return path
    if config.resume == "auto" and not has_updates(config.output_dir):
        return None
    raise CheckpointError(
        f"resume: no complete checkpoint in {config.output_dir}; run without --resume to start, or with --overwrite to "
        "replace an earlier run, and set train.save_steps to write checkpoints. If the folder of the run has moved, "
        "name its new place as output_dir"
    )


def has_updates(output_dir: Path) -> bool:
    """Whether a run recorded a finished update in ``output_dir``."""
    metrics = output_dir / METRICS
    return metrics.is_file() and any("eval_scores" not in row for row in read_jsonl(metrics))


def read_state(path: Path) -> dict[str, Any]:
    """Counters, configuration and data fingerprints saved in a checkpoint.

    Raises:
        CheckpointError: the file is missing or unreadable, or an entry is missing or unknown; names it.
    """
    file = _piece(path, STATE)
    try:
        record = dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    wanted = {each.name for each in fields(RunState)} | {"config", "data", "num_processes", "engine"}
    if odd := sorted(wanted ^ record.keys()):
        raise CheckpointError(
            f"{file}: {', '.join(odd)} {'is missing' if odd[0] in wanted else 'is unknown'}; the checkpoint was "
            "written by another version of Tether"
        )
    return record


def _piece(path: Path, name: str) -> Path:
    """Path of a file of a checkpoint's state, which must exist."""
    file = path / STATE_DIR / name
    if not file.is_file():
        raise CheckpointError(f"resume: {path} has no {STATE_DIR}/{name}, which the run needs to resume")
    return file


def _tensors(path: Path, name: str) -> dict[str, Tensor]:
    file = _piece(path, name)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _loaded(path: Path, name: str, *, mapped: bool = False) -> Any:
    """Loads a file of tensors and numbers; refuses one that would run code when loaded.

    Args:
        mapped: whether to read tensors only when needed, so that processes which each need a part do not all hold the
            whole.
    """
    file = _piece(path, name)
    try:
        return torch.load(file, weights_only=True, map_location="cpu", mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(f"{file} holds more than tensors and numbers, or is not a torch file") from error
