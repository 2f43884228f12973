"""The optimizer and schedule that a user brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from tether.config.schema import RunConfig
from tether.errors import ConfigError
from tether.models.roles import POLICY, ModelRoles
from tether.train.optim import PassOptimizer, build_optimizers, schedule


class OwnOptimizer(PassOptimizer):
    """One optimizer of policy and critic whose schedule moves on once an update, as TRL's does."""

    def move_on(self) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def note(self, metric: float) -> None:
        """Moves the schedule on, whatever the metric."""
        self.scheduler.step()


def optimizers_of(
    given: Any, config: RunConfig, roles: ModelRoles, num_updates: int
) -> list[PassOptimizer]:
    """The optimizers of a run: the user's if there is one, else those that the configuration asks for.

    Args:
        given: TRL's ``optimizers``, an optimizer and a schedule, or None for either.

    Raises:
        ConfigError: it is something else, or the optimizer has none of the policy's parameters.
    """
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ConfigError(f"optimizers: got {type(given).__name__}, wanted (optimizer, lr_scheduler) or (None, None)")
    optimizer, scheduler = given
    if optimizer is None and scheduler is not None:
        raise ConfigError("optimizers: got a schedule without its optimizer; wanted both, or None for both")
    if optimizer is None:
        return build_optimizers(config, roles, num_updates)
    if not isinstance(optimizer, Optimizer) or (scheduler is not None and not hasattr(scheduler, "step")):
        kinds = f"{type(optimizer).__name__} and {type(scheduler).__name__}"
        raise ConfigError(f"optimizers: got {kinds}, wanted a torch optimizer and its schedule or None")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = {id(parameter) for parameter in roles.role(POLICY).trained.values()}
    if trained.isdisjoint(map(id, parameters)):
        raise ConfigError(
            "optimizers: the optimizer holds none of the parameters that the policy trains. With peft_config these are "
            "made by the trainer: wrap the model by get_peft_model, and make the optimizer after that"
        )
    limit = config.train.max_grad_norm
    if scheduler is None:
        scheduler = schedule(config, optimizer, num_updates)
        return [PassOptimizer(POLICY, parameters, optimizer, scheduler, limit)]
    return [OwnOptimizer(POLICY, parameters, optimizer, scheduler, limit)]
