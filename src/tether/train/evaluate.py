"""Evaluation on held-out prompts, without any effect on the random state of training.

Sampling noise comes from keys (``types.noise_key``), never from a global generator, so an evaluation cannot change what
is sampled after it. The same prompt gets the same noise in every evaluation, which makes evaluations comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tether import algo
from tether.config.schema import RunConfig
from tether.data.collate import collate
from tether.metrics.reduce import Metrics
from tether.models.forward import response_outputs
from tether.models.memory import in_fitting_parts
from tether.models.roles import POLICY, REFERENCE
from tether.train.batches import micro_batches
from tether.train.display import PhaseReport
from tether.train.parts import Parts
from tether.train.rollout import (
    Answers,
    Judged,
    answer,
    answer_row,
    raw_scores,
    shaped_scores,
)
from tether.types import Completion, MicroBatch, Request, noise_key


def evaluate(
    parts: Parts,
    config: RunConfig,
    moments: algo.ScoreMoments,
    *,
    phase: PhaseReport,
    check: Callable[[], None],
    halvings: int = 0,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    rows: list[dict[str, Any]] | None = None,
) -> tuple[dict[str, float], list[dict[str, Any]], algo.ScoreMoments]:
    """Generates and scores the current policy's answers to ``parts.eval_prompts``.

    Args:
        moments: moments that ``ppo.score_norm`` normalizes scores by; those of these answers if they are of no scores.
        halvings: how often micro-batches are halved to fit into memory.
        waiting: a context entered while waiting for scores.
        rows: filled with what is known of each answer, in the order of the prompts, for callers that keep it if
            something ends the evaluation. Entries of answers that are not finished are empty.

    Returns:
        ``eval_scores`` and its standard deviation, ``eval_kl`` in nats per sequence (absent without a reference),
        ``eval_length`` in tokens, ``eval_eos_rate``, and ``eval_rewards/NAME`` and its standard deviation for each
        source; the rows of samples.jsonl; and the moments that scores were normalized by.
    """
    prompts = list(parts.eval_prompts)
    requests = [Request(p.token_ids, noise_key(config.train.seed, "eval", p.row, 0), p.before) for p in prompts]
    samples = [] if rows is None else rows
    samples[:] = [{} for _ in prompts]

    def finished(i: int, completion: Completion, text: str) -> None:
        samples[i] = answer_row(prompts[i], completion, text)

    watched = {"phase": phase, "check": check, "name": "evaluation"}
    answers = answer(parts, prompts, requests, **watched, ask=True, finished=finished)
    with waiting():
        raw, output = raw_scores(parts, answers)
    if moments.count == 0:
        moments = algo.merged_moments(moments, raw)
    judged = Judged(shaped_scores(raw, answers, config, moments), output.components)
    samples[:] = [judged.sample(i, answers) for i in range(len(prompts))]
    with parts.roles.fetched():
        kl = sequence_kl(parts, answers, config, phase=phase, check=check, halvings=halvings)
    samples[:] = [sample | {"kl": kl[i] if kl else None} for i, sample in enumerate(samples)]
    return _numbers(answers, judged, kl), samples, moments


def _numbers(answers: Answers, judged: Judged, kl: list[float] | None) -> dict[str, float]:
    """The metrics of an evaluation."""
    metrics = Metrics()
    metrics.mean("eval_scores", judged.scores)
    metrics.var("eval_scores_var", judged.scores)
    for name, values in judged.components.items():
        metrics.mean(f"eval_rewards/{name}", values)
        metrics.var(f"eval_rewards_var/{name}", values)
    metrics.mean("eval_length", answers.lengths)
    metrics.mean("eval_eos_rate", answers.ended)
    if kl is not None:
        metrics.mean("eval_kl", kl)
    numbers = metrics.compute()
    numbers["eval_scores_std"] = numbers.pop("eval_scores_var") ** 0.5
    for name in judged.components:
        numbers[f"eval_rewards_std/{name}"] = numbers.pop(f"eval_rewards_var/{name}") ** 0.5
    return numbers


@torch.no_grad()
def sequence_kl(
    parts: Parts,
    answers: Answers,
    config: RunConfig,
    *,
    phase: PhaseReport,
    check: Callable[[], None],
    halvings: int = 0,
) -> list[float] | None:
    """log π(y) − log π_ref(y) of each answer, in nats; None without a reference. The mean estimates KL(π ‖ π_ref)."""
    roles, dist, temperature = parts.roles, parts.dist, config.sampling.temperature
    if not roles.has_reference:
        return None
    queries = [p.token_ids for p in answers.prompts]
    responses = [c.token_ids for c in answers.completions]
    batches = micro_batches(answers, config, dist, halvings=halvings)
    plan, formed = [batch.rows for batch in batches], {batch.rows: batch for batch in batches}
    total, done = 2 * sum(map(len, plan)), 0

    def batch_of(rows: tuple[int, ...]) -> MicroBatch:
        if rows not in formed:  # part of one that did not fit into memory
            formed[rows] = collate([queries[i] for i in rows], [responses[i] for i in rows], rows).to(roles.device)
        return formed[rows]

    def of_policy(rows: Sequence[int]) -> Tensor:
        batch = batch_of(rows)
        with roles.use(POLICY) as policy:
            return roles.through(POLICY)(lambda: response_outputs(policy, batch, temperature=temperature)).logprobs

    def of_reference(rows: Sequence[int]) -> Tensor:
        return roles.ref_logprobs(batch_of(rows), temperature)

    def fitting(
        role: str, logprobs: Callable[[Sequence[int]], Tensor], plan: Sequence[Sequence[int]]
    ) -> list[tuple[Sequence[int], Tensor]]:
        nonlocal done
        found = []
        with roles.switched_to(role):
            for rows, of_rows in in_fitting_parts(plan, logprobs, "an evaluation's KL"):
                found.append((rows, of_rows))
                done += len(rows)
                phase("evaluation KL", min(done, total), total)
                check()
        return found

    policy = fitting(POLICY, of_policy, plan)
    reference = fitting(REFERENCE, of_reference, [rows for rows, _ in policy])
    of_parts = dict(policy)
    again = [rows for rows, _ in reference if rows not in of_parts]  # both need the same shape for a KL of exactly 0
    of_parts |= fitting(POLICY, of_policy, again)
    own: dict[int, float] = {}
    for rows, of_rows in reference:
        gap = algo.kl_estimate(of_parts[rows], of_rows, "k1")
        own |= zip(rows, algo.masked_sum(gap, batch_of(rows).response_mask, dim=1).tolist(), strict=True)
    kl = {row: value for theirs in dist.gathered(own) for row, value in theirs.items()}
    return [kl[row] for row in range(len(responses))]
