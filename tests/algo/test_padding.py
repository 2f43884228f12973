"""From model outputs to the loss of a step: what lies in the padding reaches neither the loss nor a gradient.

Each micro-batch goes the trainer's way: outputs at response tokens are laid out on [B, R], losses are per token, the
reduction divides by the whole step.
"""

import math
from typing import get_args

import pytest
import torch

from tether.algo import LossReduction, kl_loss, length_mask, normaliser, policy_loss, reduced, value_loss

LENGTHS = torch.tensor([4, 1, 3, 2])
WIDTH, MAX_LENGTH = 4, 6

LOSSES = {
    "policy": lambda new, a, b: policy_loss(new, a, b, cliprange=0.2, cliprange_high=0.28, dual_clip=3.0),
    "value": lambda new, a, b: value_loss(new, a, b, cliprange_value=0.2),
    "unclipped value": lambda new, a, b: value_loss(new, a, b, cliprange_value=None),
    "kl k1": lambda new, a, b: kl_loss(new, a, b, "k1"),
    "kl k2": lambda new, a, b: kl_loss(new, a, b, "k2"),
    "kl k3": lambda new, a, b: kl_loss(new, a, b, "k3"),
}


@pytest.fixture
def outputs():
    """What a model says of the tokens (a leaf), and two tensors from the rollout."""
    generator = torch.Generator().manual_seed(0)
    new, a, b = torch.randn(3, len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    return new.requires_grad_(), a, b


def step(of_tokens, outputs, how, *, parts=((0, 4),), more=0, filler=0.0):
    """Loss and gradient of a step over micro-batches of the rows in ``parts``, with ``filler`` outside answers."""
    new = outputs[0]
    total, count = 0.0, 0.0
    for start, end in parts:
        mask = length_mask(LENGTHS[start:end], WIDTH + more)
        laid_out = []
        for x in outputs:
            wider = torch.nn.functional.pad(x[start:end], (0, more))
            laid_out.append(torch.where(mask, wider, filler))
        total = total + reduced(of_tokens(*laid_out), mask, how=how)
        count = count + normaliser(mask, how=how, max_length=MAX_LENGTH)
    loss = total / count
    return loss.detach(), torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize("how", get_args(LossReduction))
@pytest.mark.parametrize("of_tokens", LOSSES.values(), ids=LOSSES)
class TestStep:
    @pytest.mark.parametrize("filler", [math.nan, math.inf, 1e6])
    def test_fifty_more_pads_of_anything_change_nothing(self, of_tokens, how, filler, outputs):
        loss, gradient = step(of_tokens, outputs, how)
        dirty_loss, dirty_gradient = step(of_tokens, outputs, how, more=50, filler=filler)
        assert torch.allclose(dirty_loss, loss, atol=0, rtol=1e-14)
        assert torch.allclose(dirty_gradient, gradient, atol=1e-16, rtol=1e-14)
        assert gradient[~length_mask(LENGTHS, WIDTH)].count_nonzero() == 0
        assert gradient.count_nonzero() > 0

    @pytest.mark.parametrize("parts", [((0, 1), (1, 2), (2, 3), (3, 4)), ((0, 3), (3, 4)), ((0, 2), (2, 4))])
    def test_micro_batches_change_nothing(self, of_tokens, how, parts, outputs):
        loss, gradient = step(of_tokens, outputs, how)
        split_loss, split_gradient = step(of_tokens, outputs, how, parts=parts)
        assert torch.allclose(split_loss, loss, atol=0, rtol=1e-7)
        assert torch.allclose(split_gradient, gradient, atol=1e-9, rtol=1e-7)
