"""Arguments of TRL's trainers, as classes that checkpoints can refer to. Imported only when a trainer is created."""

from __future__ import annotations

from typing import no_type_check

from trl import RewardConfig, SFTConfig


@no_type_check  # excludes TRL's and transformers' own annotations from the type checks in tests
class _OneDevice:
    """A process trains on one device, even if it sees several: transformers would replicate the model on each with
    ``DataParallel`` and multiply the batch size by their number. Launched processes have one each."""

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)


class SftArguments(_OneDevice, SFTConfig):
    """Arguments of ``SFTTrainer``."""


class RewardArguments(_OneDevice, RewardConfig):
    """Arguments of ``RewardTrainer``."""
