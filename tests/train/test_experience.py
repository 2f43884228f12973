"""What the update learns from, where an oracle of whole steps does not come."""

import pytest
import torch

from tests.train.runs import tiny_run
from tether.train.experience import Outputs, targets


@pytest.mark.parametrize(
    ("scores", "std"), [([1.0, 1.0], 1.0), ([1.0, 1.0 + 1e-5], 1.0), ([1.0, 3.0], 1.0), ([0.0, 8.0], 4.0)]
)
def test_the_kl_in_the_loss_keeps_its_coefficient_where_all_advantages_are_equal(tmp_path, scores, std):
    """Divided by the square root of the ε that whitening adds to a variance of 0, it would be ten thousand times it."""
    mask = torch.ones(2, 1, dtype=torch.bool)
    zeros = torch.zeros(2, 1)
    outputs = Outputs(mask, zeros, zeros, None, zeros)
    changes = {"ppo__advantage_estimator": "reinforce_pp", "ppo__kl_in": "loss", "ppo__kl_coef": 0.05}
    learned = targets(outputs, torch.tensor(scores), mask, tiny_run(tmp_path, **changes), kl_coef=0.05)
    assert learned.advantage_std == pytest.approx(std)
