"""Runs that are killed at random points and go on: their ends are bitwise those of runs that nobody killed.

A point is the n-th time that a run passes one of ``PLACES``, or a millisecond; it is drawn place first, so that saves
and evaluations, which are short, are hit as often as the rest.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.chaos.children import Failed, Killed, in_child
from tests.train.runs import tiny_run
from tests.train.test_run import NOT_REPRODUCIBLE
from tether.config.schema import RunConfig
from tether.metrics.writers import JsonlWriter, read_jsonl
from tether.models import saving
from tether.train import checkpoint, evaluate, run, trainer
from tether.train.engines.replicated import Alone
from tether.train.optim import PassOptimizer

PLACES: dict[str, tuple[tuple[Any, str], ...]] = {
    "rollout": ((trainer, "answer"), (trainer.PPOTrainer, "score"), (trainer.PPOTrainer, "outputs")),
    "update": ((Alone, "backward"), (PassOptimizer, "step")),
    "save": ((saving, "_sha256"), (saving, "_sync"), (checkpoint, "save_file"), (checkpoint.Checkpoints, "_drop_old")),
    "end": ((run, "save_final"), (run, "write_norms"), (run, "write_report")),
    "evaluation": ((evaluate, "answer"), (evaluate, "raw_scores"), (evaluate, "sequence_kl")),
    "line": ((JsonlWriter, "write_all"),),
}
CLOCK = "millisecond"
"""In place of one of ``PLACES``: whatever the run does then, in Python or below it."""
REWARD = '''
import numpy, random, torch

def letters(prompts, completions, **columns):
    """Tenths of an answer's letters, and a little luck from every generator."""
    luck = random.random() + numpy.random.rand() + float(torch.rand(()))
    return [len(text) / 10 + luck / 100 for text in completions]
'''
COMMON = {
    "train__max_steps": 5, "train__save_steps": 1, "train__eval_steps": 2, "ppo__kl_target": 0.5, "ppo__kl_horizon": 50,
    "ppo__num_mini_batches": 2, "sampling__response_length": 4, "train__lr_scheduler_type": "cosine",
    "train__warmup_ratio": 0.2,
}  # fmt: skip
LORA = {"model__lora": {"r": 2}}
CELLS: dict[str, dict[str, Any]] = {
    "full, model, warm-up": {"value__kind": "model", "value__warmup_steps": 2, "ppo__score_norm": "running"},
    "full, head, average": {"value__kind": "head", "train__ema_decay": 0.9, "ppo__score_norm": "frozen"},
    "LoRA, adapter, warm-up": LORA | {"value__kind": "adapter", "value__warmup_steps": 1, "ppo__score_norm": "running"},
    "LoRA, model, the best is kept": LORA | {
        "value__kind": "model", "train__metric_for_best_model": "eval_scores", "train__save_total_limit": 1,
        "train__load_best_model_at_end": True,
    },
    "LoRA, head, average": LORA | {"value__kind": "head", "train__ema_decay": 0.5, "ppo__score_norm": "running"},
    "full, no critic": {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 2, "train__save_steps": 2},
    "gpt2, model, schedule that follows": {
        "kind": "gpt2", "value__kind": "model", "train__lr_scheduler_type": "reduce_lr_on_plateau",
        "train__warmup_ratio": 0.0, "value__save": True,
    },
    "qwen2, bf16, tokens": {
        "kind": "qwen2", "train__bf16": True, "train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 64,
    },
}  # fmt: skip


def cell_run(folder: Path, cell: str, name: str) -> RunConfig:
    """The run of a cell of the matrix; prompts are fewer than an update takes, so that it ends within a pass."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = {"data__eval_prompts": str(folder / "prompts.jsonl")}
    config = tiny_run(folder, output_dir=str(folder / name), **COMMON | held_out | CELLS[cell])
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    return config


def train(config: RunConfig, *, kill_at: tuple[str, int] | None = None) -> Counter[str]:
    """Trains; returns how often each place was passed, and how many milliseconds it took.

    Args:
        kill_at: place, and which time it is passed, from 1, that the process is killed at.
    """
    torch.set_num_threads(1)
    passed: Counter[str] = Counter()
    start = time.monotonic()
    if kill_at is not None and kill_at[0] == CLOCK:
        signal.setitimer(signal.ITIMER_REAL, kill_at[1] / 1000)

    def watched(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            passed[place] += 1
            if kill_at == (place, passed[place]):
                if place == "line":
                    _half_a_line(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    for place, functions in PLACES.items():
        for owner, name in functions:
            setattr(owner, name, watched(place, getattr(owner, name)))
    run.train_policy(config)
    passed[CLOCK] = max(1, round(1000 * (time.monotonic() - start)))
    return passed


def _half_a_line(writer: JsonlWriter, records: Any) -> None:
    """Writes the first half of what was to be written, as a kill in the middle leaves it."""
    content = b"".join(writer._line(record) for record in records)
    with writer.path.open("ab") as file:
        file.write(content[: len(content) // 2])


def end_of(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on kills: bytes of the models, metrics and samples."""
    lines = [
        {name: value for name, value in row.items() if not name.startswith(NOT_REPRODUCIBLE)}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]
    models = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.safetensors")}
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".") or path.name.endswith(".tmp")]
    return {"metrics": lines, "samples": read_jsonl(folder / "samples.jsonl"), "models": models, "hidden": hidden}


def check_end(got: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Raises ``Failed`` where the end of a run differs from the one that nobody killed."""
    for name in wanted:
        if got[name] != wanted[name]:
            odd = ""
            if name == "models":
                keys = got[name].keys() | wanted[name].keys()
                odd = ", ".join(sorted(key for key in keys if got[name].get(key) != wanted[name].get(key)))
            raise Failed(f"{what}: {name} differ from the run that nobody killed {odd}")


def run_kills(folder: Path, count: int, seed: int, tell: Callable[[str], None]) -> str:
    """Kills runs ``count`` times in all, each up to three times; says where, and how many runs ended bitwise the same.

    Raises:
        Failed: one did not; or of many kills none was at one of the places, or none a second one of its run.
    """
    draw, places, runs, again, straight = random.Random(seed), Counter[str](), 0, 0, {}
    cells = list(CELLS)
    while (kills := places.total()) < count:
        cell = cells[runs % len(cells)]
        home = folder / str(cells.index(cell))
        if cell not in straight:
            config = cell_run(home, cell, "straight")
            passed = in_child(lambda config=config: train(config))
            straight[cell] = passed, end_of(config.output_dir)
        passed, wanted = straight[cell]
        killed = _killed_run(home, cell, passed, min(draw.choice((1, 1, 2, 3)), count - kills), draw)
        what = f"{cell}, killed at {killed}"
        check_end(end_of(home / "killed"), wanted, what)
        shutil.rmtree(home / "killed")
        places.update(place for place, _ in killed)
        runs, again = runs + 1, again + (len(killed) > 1)
        tell(f"{places.total()} of {count} kills: {what}")
    missed = [place for place in (*PLACES, CLOCK) if not places[place]]
    if count >= 100 and (missed or not again):
        raise Failed(f"{count} kills missed {', '.join(missed) or 'every run that had been killed before'}")
    told = ", ".join(f"{number} {place}" for place, number in places.most_common())
    return f"{runs} runs over {min(runs, len(cells))} cells, {again} killed more than once: bitwise the same ({told})"


def _killed_run(
    home: Path, cell: str, passed: Counter[str], times: int, draw: random.Random
) -> Sequence[tuple[str, int]]:
    """Starts a run, kills it ``times`` times, and lets it go on to its end; returns where it was killed."""
    config = cell_run(home, cell, "killed")
    shutil.rmtree(config.output_dir, ignore_errors=True)
    killed: list[tuple[str, int]] = []
    while True:
        goes_on = (config.output_dir / "metrics.jsonl").exists() and any(config.output_dir.glob("checkpoint-*"))
        changes = {"resume": True} if goes_on else {"overwrite_output_dir": True}
        point = None
        if len(killed) < times:
            place = draw.choice([place for place in (*PLACES, CLOCK) if passed[place]])
            point = place, draw.randint(1, passed[place])
        try:
            in_child(lambda changes=changes, point=point: train(config.model_copy(update=changes), kill_at=point))
        except Killed:
            killed.append(point)
            continue
        if point is None or killed:  # a run that goes on may end before its point
            return killed or [("", 0)]
        shutil.rmtree(config.output_dir)
