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
from tether.report.limits import LIMITS, LOGPROB_GAP, MOST_SHARE, STRETCH
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


def suspicions(metrics: Mapping[str, float], *, forward_type: str, num_alike: int = 0) -> list[str]:
    """Problems that an update's metrics show: the sampling policy differs from the one being trained, the policy always
    gives the same token or answer, all answers get the same score, or nothing was trained.

    Args:
        forward_type: key of ``LOGPROB_GAP``.
        num_alike: number of consecutive updates, up to this one, in which all answers got the same score.
    """
    found = []
    if num_alike >= STRETCH:
        found.append(
            f"all answers of an update had the same score, {STRETCH} updates in a row (objective/scores_std), so "
            "nothing is learned. Check the judge, its pattern or its column against the answers in samples.jsonl"
        )
    if metrics.get("val/first_ratio_error", 0.0) > LIMITS["val/first_ratio_error"].warn:
        found.append(
            "the policy ratio is not 1 before the first optimizer step of an update (val/first_ratio_error): scoring "
            "and training give different results with the same weights"
        )
    if metrics.get("rollout/logprob_gap", 0.0) > LOGPROB_GAP[forward_type].act:
        found.append(
            "answers are not sampled from the distribution that they are trained under (rollout/logprob_gap): this "
            "model's cached decoding differs from its forward pass. Another model.attn_implementation or train.bf16: "
            "false may bring them together"
        )
    if metrics.get("policy/num_overflows", 0.0) > 0 and metrics.get("update/num_steps") == 0:
        found.append(
            "no step of this update was taken: scaled gradients are not finite in float16 (policy/num_overflows). The "
            "scale is halved each time; if this continues, set train.fp16: false"
        )
    if metrics.get("update/num_empty", 0.0) > 0 and metrics.get("update/num_steps") == 0:
        found.append(
            "no step of this update was taken: none of its answers ended within sampling.response_length, and "
            "ppo.mask_truncated leaves such answers out (update/num_empty). If this continues, set a larger "
            "sampling.response_length, or ppo.mask_truncated: false"
        )
    if metrics.get("rollout/top_token_share", 0.0) > MOST_SHARE and _could_say_more(metrics):
        found.append(
            "nearly all tokens of the policy's answers are the same (rollout/top_token_share): it has collapsed. "
            "Return to an earlier checkpoint, and raise ppo.kl_coef or lower train.learning_rate"
        )
    elif metrics.get("rollout/top_answer_share", 0.0) > MOST_SHARE and _could_say_more(metrics):
        found.append(
            "the policy nearly always gives the same answer (rollout/top_answer_share): unless the prompts leave no "
            "other, it has collapsed. Raise ppo.kl_coef"
        )
    return found


def _could_say_more(metrics: Mapping[str, float]) -> bool:
    """Whether the policy could have said more: single-token answers ended by themselves, not because
    ``sampling.response_length`` is 1."""
    return metrics["rollout/length_max"] > 1 or metrics["rollout/eos_rate"] == 1
