"""Statistics for score normalization that are measured once, on answers of the start policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tether import algo
from tether.algo import ScoreMoments
from tether.config.schema import RunConfig
from tether.data.stream import PromptStream
from tether.errors import ConfigError, TrainingError
from tether.machine.distributed import met_by_all
from tether.metrics.writers import write_whole
from tether.models.checkpoints import run_folders
from tether.train.checkpoint import STATE, STATE_DIR, RunState
from tether.train.display import PhaseReport
from tether.train.parts import Parts
from tether.train.rollout import Answers, answer
from tether.types import Request, noise_key

SCORE_NORM = "score_norm.json"


def start_answers(parts: Parts, config: RunConfig, *, phase: PhaseReport, check: Callable[[], None]) -> Answers:
    """Generates ``ppo.score_norm_samples`` answers of the current policy, with a separate noise stream.

    Args:
        phase: called with the progress.
        check: called between answers; raises if the run is to stop.
    """
    seed, count = config.train.seed, config.ppo.score_norm_samples
    draws = PromptStream(len(parts.prompts), count, seed).batch(0)
    prompts = [parts.prompts[i] for i, _ in draws]
    requests = [
        Request(prompt.token_ids, noise_key(seed, "score_norm", prompt.row, sample), prompt.before)
        for prompt, (_, sample) in zip(prompts, draws, strict=True)
    ]
    return answer(parts, prompts, requests, phase=phase, check=check, name="score statistics")


def spread(moments: algo.ScoreMoments, what: str, key: str) -> str:
    """A line that describes the statistics used for normalization.

    Args:
        what: what is normalized.
        key: the key that configures it.

    Raises:
        TrainingError: the scores have no spread to normalize by.
    """
    count = f"{moments.count:g} answers of the start policy"
    if moments.var == 0:
        told = (
            f"{what}: all {count} have the score {moments.mean:g}, so there is no spread to normalize by. Leave "
            f"{key} out, or use rewards that tell answers apart"
        )
        raise met_by_all(TrainingError(told))
    return (
        f"{what}: scores are normalized by those of {count}: mean {moments.mean:.3g}, standard deviation "
        f"{moments.var**0.5:.3g}"
    )


def write_norms(path: Path, state: RunState) -> None:
    """Writes the moments that normalized the scores of the run's evaluations, and those of sources with ``norm: auto``,
    for later evaluations."""
    record = asdict(_of_evaluations(state.eval_moments, state.score_moments))
    if state.source_moments:
        record["sources"] = {name: asdict(moments) for name, moments in state.source_moments.items()}
    write_whole(path, json.dumps(record).encode() + b"\n")


def read_norms(run: Path) -> tuple[ScoreMoments, dict[str, ScoreMoments]]:
    """The moments that normalized the scores of the run's evaluations, and by name those of sources with ``norm:
    auto``; for a checkpoint, as of that checkpoint.

    Raises:
        ConfigError: the run has not measured them yet, or their file is damaged.
    """
    if (state := run / STATE_DIR / STATE).is_file():
        with _readable(state):
            record = json.loads(state.read_text(encoding="utf-8"))
            own = (ScoreMoments(**record[name]) for name in ("eval_moments", "score_moments"))
            return _of_evaluations(*own), _moments(record["source_moments"])
    path = next((folder / SCORE_NORM for folder in run_folders(run) if (folder / SCORE_NORM).is_file()), None)
    if path is None:
        told = f"{run}: no {SCORE_NORM} beside its config.yaml; it is written when the run ends or is stopped"
        raise ConfigError(told)
    with _readable(path):
        record = json.loads(path.read_text(encoding="utf-8"))
        sources = _moments(record.pop("sources", {}))
        return ScoreMoments(**record), sources


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Names the file of moments if it cannot be read."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: what normalizes the run's scores cannot be read from it ({type(error).__name__}: {error}). Name "
            "another checkpoint of the run, each of which has it too"
        ) from error


def _of_evaluations(eval_moments: ScoreMoments, score_moments: ScoreMoments) -> ScoreMoments:
    """Those of the run's own evaluations; without any, those of training."""
    return eval_moments if eval_moments.count else score_moments


def _moments(records: Mapping[str, Mapping[str, float]]) -> dict[str, ScoreMoments]:
    return {name: ScoreMoments(**record) for name, record in records.items()}
