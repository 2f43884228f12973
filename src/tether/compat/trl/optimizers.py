"""The user's own optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.models.roles import POLICY, VALUE, ModelRoles
from tether.train.engines.base import Engine
from tether.train.optim import PassOptimizer, build_optimizers, loss_scale, schedule

STEPS_NUMBERS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "Rprop", "ASGD", "SGD")
"""Optimizers of torch that update each element independently of the tensor it is in."""


class OwnOptimizer(PassOptimizer):
    """One optimizer of policy and critic whose schedule advances once per update, as TRL's does."""

    def move_on(self) -> None:
        """Clears the gradients."""
        self.drop_gradients()

    def note(self, metric: float) -> None:
        """Advances the schedule, whatever the metric."""
        self.scheduler.step()


def check_optimizers(given: Any, engine: Engine) -> None:
    """Raises ``ConfigError`` for anything but TRL's ``optimizers``, or for an optimizer that cannot step the shards of
    an engine."""
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ConfigError(f"optimizers: got {type(given).__name__}, wanted (optimizer, lr_scheduler) or (None, None)")
    optimizer, scheduler = given
    if optimizer is None and scheduler is not None:
        raise ConfigError("optimizers: got a schedule without its optimizer; wanted both, or None for both")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer) or (scheduler is not None and not hasattr(scheduler, "step")):
        kinds = f"{type(optimizer).__name__} and {type(scheduler).__name__}"
        raise ConfigError(f"optimizers: got {kinds}, wanted a torch optimizer and its schedule or None")
    if getattr(scheduler, "optimizer", optimizer).param_groups is not optimizer.param_groups:
        raise ConfigError(
            f"optimizers: got a {type(scheduler).__name__} of another optimizer, so the learning rate would stay as it "
            "is; wanted a schedule of the optimizer beside it"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "optimizers: got a ReduceLROnPlateau, whose step needs a metric; leave the schedule None and set "
            "PPOConfig.lr_scheduler_type to reduce_lr_on_plateau, which follows objective/scores"
        )
    if isinstance(optimizer, optim.LBFGS):
        raise ConfigError(
            "optimizers: got LBFGS, which computes the loss several times a step; wanted an optimizer that steps by "
            "the gradients of one pass, such as AdamW"
        )
    if (engine.spreads_weights or engine.flattens) and optimizer.state:
        raise ConfigError(
            f"optimizers: got {type(optimizer).__name__} with moments of whole weights, wanted one that has none yet: "
            f"{engine.name} shards them"
        )
    if engine.flattens and type(optimizer) not in [getattr(optim, name) for name in STEPS_NUMBERS]:
        raise ConfigError(
            f"optimizers: got {type(optimizer).__name__}, wanted one of torch's {', '.join(STEPS_NUMBERS)} under "
            f"{engine.name}, which gives it weights in flat pieces; launch the script with FSDP2 or DDP"
        )


def optimizers_of(
    given: Any,
    config: RunConfig,
    roles: ModelRoles,
    num_updates: int,
    before: Mapping[str, nn.Parameter],
    vf_coef: float,
) -> list[PassOptimizer]:
    """The optimizers of a run: the user's if there is one, else those of the configuration.

    Args:
        given: TRL's ``optimizers``, already checked by ``check_optimizers``.
        before: ``roles.trained`` as the user knows them; the optimizer steps what the engine put in their place.
        vf_coef: weight of the value loss in the user's optimizer of both.

    Raises:
        ConfigError: the optimizer has none of the policy's parameters, or none of the critic's.
    """
    optimizer, scheduler = given
    if optimizer is None:
        return build_optimizers(config, roles, num_updates)
    replaced = {id(before[name]): parameter for name, parameter in roles.trained.items()}
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
    ids = set(map(id, roles.trained.values()))
    parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in ids]
    own = {role: {id(p) for p in roles.role(role).trained.values()} for role in (POLICY, VALUE)}
    if own[POLICY].isdisjoint(map(id, parameters)):
        raise ConfigError(
            "optimizers: the optimizer holds none of the parameters that the policy trains. With peft_config these are "
            "created by the trainer: wrap the model with get_peft_model, and create the optimizer after that"
        )
    if own[VALUE].isdisjoint(map(id, parameters)):
        raise ConfigError(
            "optimizers: got none of value_model's parameters, so the critic would never learn; wanted those of "
            "both models: AdamW([*model.parameters(), *value_model.parameters()])"
        )
    limit, scale = config.train.max_grad_norm, loss_scale(config.train)
    if scheduler is None:
        scheduler = schedule(config, optimizer, num_updates)
        return [PassOptimizer(POLICY, parameters, optimizer, scheduler, limit, scale, vf_coef)]
    return [OwnOptimizer(POLICY, parameters, optimizer, scheduler, limit, scale, vf_coef)]
