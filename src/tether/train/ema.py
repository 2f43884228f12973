"""A moving average of the policy's weights, evaluated and saved in place of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tether.algo.masking import wide
from tether.errors import CheckpointError
from tether.models.roles import check_names


class PolicyAverage:
    """Exponential moving average of parameters, stored in float32, or in float64 for float64 parameters.

        θ̄_0 = θ_0
        θ̄_t = d θ̄_{t−1} + (1 − d) θ_t

    Args:
        parameters: θ by name; they continue to be trained.
        decay: d, from 0 (the parameters themselves) to below 1.
        part: returns this process's part of a parameter, if an engine has sharded it.

    Source: Ouyang et al. 2022, appendix C.4, https://arxiv.org/abs/2203.02155 (d = .992)
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        decay: float,
        part: Callable[[nn.Parameter], Tensor] = torch.Tensor.detach,
    ) -> None:
        assert 0 <= decay < 1, decay
        self.parameters = dict(parameters)
        """θ by name."""
        self._part = part
        self._averages = {name: wide(part(p)).clone() for name, p in parameters.items()}
        self._decay = decay
        self._is_applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average with the current parameters."""
        assert not self._is_applied, "the parameters are the average now"
        for name, p in self.parameters.items():
            average = self._averages[name]
            average.lerp_(self._part(p).to(average.dtype), 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context, the parameters are the average, rounded to their own dtype.

        Afterwards, also after an exception, they are bitwise what they were before. May not be nested.
        """
        assert not self._is_applied, "the parameters are the average already"
        trained = {name: self._part(p).clone() for name, p in self.parameters.items()}
        self._is_applied = True
        try:
            self._fill(self._averages)
            yield
        finally:
            self._fill(trained)
            self._is_applied = False

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            self._part(p).copy_(tensors[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The average, by parameter name."""
        return dict(self._averages)

    def load_state_dict(
        self, state: Mapping[str, Tensor], cut: Callable[[nn.Parameter, Tensor], Tensor] = lambda _, full: full
    ) -> None:
        """Loads the tensors of ``state_dict``, as gathered by an engine if it sharded them.

        Args:
            cut: returns the section of a tensor for this process's part of its parameter.

        Raises:
            CheckpointError: names or shapes do not match this run.
        """
        own = self._averages
        check_names(own, state, "averaged tensor")
        state = {name: cut(self.parameters[name], tensor) for name, tensor in state.items()}
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"{name}: the checkpoint's average has shape {list(state[name].shape)}, this run's "
                    f"{list(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
