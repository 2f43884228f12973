"""The defaults of the algorithm, written down a second time: what is known to matter, and where that is known from."""

import pytest

from tether.config.schema import PPOConfig, RunConfig, SamplingConfig, TrainConfig


def test_defaults_are_those_that_are_known_to_work():
    ppo, sampling, train = PPOConfig(), SamplingConfig(), TrainConfig(max_steps=1)
    assert ppo.gamma == 1.0  # less shortens answers: Huang et al. 2024, https://arxiv.org/abs/2403.17031
    assert ppo.lam == 0.95
    assert sampling.temperature == 1.0  # anything else trains another distribution than the model's own
    assert not sampling.is_truncated  # the ratio and the KL would be those of a distribution that nothing is drawn from
    assert (ppo.kl_in, ppo.kl_estimator) == ("reward", "k1")  # the only pair with the gradient of the sequence KL
    assert not ppo.whiten_rewards and ppo.whitens_advantages  # whitened rewards are another objective
    assert ppo.score_norm is None and ppo.reward_clip is None and ppo.advantage_clip is None
    assert (ppo.cliprange, ppo.cliprange_high, ppo.dual_clip) == (0.2, None, None)  # Schulman et al. 2017
    assert ppo.cliprange_value == 0.2
    assert (ppo.kl_coef, ppo.kl_target) == (0.05, None)
    assert ppo.entropy_coef == ppo.ptx_coef == 0.0
    assert ppo.loss_reduction == "token_mean"  # one over an answer's length favours long wrong ones: Yu et al. 2025
    assert train.adam_epsilon == 1e-5  # Huang et al. 2022, detail 3
    assert train.optim == "adamw_torch_fused"  # what transformers takes, and the fastest
    assert (train.lr_scheduler_type, train.lr_scheduler_kwargs, train.warmup_ratio) == ("linear", {}, 0.0)  # down to 0
    assert train.weight_decay == 0.0 and train.max_grad_norm == 1.0


@pytest.mark.parametrize(
    ("epochs", "prompts", "batch", "updates"),
    [(1.1, 400, 8, 55), (0.7, 100, 10, 7), (2.3, 1000, 100, 23), (3, 5, 8, 2), (0.29, 100, 29, 1), (1e-3, 1000, 1, 1)],
)
def test_a_run_makes_as_many_updates_as_its_epochs_need(epochs, prompts, batch, updates):
    """1.1 · 400 is 440.00000000000006 in floats."""
    train = {"num_train_epochs": epochs, "rollout_batch_size": batch, "micro_batch_size": 1}
    assert run_of(train).num_updates(prompts) == updates


@pytest.mark.parametrize(
    ("batch", "minis", "processes", "rows"),
    [(64, 1, 1, 8), (64, 1, 4, 8), (4, 1, 1, 4), (4, 1, 8, 4), (100, 1, 1, 5), (12, 1, 4, 6), (64, 16, 1, 4),
     (48, 4, 1, 6), (48, 4, 4, 6), (24, 2, 4, 6), (26, 1, 2, 1), (13, 1, 1, 1), (1000, 1, 1, 8), (1000, 1, 2, 5)],
)  # fmt: skip
def test_micro_batches_are_as_large_as_fits_up_to_eight(batch, minis, processes, rows):
    config = run_of({"max_steps": 1, "rollout_batch_size": batch}, ppo={"num_mini_batches": minis})
    at_once = config.answers_at_once(processes)
    assert config.mini_batch_size % at_once == 0 and at_once == min(rows * processes, config.mini_batch_size)
    saved = config.resolved(bf16=False, num_processes=processes)
    assert saved.train.micro_batch_size == rows
    assert RunConfig.model_validate(saved.model_dump(mode="json")) == saved


def test_micro_batches_that_are_set_stay_as_they_are():
    with pytest.raises(ValueError, match="micro_batch_size 8 must divide rollout_batch_size 100"):
        run_of({"max_steps": 1, "rollout_batch_size": 100, "micro_batch_size": 8})
    small = run_of({"max_steps": 1, "rollout_batch_size": 64, "micro_batch_size": 2})
    assert small.resolved(bf16=False).train.micro_batch_size == 2
    budget = run_of({"max_steps": 1, "rollout_batch_size": 100, "max_tokens_per_micro_batch": 512})
    assert budget.resolved(bf16=False).train.micro_batch_size is None


def test_a_mini_batch_that_the_processes_cannot_share_is_refused():
    config = run_of({"max_steps": 1, "rollout_batch_size": 64})
    with pytest.raises(ValueError, match=r"in each of 3 processes .* mini-batch size 64: launch a different number"):
        config.answers_at_once(3)


def run_of(train, **sections):
    return RunConfig.model_validate(
        {
            "model": {"path": "m"}, "rewards": [{"type": "http", "url": "http://judge"}], "data": {"prompts": "p"},
            "train": train, "output_dir": "o",
        } | sections
    )  # fmt: skip
