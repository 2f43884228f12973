"""What no other test noticed until a defect was planted there."""

import itertools
import math

import pytest
import torch

from tests.models.build import roles_of, run_config, save_model
from tether.algo import ratio
from tether.types import noise_key


def test_answers_share_their_noise_only_if_all_four_parts_of_the_key_are_equal():
    parts = itertools.product((0, 1, 11), ("train", "eval", "order", "shuffle"), (0, 1, 11, 111), (0, 1, 11))
    keys = [noise_key(*key) for key in parts]
    assert len(set(keys)) == len(keys) == 3 * 4 * 4 * 3
    assert all(0 <= key < 2**63 for key in keys)


def test_noise_keys_are_the_same_in_every_process():
    """Half of the first 64 bits of BLAKE2b of “0/train/0/0”, as coreutils' b2sum gives them."""
    assert noise_key(0, "train", 0, 0) == 0xB69A41C75F86EC91 >> 1


def test_ratio_of_half_precision_is_taken_in_float32():
    """The difference of these two in bfloat16 would be −2.90625: the ratio of numbers nearer to each other is exact."""
    new, old = torch.tensor([[-3.0]]).bfloat16(), torch.tensor([[-0.1]]).bfloat16()
    assert ratio(new, old).item() == pytest.approx(math.exp(new.item() - old.item()), rel=1e-6)
    assert ratio(new, old).item() != pytest.approx(math.exp(float(new - old)), rel=1e-3)


@pytest.mark.parametrize("lora", [None, {"dropout": 0.3}], ids=["full", "LoRA"])
def test_at_rest_nothing_is_in_train_mode_and_only_what_trains_requires_gradients(tmp_path, lora):
    roles = roles_of(run_config(save_model(tmp_path), lora=lora))
    every = [roles.role(name) for name in ("policy", "reference", "value")]
    trained = {id(p) for role in every for p in role.trained.values()}
    for role in every:
        assert not any(module.training for module in role.model.modules())
        assert all(p.requires_grad == (id(p) in trained) for p in role.model.parameters())
    assert trained.isdisjoint(id(p) for p in roles.role("reference").model.parameters()) == (lora is None)
