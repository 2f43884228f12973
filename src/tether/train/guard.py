"""Nothing non-finite reaches an optimizer: it is named, written down, and ends the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import TrainingError
from tether.train.optim import PassOptimizer, all_finite
from tether.train.rollout import Answers
from tether.types import Experience, MicroBatch

BAD_BATCH = "bad_batch.json"
MOST_FIRST_RATIO_ERROR = 1e-3
MOST_LOGPROB_GAP = 0.2
"""Nats a token; bfloat16 decoding differs from its forward by less."""


def check_finite(folder: Path, answers: Answers, batch: MicroBatch, **tensors: Tensor | None) -> None:
    """Raises ``TrainingError`` if a response token's entry of a [M, R] tensor is not finite, naming tensor and rows.

    What led to it is written to bad_batch.json in ``folder`` first.
    """
    for name, x in tensors.items():
        if x is None:
            continue
        bad = (~torch.isfinite(x) & batch.response_mask).any(dim=1)
        if bool(bad.any()):
            rows = [row for row, is_bad in zip(batch.rows, bad.tolist(), strict=True) if is_bad]
            _fail(folder, name.replace("_", " "), answers, rows)


def check_gradients(
    folder: Path, optimizers: list[PassOptimizer], answers: Answers, mini_batch: Sequence[Experience]
) -> None:
    """Raises ``TrainingError`` if a gradient is not finite, before any optimizer steps."""
    if not all_finite(optimizers):
        _fail(folder, "gradient", answers, [row for item in mini_batch for row in item.batch.rows])


def suspicions(metrics: Mapping[str, float]) -> list[str]:
    """What an update's metrics say that should not be: the policy that sampled is not the one that is trained on."""
    found = []
    if metrics.get("val/first_ratio_error", 0.0) > MOST_FIRST_RATIO_ERROR:
        found.append(
            "the policy ratio is not 1 before the first optimizer step of an update (val/first_ratio_error): scoring "
            "and training compute the same weights differently"
        )
    if metrics.get("rollout/logprob_gap", 0.0) > MOST_LOGPROB_GAP:
        found.append(
            "answers are not sampled from the distribution that they are trained under (rollout/logprob_gap): this "
            "model's cached decoding differs from its forward. Recurrent models do so where prompts of unequal length "
            "share a batch: set sampling.batch_size to 1"
        )
    return found


def _fail(folder: Path, what: str, answers: Answers, rows: list[int]) -> None:
    record: list[dict[str, Any]] = [
        {
            "rollout": row,
            "row": answers.prompts[row].row,
            "query": answers.prompts[row].text,
            "response": answers.texts[row],
            "response_ids": list(answers.completions[row].token_ids),
        }
        for row in rows
    ]
    path = folder / BAD_BATCH
    path.write_text(json.dumps({"not_finite": what, "rollouts": record}, indent=1), encoding="utf-8")
    raise TrainingError(
        f"{what} is not finite for {len(rows)} of this update's rollouts (dataset rows "
        f"{', '.join(str(r['row']) for r in record[:8])}{', …' if len(record) > 8 else ''}); no optimizer step was "
        f"taken with it. Their texts are in {path}. A smaller learning rate, or bf16: false, is the usual cure."
    )
