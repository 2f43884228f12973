"""A critic copied from a reward source starts on the scale of what is trained on, not of what the source says."""

from __future__ import annotations

import statistics

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.build import micro_batch, save_adapter
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tether.config.schema import RunConfig
from tether.models.roles import VALUE
from tether.train import trainer as trainer_module
from tether.train.rollout import Judged
from tether.train.run import open_trainer, train_policy
from tether.types import RewardOutput

BIAS = -5.0


def judge_of(folder, *, lora=False, has_bias=True):
    """A judge whose scores lie about ``BIAS``, or 0 without it, told apart by some tenths."""
    if lora:
        base = folder / "llama-tied"
        save_tiny(base, "llama")
        judge = save_adapter(folder / "judge", base, reward=True)
        file, name = judge / "adapter_model.safetensors", "base_model.model.score"
    else:
        judge = folder / "judge"
        save_tiny(judge, "llama", num_labels=1)
        file, name = judge / "model.safetensors", "score"
    tensors = load_file(file)
    tensors |= {f"{name}.weight": 0.2 * torch.randn(1, 16, generator=torch.Generator().manual_seed(3))}
    bias = {f"{name}.bias": torch.tensor([BIAS])} if has_bias else {}
    save_file(tensors | bias, file, metadata={"format": "pt"})
    return judge


def scaled_run(folder, *, lora=False, others=(), weight=1.0, norm=None, **changes) -> RunConfig:
    judge = judge_of(folder, lora=lora) if not (folder / "judge").exists() else folder / "judge"
    source = {"type": "adapter" if lora else "model", "path": str(judge), "name": "judge", "weight": weight}
    changes = {"model__lora": {}} | changes if lora else changes
    changes = {"rewards": [source | ({} if norm is None else {"norm": norm}), *others], "ppo__lam": 1.0} | changes
    return tiny_run(folder, **{"train__rollout_batch_size": 32, "sampling__response_length": 4} | changes)


def first_values(config, monkeypatch):
    """Values, returns and mask of the first update."""
    seen, measure = [], trainer_module.measure_critic

    def noted(metrics, outputs, learned):
        seen.append((outputs.values, learned.returns, outputs.mask))
        measure(metrics, outputs, learned)

    monkeypatch.setattr(trainer_module, "measure_critic", noted)
    train_policy(config)
    return seen[0]


@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
@pytest.mark.parametrize("init", [None, "reward"])
def test_values_start_near_the_returns_of_normalised_scores(tmp_path, monkeypatch, lora, init):
    changes = {"value__init": init, "ppo__score_norm": "frozen", "train__max_steps": 1}
    values, returns, mask = first_values(scaled_run(tmp_path, lora=lora, **changes), monkeypatch)
    assert abs(float(values[mask].mean() - returns[mask].mean())) < 1
    assert float(values[mask].std()) < 5


def test_values_of_a_judge_that_counts_against_rise_with_the_score_to_come(tmp_path, monkeypatch):
    config = scaled_run(tmp_path, weight=-1.0, train__max_steps=1, ppo__kl_coef=0.0)
    values, returns, mask = first_values(config, monkeypatch)
    last = mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
    assert statistics.correlation(values[last].tolist(), returns[last].tolist()) > 0.3
    assert float(values[mask].mean()) == pytest.approx(-BIAS, abs=1.5)


@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.25},
        {"norm": [-4.0, 0.5]},
        {"norm": "auto", "weight": 2.0, "ppo__score_norm": "frozen"},
        {"weight": -3.0, "ppo__score_norm": "running"},
    ],
    ids=["weight", "norm", "auto", "running"],
)
def test_the_copy_is_moved_as_the_scores_are(tmp_path, lora, changes):
    """The line from a raw to a trained score takes the copied values to the critic's."""
    with open_trainer(scaled_run(tmp_path, lora=lora, **changes)) as trainer:
        trainer.freeze_norms()
        before = trainer.roles.score_pass(micro_batch(), 1.0).values
        answers = trainer.rollout(trainer_module.Metrics())
        judged, _ = trainer.score(answers, trainer_module.Metrics())
        after = trainer.roles.score_pass(micro_batch(), 1.0).values
        raw, trained = torch.tensor(judged.components["judge"]), judged.scores
        low, high = int(raw.argmin()), int(raw.argmax())
        slope = float((trained[high] - trained[low]) / (raw[high] - raw[low]))
        shift = float(trained[high]) - slope * float(raw[high])
        mask = micro_batch().response_mask
        assert slope != pytest.approx(1.0, abs=0.1)
        assert torch.allclose(after[mask], slope * before[mask] + shift, rtol=1e-3, atol=1e-3)
        trainer.score(answers, trainer_module.Metrics())
        assert torch.equal(trainer.roles.score_pass(micro_batch(), 1.0).values, after)


@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
def test_a_judge_without_a_bias_is_shifted_too(tmp_path, lora):
    judge_of(tmp_path, lora=lora, has_bias=False)
    with open_trainer(scaled_run(tmp_path, lora=lora, norm=[7.0, 0.5])) as trainer:
        before = trainer.roles.score_pass(micro_batch(), 1.0).values
        trainer.score(trainer.rollout(trainer_module.Metrics()), trainer_module.Metrics())
        after, mask = trainer.roles.score_pass(micro_batch(), 1.0).values, micro_batch().response_mask
        assert torch.allclose(after[mask], (before[mask] - 7) / 0.5, atol=1e-4)


def test_other_sources_count_at_their_mean(tmp_path):
    other = {"type": "function", "path": str(tmp_path / "rewards.py"), "name": "letters", "weight": 10.0}
    config = scaled_run(tmp_path, weight=0.5, others=[other])
    with open_trainer(config) as trainer:
        before = trainer.roles.score_pass(micro_batch(), 1.0).values
        components = {"judge": [BIAS, BIAS], "letters": [0.2, 0.4]}
        trainer.scale_critic(Judged(torch.zeros(2), components), trainer_module.algo.ScoreMoments())
        after = trainer.roles.score_pass(micro_batch(), 1.0).values
        mask = micro_batch().response_mask
        assert torch.allclose(after[mask], 0.5 * before[mask] + 10 * 0.3, atol=1e-5)


def test_scores_of_the_callers_own_say_nothing_of_the_source(tmp_path):
    with open_trainer(scaled_run(tmp_path, weight=-1.0)) as trainer:
        before = trainer.roles.score_pass(micro_batch(), 1.0).values
        answers = trainer.rollout(trainer_module.Metrics())
        trainer.score(answers, trainer_module.Metrics(), RewardOutput([1.0] * len(answers.texts)))
        assert torch.equal(trainer.roles.score_pass(micro_batch(), 1.0).values, before)


def test_a_copy_of_the_one_source_as_it_is_stays_and_has_no_other_head(tmp_path):
    with open_trainer(scaled_run(tmp_path)) as trainer:
        before = {name: p.clone() for name, p in trainer.roles.role(VALUE).trained.items()}
        trainer.scale_critic(Judged(torch.zeros(1), {"judge": [BIAS]}), trainer_module.algo.ScoreMoments())
        after = trainer.roles.role(VALUE).trained
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
def test_a_run_that_goes_on_is_not_moved_once_more(tmp_path, lora):
    """Neither after an update nor where the run stopped in the middle of its first."""
    constant = {"train__lr_scheduler_type": "constant", "train__save_steps": 1, "ppo__score_norm": "frozen"}
    ours, theirs = tmp_path / "parts", tmp_path / "whole"
    train_policy(scaled_run(tmp_path, lora=lora, output_dir=str(theirs), **constant))
    train_policy(scaled_run(tmp_path, lora=lora, output_dir=str(ours), train__max_steps=1, **constant))
    train_policy(scaled_run(tmp_path, lora=lora, output_dir=str(ours), resume=True, **constant))
    assert reproducible(ours)[-1] == reproducible(theirs)[-1]
    assert_same_weights(weights(ours), weights(theirs))


def test_a_run_that_stops_after_the_move_is_not_moved_once_more(tmp_path, monkeypatch):
    constant = {"train__lr_scheduler_type": "constant", "train__save_steps": 1, "ppo__score_norm": "frozen"}
    ours, theirs = tmp_path / "parts", tmp_path / "whole"
    train_policy(scaled_run(tmp_path, output_dir=str(theirs), **constant))
    scale = trainer_module.PPOTrainer.scale_critic

    def and_stop(self, judged, moments):
        scale(self, judged, moments)
        self.stop.reason = "SIGTERM"

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.PPOTrainer, "scale_critic", and_stop)
        stopped = train_policy(scaled_run(tmp_path, output_dir=str(ours), **constant))
    assert stopped.interrupted is not None and (ours / "checkpoint-0").is_dir()
    train_policy(scaled_run(tmp_path, output_dir=str(ours), resume=True, **constant))
    assert reproducible(ours)[-1] == reproducible(theirs)[-1]
    assert_same_weights(weights(ours), weights(theirs))
