"""How a rollout batch is divided: into micro-batches, one to a forward pass, and into mini-batches of these, one to an
optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tether.config.schema import RunConfig
from tether.data.collate import collate, plan_micro_batches
from tether.machine.distributed import Dist
from tether.train.rollout import Answers
from tether.types import Experience, MicroBatch, noise_key


def micro_batch_plan(
    config: RunConfig, queries: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], num_processes: int = 1
) -> list[tuple[int, ...]]:
    """Groups of rows (queries with their responses) that all processes together forward at once, by
    ``train.micro_batch_size`` or the token budget, which are per process.

    A group is no larger than a mini-batch, so every mini-batch gets at least one group.
    """
    return plan_micro_batches(
        [len(query) + len(response) for query, response in zip(queries, responses, strict=True)],
        config.answers_at_once(num_processes),
        config.train.max_tokens_per_micro_batch,
        num_processes,
    )


def micro_batches(answers: Answers, config: RunConfig, dist: Dist, *, halvings: int = 0) -> list[MicroBatch]:
    """This process's part of the answers in padded micro-batches.

    The rows that all processes forward at once are distributed over the processes, and each process splits its rows
    into parts that fit into memory. All processes get the same number of parts; if there are too few rows, some parts
    are idle.

    Args:
        halvings: how often micro-batches are halved to fit into memory.
    """
    queries = [prompt.token_ids for prompt in answers.prompts]
    responses = [completion.token_ids for completion in answers.completions]
    batches = []
    for group, whole in enumerate(micro_batch_plan(config, queries, responses, dist.num_processes)):
        own = halves(dist.dealt(whole), halvings)
        most = len(halves(dist.dealt(whole, to=0), halvings))
        parts = [*own, *[whole[:1]] * (most - len(own))]
        of_whole = {} if parts[0] == whole else {"group": group, "group_size": len(whole)}
        for i, rows in enumerate(parts):
            batch = collate([queries[row] for row in rows], [responses[row] for row in rows], rows)
            batches.append(replace(batch, is_idle=i >= len(own), **of_whole).to(dist.device))
    return batches


def mini_batches(experience: Sequence[Experience], config: RunConfig, step: int) -> Iterator[list[Experience]]:
    """Yields the micro-batches of every epoch, freshly shuffled, in groups; one group is one optimizer step.

    Groups hold equal numbers of answers or, with a token budget, numbers as equal as whole micro-batches allow. Parts
    of one micro-batch stay together.

    Args:
        step: number of finished updates, which seeds the shuffle.
    """
    parts: dict[int, list[Experience]] = {}
    for i, item in enumerate(experience):
        parts.setdefault(i if item.batch.group is None else item.batch.group, []).append(item)
    wholes = list(parts.values())
    for epoch in range(config.ppo.num_ppo_epochs):
        seed = noise_key(config.train.seed, "shuffle", step, epoch)
        order = torch.randperm(len(wholes), generator=torch.Generator().manual_seed(seed)).tolist()
        group, answers, number = [], 0, 1
        for i in order:
            group += wholes[i]
            answers += num_answers(wholes[i])
            if answers >= number * config.mini_batch_size:
                yield group
                group, number = [], number + 1


def num_answers(parts: Sequence[Experience]) -> int:
    """Number of answers in a micro-batch, given this process's parts of it."""
    size = parts[0].batch.group_size
    return sum(len(item.batch.rows) for item in parts) if size is None else size


def halves(rows: Sequence[int], halvings: int = 1) -> list[tuple[int, ...]]:
    """Splits rows into 2^halvings contiguous parts, or fewer if there are too few rows."""
    parts = [tuple(rows)] if len(rows) else []
    for _ in range(halvings):
        middles = [(part, (len(part) + 1) // 2) for part in parts]
        parts = [half for part, middle in middles for half in (part[:middle], part[middle:]) if half]
    return parts


def halved(item: Experience) -> list[Experience]:
    """Splits a micro-batch into two halves with their padding kept; one of a single answer is not split."""
    return [_part(item, part[0], part[-1] + 1) for part in halves(range(len(item.batch.rows)))]


def _part(item: Experience, start: int, end: int) -> Experience:
    def cut(record: Any, names: Sequence[str]) -> dict[str, Any]:
        return {name: None if (x := getattr(record, name)) is None else x[start:end] for name in names}

    of_batch = ("rows", "token_ids", "attention_mask", "position_ids", "response_mask")
    own = ("logprobs", "advantages", "loss_mask", "values", "returns", "ref_logprobs", "importance")
    return replace(item, batch=replace(item.batch, **cut(item.batch, of_batch)), **cut(item, own))
