"""Optimizers: one for each pass of the update, stepped together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from tether.config.schema import RunConfig
from tether.models.roles import ModelRoles


@dataclass
class PassOptimizer:
    """AdamW over the parameters that one pass trains, with its schedule."""

    name: str
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    scheduler: LRScheduler
    max_grad_norm: float | None

    def clip(self) -> float:
        """Scales the gradients down to ``max_grad_norm``; returns their norm before that."""
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        return float(nn.utils.clip_grad_norm_(self.parameters, limit))

    def step(self) -> None:
        """Applies the gradients, moves the schedule on, and clears the gradients."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.scheduler.get_last_lr()[0]

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to go on exactly."""
        return {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from ``state_dict``'s result."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def build_optimizers(config: RunConfig, roles: ModelRoles, num_updates: int) -> list[PassOptimizer]:
    """One AdamW for each pass: policy and critic apart, or both in one where they share a trunk."""
    train = config.train
    total_steps = num_updates * config.ppo.num_ppo_epochs * config.ppo.num_mini_batches
    optimizers = []
    for pass_ in roles.passes:
        critic_only = "policy" not in pass_.trains
        rate = (config.value.learning_rate if critic_only else None) or config.learning_rate
        parameters = pass_.parameters()
        optimizer = AdamW(
            parameters,
            lr=rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            weight_decay=train.weight_decay,
        )
        scheduler = get_scheduler(
            train.lr_scheduler_type,
            optimizer,
            num_warmup_steps=round(train.warmup_ratio * total_steps),
            num_training_steps=total_steps,
        )
        optimizers.append(PassOptimizer(pass_.name, parameters, optimizer, scheduler, train.max_grad_norm))
    return optimizers


def all_finite(optimizers: list[PassOptimizer]) -> bool:
    """Whether every gradient that is there is finite."""
    grads = [p.grad for o in optimizers for p in o.parameters if p.grad is not None]
    return all(bool(torch.isfinite(g).all()) for g in grads)
