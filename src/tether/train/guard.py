"""Keeps non-finite values away from optimizers: they are reported and skipped, and too many in a row end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from tether.config.keys import counted
from tether.errors import TrainingError
from tether.machine.distributed import Dist, met_by_all
from tether.metrics.writers import JsonlWriter
from tether.train.rollout import Answers
from tether.types import Experience, MicroBatch

BAD_BATCHES = "bad_batches.jsonl"


class NotFinite(TrainingError):
    """A value that an optimizer step would depend on is not finite; nothing has been changed."""


class Guard:
    """Finds non-finite values before they reach an optimizer.

    Args:
        folder: where bad_batches.jsonl is written, one line for each finding with the texts that led to it.
        limit: number of consecutive findings that are skipped; the next one ends the run.
        tell: called with a message about each finding that is skipped.
        dist: the processes, all of which skip what one of them finds.
    """

    def __init__(self, folder: Path, limit: int, tell: Callable[[str], None], dist: Dist) -> None:
        self.folder, self.limit, self.tell, self.dist = folder, limit, tell, dist
        self.step = 1
        """Number of the current update, from 1."""
        self.in_a_row = 0
        """Number of findings since the last optimizer step."""

    def check(self, answers: Answers, batch: MicroBatch, **tensors: Tensor | None) -> None:
        """Raises ``NotFinite`` in all processes if a [M, R] tensor is not finite at a response token in one of them;
        names tensor and rows."""
        found = _not_finite(batch, tensors)
        if self.dist.any(found is not None):
            told = [each for each in self.dist.gathered(found) if each is not None]
            what = told[0][0]
            self._found(what, [rows for name, rows in told if name == what], answers)

    def check_gradients(self, are_finite: bool, answers: Answers, mini_batch: Sequence[Experience]) -> None:
        """Raises ``NotFinite`` in all processes if a gradient is not finite in one of them, before any optimizer steps;
        any answer of the mini-batch may be the cause.

        Args:
            are_finite: whether the gradients of this process are finite.
        """
        if self.dist.any(not are_finite):
            rows = [row for item in mini_batch for row in item.batch.rows]
            self._found("gradient", self.dist.gathered(rows), answers)

    def leave_out(self, error: NotFinite) -> None:
        """Counts a skipped batch.

        Raises:
            TrainingError: too many in a row.
        """
        self.in_a_row += 1
        if self.in_a_row <= self.limit:
            self.tell(f"warning: {error} Skipped: {self.in_a_row} in a row, of at most {self.limit}")
            return
        before = "" if self.limit == 0 else f" after {self.limit} skipped in a row (train.max_bad_batches)"
        raise met_by_all(TrainingError(f"{error} The run ends{before}")) from error

    def took_step(self) -> None:
        """Resets the count."""
        self.in_a_row = 0

    def write_down(self, what: str, answers: Answers, rows: Sequence[int]) -> Path:
        """Writes the texts of some rollouts and what is wrong with them; returns the file."""
        path = self.folder / BAD_BATCHES
        rollouts = [
            {
                "rollout": row,
                "row": answers.prompts[row].row,
                "query": answers.prompts[row].text,
                "response": answers.texts[row],
                "response_ids": list(answers.completions[row].token_ids),
            }
            for row in rows
        ]
        if self.dist.is_main:
            JsonlWriter(path).write({"step": self.step, "what": what, "rollouts": rollouts})
        return path

    def marked(self, checkpoint: Path | None) -> str:
        """Writes down which checkpoint is the last good one; returns this as a sentence for the user."""
        name = None if checkpoint is None else checkpoint.name
        if self.dist.is_main:
            JsonlWriter(self.folder / BAD_BATCHES).write({"step": self.step, "last_good_checkpoint": name})
        if checkpoint is None:
            return "there is no checkpoint to return to; set train.save_steps to write checkpoints"
        return (
            f"the last good checkpoint is {checkpoint}; --resume would repeat the same updates from there, so use it "
            "as model.path of a run with other settings"
        )

    def _found(self, what: str, rows_by_process: Sequence[Sequence[int]], answers: Answers) -> None:
        rows = list(dict.fromkeys(chain.from_iterable(rows_by_process)))
        path = self.write_down(f"{what} is not finite", answers, rows)
        named = [str(answers.prompts[row].row) for row in rows]
        raise NotFinite(
            f"{what} is not finite for {counted(len(rows), 'rollout')} of update {self.step} (dataset rows "
            f"{', '.join(named[:8])}{', …' if len(named) > 8 else ''}); no optimizer step was taken with it. Their "
            f"texts are in {path}. A smaller learning rate, or bf16 and fp16: false, usually helps."
        )


def _not_finite(batch: MicroBatch, tensors: Mapping[str, Tensor | None]) -> tuple[str, list[int]] | None:
    """Name and rows of the first [M, R] tensor that is not finite at a response token; reads from the device once."""
    given = {name: x for name, x in tensors.items() if x is not None}
    if not given:
        return None
    bad = torch.stack([(~torch.isfinite(x) & batch.response_mask).any(dim=1) for x in given.values()]).tolist()
    for name, flags in zip(given, bad, strict=True):
        if any(flags):
            return name.replace("_", " "), [row for row, is_bad in zip(batch.rows, flags, strict=True) if is_bad]
    return None
