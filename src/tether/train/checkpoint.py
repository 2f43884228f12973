"""checkpoint-N folders: the policy as a plain model folder, and beside it what the run needs to go on.

    checkpoint-N/
      config.json, model.safetensors, … or adapter_config.json, …     the policy, for transformers or PEFT
      tether_state/state.json        counters, KL coefficient, score statistics, best evaluation, configuration
      tether_state/roles.safetensors trained weights of policy and critic, in the types they train in
      tether_state/optimizers.pt     optimizers and schedules, tensors and numbers only
      tether_state/average.safetensors    the trained weights under a moving average, which the policy above then is
      manifest.json                  size and SHA-256 of every file

A folder appears complete or not at all. Sampling and shuffling draw from keys made of seed and counters, so the
counters are the whole random state.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from tether.algo import ScoreMoments
from tether.config.load import dump_config, parse_config
from tether.config.schema import RunConfig, TrainConfig
from tether.errors import CheckpointError
from tether.models.roles import ModelRoles
from tether.models.saving import atomic_folder, save_policy, verify_manifest
from tether.report.card import write_card
from tether.train.ema import PolicyAverage
from tether.train.optim import PassOptimizer

STATE_DIR, AVERAGE = "tether_state", "average.safetensors"
MAY_CHANGE = frozenset({
    "resume", "overwrite_output_dir", "output_dir", "train.total_episodes", "train.num_train_epochs", "train.max_steps",
    "train.logging_steps", "train.log_samples", "train.eval_steps", "train.save_steps", "train.save_total_limit",
    "train.report_to", "train.run_name", "train.max_runtime", "train.metric_for_best_model", "train.greater_is_better",
    "train.load_best_model_at_end", "value.save", "train.push_to_hub", "train.hub_model_id", "train.hub_private_repo",
})
"""Keys that a resumed run may change."""
SERVICE_MAY_CHANGE = re.compile(
    r"rewards\.\d+\.(members\.\d+\.)?"
    r"(url|base_url|api_key_env|connect_timeout|read_timeout|retries|retry_delay|max_concurrency)"
)
"""Also these, of where and how a reward service is asked: services fail, and move."""


@dataclass
class RunState:
    """Everything of a run that is neither a weight nor an optimizer."""

    kl_coef: float
    """Present coefficient of the KL penalty."""
    score_moments: ScoreMoments = field(default_factory=ScoreMoments)
    """What scores are normalised by: of the start policy's, or of all scores so far."""
    source_moments: dict[str, ScoreMoments] = field(default_factory=dict)
    """By name, what the scores of sources with ``norm: auto`` are normalised by: of the start policy's."""
    step: int = 0
    """Finished updates."""
    evaluated_step: int | None = None
    """Update after which the last evaluation ran."""
    saved_step: int | None = None
    """Update after which the last checkpoint was written."""
    best_metric: float | None = None
    """Best value of ``metric_for_best_model`` so far."""
    best_step: int | None = None
    """Update that it belongs to."""

    def note_evaluation(self, metrics: dict[str, float], train: TrainConfig) -> bool:
        """Remembers an evaluation; returns whether it is the best so far of a run that keeps the best."""
        name = train.metric_for_best_model
        if name is None:
            return False
        value = metrics[name]
        if not improves(value, self.best_metric, greater_is_better=train.greater_is_better):
            return False
        self.best_metric, self.best_step = value, self.step
        return True


def improves(value: float, best: float | None, *, greater_is_better: bool) -> bool:
    """Whether an evaluation's metric is better than the best before it; the first one is."""
    return best is None or (value > best if greater_is_better else value < best)


class Checkpoints:
    """Writes, finds, restores and drops the checkpoints of one run."""

    def __init__(
        self,
        config: RunConfig,
        roles: ModelRoles,
        tokenizer: PreTrainedTokenizerBase,
        optimizers: list[PassOptimizer],
        average: PolicyAverage | None,
    ) -> None:
        self.config, self.roles, self.tokenizer = config, roles, tokenizer
        self.optimizers, self.average = optimizers, average

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` updates."""
        return self.config.output_dir / f"checkpoint-{step}"

    def save(self, state: RunState) -> Path:
        """Writes checkpoint-N for the present state, then drops checkpoints beyond ``save_total_limit``."""
        state.saved_step = state.step
        path = self.path(state.step)
        with atomic_folder(path) as folder:
            with self.average.applied() if self.average is not None else nullcontext():
                save_policy(self.roles, self.tokenizer, folder)
            write_card(folder, self.config.output_dir, step=state.step)
            inner = folder / STATE_DIR
            inner.mkdir()
            record = {**asdict(state), "config": dump_config(self.config)}
            (inner / "state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
            save_file({k: v.contiguous() for k, v in self.roles.state_dict().items()}, inner / "roles.safetensors")
            if self.average is not None:
                save_file(self.average.state_dict(), inner / AVERAGE)
            torch.save({o.name: o.state_dict() for o in self.optimizers}, inner / "optimizers.pt")
        self._drop_old(state)
        return path

    def restore(self, path: Path) -> RunState:
        """Brings roles and optimizers to the state saved in ``path``; returns the counters."""
        record = read_state(path)
        self.restore_weights_from(path)
        states = torch.load(path / STATE_DIR / "optimizers.pt", weights_only=True, map_location="cpu")
        missing = {o.name for o in self.optimizers} ^ set(states)
        if missing:
            raise CheckpointError(f"{path}: optimizer state does not fit the run's roles: {', '.join(sorted(missing))}")
        for optimizer in self.optimizers:
            optimizer.load_state_dict(states[optimizer.name])
        saved = parse_config(record.pop("config"), RunConfig).train
        sources = {name: ScoreMoments(**moments) for name, moments in record.get("source_moments", {}).items()}
        moments = {"score_moments": ScoreMoments(**record["score_moments"]), "source_moments": sources}
        state = RunState(**record | moments)
        criterion = (self.config.train.metric_for_best_model, self.config.train.greater_is_better)
        if criterion != (saved.metric_for_best_model, saved.greater_is_better) or not self._has_best(state):
            state.best_metric = state.best_step = None  # measured by something else, or not there to come back to
        return state

    def restore_weights(self, step: int) -> None:
        """Brings the weights of policy and critic, and their average, back to those after ``step`` updates."""
        verify_manifest(self.path(step))
        self.restore_weights_from(self.path(step))

    def restore_weights_from(self, path: Path) -> None:
        """Brings the weights of policy and critic, and their average, to those saved in ``path``."""
        self.roles.load_state_dict(load_file(path / STATE_DIR / "roles.safetensors"))
        if self.average is not None:
            self.average.load_state_dict(load_file(path / STATE_DIR / AVERAGE))

    def _has_best(self, state: RunState) -> bool:
        return state.best_step is not None and self.path(state.best_step).is_dir()

    def _drop_old(self, state: RunState) -> None:
        limit = self.config.train.save_total_limit
        if limit is None:
            return
        paths = list_checkpoints(self.config.output_dir)
        for path in paths[:-limit]:
            if path != self.path(state.best_step if state.best_step is not None else -1):
                shutil.rmtree(path)


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Finished checkpoints in ``output_dir``, oldest first."""
    named = (path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
    return sorted(named, key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Updates that were finished when the checkpoint was written."""
    return int(path.name.removeprefix("checkpoint-"))


def find_checkpoint(config: RunConfig, *, tell: Any) -> Path | None:
    """The checkpoint to resume from, verified; None if the run starts anew.

    A damaged one is skipped, and ``tell`` is called with a line that says so; the one before it is used.

    Raises:
        CheckpointError: ``resume`` was asked for and nothing complete is there.
    """
    if config.resume is False:
        return None
    if isinstance(config.resume, str):
        path = Path(config.resume)
        if not (path / STATE_DIR / "state.json").is_file():
            raise CheckpointError(f"resume: {path} is not a checkpoint of a run (no {STATE_DIR}/state.json)")
        verify_manifest(path)
        return path
    for path in reversed(list_checkpoints(config.output_dir)):
        try:
            verify_manifest(path)
        except CheckpointError as error:
            tell(f"{error}; trying the checkpoint before it")
            continue
        return path
    raise CheckpointError(
        f"resume: no complete checkpoint in {config.output_dir}; run without --resume to start, "
        "and set train.save_steps to have checkpoints"
    )


def read_state(path: Path) -> dict[str, Any]:
    """Counters and configuration saved in a checkpoint."""
    return json.loads((path / STATE_DIR / "state.json").read_text(encoding="utf-8"))


def check_same_run(saved: dict[str, Any], config: dict[str, Any], path: Path) -> None:
    """Raises ``CheckpointError`` naming every key that differs between a checkpoint's run and this one and may not."""
    before, now = _leaves(saved), _leaves(config)
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and key not in MAY_CHANGE and not SERVICE_MAY_CHANGE.fullmatch(key)
    )
    if changed:
        lines = "\n".join(f"  {key}: was {before.get(key)!r}, now {now.get(key)!r}" for key in changed)
        raise CheckpointError(
            f"resume: {path} was made with another configuration:\n{lines}\n"
            "Put these back, or start a new run in another output_dir."
        )


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {prefix: value}
    return {k: v for key, child in items for k, v in _leaves(child, f"{prefix}.{key}" if prefix else str(key)).items()}
