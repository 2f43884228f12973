"""Tests before training whether a run fits into memory, and uses smaller micro-batches if it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle, islice

import torch

from tether.config.keys import counted
from tether.config.schema import RunConfig
from tether.errors import TrainingError
from tether.machine.distributed import Dist
from tether.metrics.reduce import Metrics
from tether.report.text import byte_size
from tether.train.optim import MOMENT_BYTES, PassOptimizer
from tether.train.parts import Parts
from tether.train.rollout import Answers
from tether.train.update import Update
from tether.types import Completion, Experience, MicroBatch, Request


def dry_step(
    config: RunConfig,
    parts: Parts,
    micro_batches: Callable[[Answers], list[MicroBatch]],
    one_update: Callable[..., Update],
    halve: Callable[[torch.OutOfMemoryError], None],
) -> str:
    """Tries an update of the longest lengths, without effect; returns a line about the memory and time that it took.

    With memory for the optimizers' moments allocated, decodes as many answers as will be decoded at once, then runs
    forward and backward on micro-batches of the longest query with answers of ``sampling.response_length``, and on a
    mini-batch of the longest demonstration if there are demonstrations. Where a mini-batch has several micro-batches,
    it runs two: the second needs room for the gradients of the first. If the answers cannot be decoded at once, the
    generator decodes fewer; micro-batches are halved until they fit.

    Args:
        micro_batches: makes micro-batches of answers, as in the run.
        one_update: makes an update from answers, metrics and a number of finished updates.
        halve: halves micro-batches after one that did not fit; raises if they cannot be halved.

    Raises:
        GenerationError: not even one answer can be decoded.
    """
    start, dist = time.perf_counter(), parts.dist
    longest = max(parts.prompts, key=lambda prompt: len(prompt.token_ids))
    answer = Completion([longest.token_ids[-1]] * config.sampling.response_length, "length")
    count = config.answers_at_once(dist.num_processes)
    answers = Answers([longest] * count, [answer] * count, [""] * count)
    if dist.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(dist.device)
    first_step = config.value.warmup_steps  # of the first update that trains everything
    moments = _moments_to_come(config, parts, one_update(answers, Metrics(), step=first_step).optimizers)
    _decode_longest(config, parts)
    shape = None
    while shape is None:
        dist.release_memory()
        update = one_update(answers, Metrics(), step=first_step)
        if parts.demonstrations:
            update.demonstrations = [max(parts.demonstrations, key=lambda each: each.num_tokens)]
        batches = micro_batches(answers)
        try:
            _try_mini_batch(config, parts, update, batches[0], 1 + (len(batches) > 1 or config.mini_batch_size > count))
            shape = batches[0].token_ids.shape
        except torch.OutOfMemoryError as error:
            halve(error)
        finally:
            update.drop_gradients()
    del moments
    took = time.perf_counter() - start
    return (
        f"dry step: {counted(shape[0], 'answer')} of {counted(shape[1], 'token')} fit into memory in an update, "
        f"{_side_by_side(config, parts)} in decoding{_peak(dist)}; it took {took:.2g} s"
    )


def _moments_to_come(config: RunConfig, parts: Parts, optimizers: Iterable[PassOptimizer]) -> list[torch.Tensor]:
    """As much memory as this process's optimizers will take for moments that they have yet to create."""
    each, engine = MOMENT_BYTES[config.train.optim], parts.engine
    return [
        torch.empty(int(each * engine.num_stepped(p)), dtype=torch.uint8, device=engine.part(p).device)
        for optimizer in optimizers
        for p in optimizer.parameters
        if p not in optimizer.optimizer.state
    ]


def _try_mini_batch(config: RunConfig, parts: Parts, update: Update, batch: MicroBatch, count: int) -> None:
    """The passes of a mini-batch of ``count`` times the same micro-batch, as in an update."""
    temperature = config.sampling.temperature
    with torch.no_grad(), parts.roles.fetched():
        old = parts.roles.score_pass(batch, temperature)
        ref = parts.roles.ref_logprobs(batch, temperature) if parts.roles.has_reference else None
    in_loss = config.ppo.kl_in == "loss"
    item = Experience(
        batch=batch,
        logprobs=old.logprobs,
        advantages=torch.zeros_like(old.logprobs),
        loss_mask=batch.response_mask,
        values=old.values,
        returns=old.values,
        ref_logprobs=ref if in_loss else None,
        kl_loss_coef=config.ppo.kl_coef if in_loss else 0.0,
    )
    for optimizer in update.optimizers_in_use():
        update.add_gradients(optimizer, [item] * count, 0)
        update.drop_gradients()


def _side_by_side(config: RunConfig, parts: Parts) -> int:
    """Number of answers of an update that are decoded at once."""
    return min(parts.generator.batch_size, len(parts.dist.share(config.train.rollout_batch_size)))


def _decode_longest(config: RunConfig, parts: Parts) -> None:
    """Answers the longest queries, as many as are decoded at once, with the maximum number of tokens."""
    queries = sorted((prompt.token_ids for prompt in parts.prompts), key=len, reverse=True)
    asked = islice(cycle(queries), parts.dist.num_processes * _side_by_side(config, parts))
    requests = [Request(query, key) for key, query in enumerate(asked)]
    endless = replace(parts.sampling, stop_token_ids=frozenset(), text_ends=None)
    for _ in parts.generator.generate(requests, endless):
        pass


def next_halving(config: RunConfig, halvings: int, error: torch.OutOfMemoryError) -> tuple[int, str]:
    """How often micro-batches are halved from now on, and a line that says so.

    Args:
        halvings: how often they have been halved so far.

    Raises:
        TrainingError: they already hold only one answer.
    """
    size = config.max_rows_per_micro_batch() or config.mini_batch_size
    if 2**halvings >= size:
        raise TrainingError(
            f"out of memory with one answer in a micro-batch ({error}): set train.gradient_checkpointing, lower "
            "sampling.response_length or data.max_prompt_length, or train with LoRA"
        ) from error
    most = counted(-(-size // 2 ** (halvings + 1)), "answer")
    return halvings + 1, f"warning: out of memory; micro-batches are halved from now on, to at most {most}"


def _peak(dist: Dist) -> str:
    if dist.device.type != "cuda":
        return ""
    peak, total = torch.cuda.max_memory_allocated(dist.device), torch.cuda.mem_get_info(dist.device)[1]
    return f" ({byte_size(peak)} of {byte_size(total)} at most)"
