"""Arguments of TRL's trainers, in classes that the trainers' checkpoints can name. Imported where a trainer is made."""

from __future__ import annotations

from typing import no_type_check

from trl import RewardConfig, SFTConfig


@no_type_check  # of what TRL's and transformers' own annotations say of their arguments, where tests check types
class _OneDevice:
    """A process trains on one device, also where it sees several: transformers would put a copy of the model on each
    by ``DataParallel`` and multiply the batch by their number. Launched processes have one each."""

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)


class SftArguments(_OneDevice, SFTConfig):
    """Of ``SFTTrainer``."""


class RewardArguments(_OneDevice, RewardConfig):
    """Of ``RewardTrainer``."""
