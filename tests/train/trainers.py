"""Trainers with answers and scores known beforehand, notes of what they do, padding of another size or content."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from tether.data import collate as collation
from tether.data import demonstrations
from tether.generation.build import build_generator
from tether.machine.distributed import Dist
from tether.metrics.trackers import Trackers
from tether.models.build import build_roles
from tether.models.device import half_dtype
from tether.train import batches, evaluate, update
from tether.train.callbacks import Callbacks
from tether.train.display import NullDisplay
from tether.train.inputs import load_data
from tether.train.log import RunLog
from tether.train.parts import Parts
from tether.train.trainer import PPOTrainer
from tether.types import MicroBatch, Sampling


def trainer_of(config, rewards, generator=None, *, prepare=None, stop_ids=()):
    """A trainer with this judge that evaluates on the prompts that it trains on.

    Args:
        generator: answers in the policy's place.
        prepare: what is done to the roles before the trainer gets them.
    """
    data = load_data(config)
    prompts = data.prompts.prompts
    log = RunLog(config.output_dir, NullDisplay(), Trackers("none", "t", config.output_dir, {}), logging_steps=1)
    callbacks = Callbacks((), config, len(prompts))
    device = Dist().device
    roles = build_roles(config, data.tokenizer, device=device, autocast_dtype=half_dtype(config.train, device))
    if prepare is not None:
        prepare(roles)
    parts = Parts(
        roles=roles,
        generator=generator or build_generator(config, roles),
        rewards=rewards,
        tokenizer=data.tokenizer,
        sampling=Sampling(config.sampling.response_length, config.sampling.temperature, frozenset(stop_ids)),
        prompts=prompts,
        eval_prompts=prompts,
        demonstrations=data.demonstrations,
    )
    return PPOTrainer(config, parts, read={}, log=log, callbacks=callbacks)


@torch.no_grad()
def move(roles, *, policy=0.02, critic=0.1):
    """Takes the policy away from the reference and the critic away from 0."""
    generator = torch.Generator().manual_seed(1)
    for name, size in {"policy": policy, "value": critic}.items():
        if name == "policy" or roles.has_critic:
            for p in roles.role(name).trained.values():
                p += size * torch.randn(p.shape, generator=generator)


def noted_mini_batches(monkeypatch):
    """A list that fills with the micro-batches of every optimizer step."""
    seen, mini_batches = [], update.mini_batches

    def noted(*args):
        for group in mini_batches(*args):
            seen.append([item.batch for item in group])
            yield group

    monkeypatch.setattr(update, "mini_batches", noted)
    return seen


def noted_gradients(monkeypatch):
    """A list that fills with the gradients of every optimizer step: a name and one tensor for each optimizer."""
    seen, take_step = [], update.Update.take_step

    def noted(self, optimizer):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in optimizer.parameters]
        seen.append((optimizer.name, torch.cat([g.detach().flatten() for g in gradients])))
        take_step(self, optimizer)

    monkeypatch.setattr(update.Update, "take_step", noted)
    return seen


def collate_by(monkeypatch, change):
    """Makes whatever collates get ``change`` of the micro-batch instead."""
    collate = collation.collate
    for module in (batches, evaluate, demonstrations):
        monkeypatch.setattr(module, "collate", lambda *args: change(collate(*args)))


def with_more_pads(batch: MicroBatch, left=50, right=50) -> MicroBatch:
    """The same rollouts between more columns of padding."""
    return MicroBatch(
        rows=batch.rows,
        token_ids=pad(batch.token_ids, (left, right)),
        attention_mask=pad(batch.attention_mask, (left, right)),
        position_ids=pad(batch.position_ids, (left, right)),
        response_mask=pad(batch.response_mask, (0, right)),
    )


def with_random_pads(batch: MicroBatch) -> MicroBatch:
    """The same rollouts with any word where there was padding."""
    generator = torch.Generator().manual_seed(batch.token_ids.shape[1])
    words = torch.randint(7, 40, batch.token_ids.shape, generator=generator)
    return MicroBatch(
        rows=batch.rows,
        token_ids=torch.where(batch.attention_mask, batch.token_ids, words),
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        response_mask=batch.response_mask,
    )
