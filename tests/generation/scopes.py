"""A model as ``HFGenerator`` wants it, and what its forwards saw."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tether.generation.hf import HFGenerator
from tether.types import Completion, Request, Sampling


class Scope:
    """A policy scope that puts the model in eval mode, counts, and knows whether it is open."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_open = False
        self.shapes: list[tuple[int, ...]] = []

        def note_shape(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self.is_open:
                self.shapes.append(tuple(kwargs["input_ids"].shape))

        model.register_forward_pre_hook(note_shape, with_kwargs=True)

    @contextmanager
    def __call__(self) -> Iterator[nn.Module]:
        self.is_open, was_training = True, self.model.training
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.train(was_training)
            self.is_open = False

    def tried(self, **options) -> HFGenerator:
        """A generator that has found out how the model is decoded; what that took is not among the shapes."""
        generator = HFGenerator(self, device="cpu", **options)
        list(generator.generate([Request([0], key=0)], Sampling(1)))
        self.shapes.clear()
        return generator


def answers(model: nn.Module, requests: list[Request], sampling: Sampling, batch_size: int = 16) -> list[Completion]:
    """All answers, in the order of the requests."""
    generated = dict(HFGenerator(Scope(model), batch_size=batch_size, device="cpu").generate(requests, sampling))
    return [generated[i] for i in range(len(requests))]
