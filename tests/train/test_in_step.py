"""Forwards that all processes make together, in one process."""

import pytest
import torch

from tests.models.build import roles_of, run_config, save_model
from tether.errors import OutOfStep
from tether.machine.distributed import Dist
from tether.models.roles import POLICY
from tether.train.engines.in_step import forwards_in_step


@pytest.mark.parametrize("has_own", [False, True])
def test_memory_that_runs_out_in_a_forward_is_not_for_one_process_to_mend(tmp_path, has_own):
    roles = roles_of(run_config(save_model(tmp_path / "model")))
    policy, ids = roles.role(POLICY).model, torch.tensor([[5, 7]])
    if has_own:
        policy.forward = policy.forward  # as hooks of accelerate leave it
    before = vars(policy).get("forward")
    wanted = policy(input_ids=ids).logits

    def out_of_memory(*call):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with forwards_in_step(roles, Dist()):
        assert torch.equal(policy(input_ids=ids).logits, wanted)
        handle = policy.model.layers[1].register_forward_pre_hook(out_of_memory)
        with pytest.raises(OutOfStep, match="out of memory in a forward pass, in which all processes take part"):
            policy(input_ids=ids)
        handle.remove()
    assert vars(policy).get("forward") == before
    assert torch.equal(policy(input_ids=ids).logits, wanted)
