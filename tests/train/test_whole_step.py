"""The trainer's parameters after an update equal those of an update written a second time, row by row.

In float64: in float32 Adam turns the rounding of a gradient that is really 0 (GPT-2's key biases) into
steps. Llama's norms stay in float32 even so.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import EOS
from tests.train import reference
from tests.train.runs import tiny_run
from tether.generation.fake import FakeGenerator
from tether.metrics.trackers import Trackers
from tether.models.heads import ScalarHead
from tether.models.roles import build_roles
from tether.rewards.fake import FakeRewards
from tether.train.callbacks import Callbacks
from tether.train.display import NullDisplay
from tether.train.distributed import Dist
from tether.train.log import RunLog
from tether.train.parts import Parts
from tether.train.run import load_data
from tether.train.trainer import PPOTrainer
from tether.types import Sampling

RESPONSES = [
    [10, 11, 12, EOS], [20, EOS], [13, 14, 15, 16, 17, 18], [21, 22, EOS],
    [EOS], [30, 31, 32, 33, EOS], [12, 12, 12, 12, 12, 12], [25, 26, EOS],
]  # fmt: skip
SCORES = [1.0, -0.5, 0.25, 2.0, -1.5, 0.75, 0.0, 1.25]


def trainer_for(config, tmp_path):
    tokenizer, prompts, _ = load_data(config)
    log = RunLog(config.output_dir, NullDisplay(), Trackers("none", "t", tmp_path, {}), logging_steps=1)
    callbacks = Callbacks((), config, len(prompts.prompts))
    dist = Dist()
    roles = build_roles(config, tokenizer, device=dist.device, mixed_precision=False)
    scores = iter(SCORES)
    parts = Parts(
        roles=roles,
        generator=FakeGenerator(RESPONSES),
        rewards=FakeRewards(lambda query, response: next(scores)),
        tokenizer=tokenizer,
        sampling=Sampling(config.sampling.response_length, config.sampling.temperature, frozenset({EOS})),
        prompts=prompts.prompts,
        eval_prompts=[],
    )
    return PPOTrainer(config, parts, dist=dist, log=log, callbacks=callbacks)


CASES = {
    "defaults": {},
    "k3, temperature, gamma, lambda": {
        "ppo__kl_estimator": "k3", "sampling__temperature": 0.7, "ppo__gamma": 0.9, "ppo__lam": 0.6,
    },
    "no whitening, no value clip": {"ppo__whiten_advantages": False, "ppo__cliprange_value": None},
    "rewards whitened, tight clips": {
        "ppo__whiten_rewards": True, "ppo__cliprange": 0.01, "ppo__cliprange_value": 0.001,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "tied", "value"), [("llama", False, "model"), ("gpt2", True, "head")])
def test_parameters_equal_an_update_written_a_second_time(tmp_path, kind, tied, value, case):
    config = tiny_run(
        tmp_path, kind=kind, tied=tied, value__kind=value, ppo__kl_coef=0.3, ppo__num_ppo_epochs=3,
        train__max_steps=1, **CASES[case],
    )  # fmt: skip
    trainer = trainer_for(config, tmp_path)
    for name in ("policy", "reference", "value"):
        trainer.roles.role(name).model.double()
    trainer.roles.role("value").head.double()
    with torch.no_grad():  # a policy that is not the reference, and a critic that does not say 0 of everything
        generator = torch.Generator().manual_seed(1)
        for p in trainer.roles.role("policy").trained.values():
            p += 0.02 * torch.randn(p.shape, generator=generator)
        head = trainer.roles.role("value").head
        head.weight += 0.1 * torch.randn(head.weight.shape, generator=generator)

    policy = copy.deepcopy(trainer.roles.role("policy").model)
    frozen = AutoModelForCausalLM.from_pretrained(config.model.path).eval().double()
    shared = value == "head"
    if shared:
        backbone = policy.base_model
    else:
        critic = copy.deepcopy(trainer.roles.role("value").model)
        backbone = critic.base_model
    head_weight = torch.nn.Parameter(head.weight.detach().clone())

    trainer.step()

    draws = trainer.stream.batch(0)
    queries = [list(trainer.parts.prompts[i].token_ids) for i, _ in draws]
    settings = reference.Settings(
        kl_coef=0.3, kl_estimator=config.ppo.kl_estimator, epochs=3, cliprange=config.ppo.cliprange,
        cliprange_value=config.ppo.cliprange_value, vf_coef=config.ppo.vf_coef, gamma=config.ppo.gamma,
        lam=config.ppo.lam, temperature=config.sampling.temperature,
        whiten_advantages=config.ppo.whitens_advantages, whiten_rewards=config.ppo.whiten_rewards,
        learning_rate=config.learning_rate, max_grad_norm=config.train.max_grad_norm,
    )  # fmt: skip
    rollouts = list(zip(queries, RESPONSES, strict=True))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    reference.update(policy, frozen, backbone, head_weight, rollouts, SCORES, settings, shared=shared)

    trained = trainer.roles.role("policy").trained
    moved = max(float((p.detach() - before[name]).abs().max()) for name, p in policy.named_parameters())
    assert moved > 1e-3, "the update is too small for this test to mean anything"
    for name, p in policy.named_parameters():
        torch.testing.assert_close(trained[name], p, atol=1e-7, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    torch.testing.assert_close(head.weight, head_weight, atol=1e-7, rtol=0)
    if not shared:
        ours = dict(trainer.roles.role("value").model.base_model.named_parameters())
        for name, p in backbone.named_parameters():
            torch.testing.assert_close(ours[name], p, atol=1e-7, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def test_critic_head_is_a_scalar_head(tmp_path):
    trainer = trainer_for(tiny_run(tmp_path, value__kind="model"), tmp_path)
    assert isinstance(trainer.roles.role("value").head, ScalarHead)
