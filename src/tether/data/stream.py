"""Decides which prompts a rollout batch answers."""

from __future__ import annotations

import torch

from tether.types import noise_key


class PromptStream:
    """An endless stream of prompts, reshuffled every epoch and cut into full batches.

        draw k of the run = entry k mod N of the permutation of epoch ⌊k / N⌋,      batch i = draws i·B … i·B + B − 1

    Every prompt is drawn once per epoch; a batch may straddle epochs, and fewer prompts than a batch are cycled. A
    batch depends only on its index, so a resumed run needs no state of the stream.

    Args:
        num_prompts: N, number of prompts in the dataset.
        batch_size: B, number of prompts per batch.
        seed: the run's seed.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int) -> None:
        assert num_prompts > 0 and batch_size > 0
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed

    def batch(self, i: int) -> list[tuple[int, int]]:
        """Batch ``i``, from 0: pairs of a prompt's index and how often that prompt was drawn before."""
        draws = range(i * self.batch_size, (i + 1) * self.batch_size)
        epochs = range(draws[0] // self.num_prompts, draws[-1] // self.num_prompts + 1)
        orders = {epoch: self._order(epoch) for epoch in epochs}
        return [(orders[k // self.num_prompts][k % self.num_prompts], k // self.num_prompts) for k in draws]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(noise_key(self.seed, "order", epoch, 0))
        return torch.randperm(self.num_prompts, generator=generator).tolist()
