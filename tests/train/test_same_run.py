"""What a run may change that goes on: what it is told to change where it does not fit into memory, and what gives an
answer a score that had none."""

from __future__ import annotations

import re
import signal
from unittest.mock import Mock

import pytest
import torch

from tests.faults.test_bad_numbers import Heard
from tests.tiny import save_tiny
from tests.train.runs import REWARD, tiny_run, write_prompts
from tests.train.test_run import Signal, assert_same_weights, reproducible, weights
from tether.errors import CheckpointError, RewardError
from tether.metrics.writers import read_jsonl
from tether.train import folder, same_run
from tether.train.engines.base import out_of_step
from tether.train.folder import is_finished
from tether.train.run import open_trainer, train_policy
from tether.train.same_run import ERROR_MAY_CHANGE, check_same_run, may_change


def test_every_key_that_would_help_a_run_of_several_processes_may_change():
    told = str(out_of_step("a forward pass", torch.OutOfMemoryError("CUDA out of memory")))
    keys = re.findall(r"(?:train|sampling)\.\w+", told)
    assert len(keys) == 3 and "a reward's batch_size" in told
    keys += [f"sampling.vllm.{name}" for name in ("gpu_memory_utilization", "enable_sleep_mode", "enforce_eager")]
    for key in [*keys, "rewards.0.batch_size", "rewards.3.members.1.batch_size", "train.offload_idle_roles"]:
        assert may_change(key) and may_change(key, is_finished=True)
    assert not may_change("sampling.vllm")


@pytest.mark.parametrize(
    "name", ["max_length", "missing", "attempts", "max_tokens", "temperature", "extra_body.max_completion_tokens"]
)
def test_what_gives_an_answer_a_score_may_change_unless_the_run_is_finished(name):
    for key in (f"rewards.0.{name}", f"rewards.11.members.2.{name}"):
        assert may_change(key) and not may_change(key, is_finished=True)
    assert not ERROR_MAY_CHANGE.fullmatch(f"sampling.{name}") and not may_change(f"rewards.0.weight.{name}")


def test_a_run_that_an_answer_too_long_for_the_judge_ended_goes_on_when_it_gets_a_score(tmp_path):
    """Sampling is keyed, so that the answer would be too long again however often the run goes on."""
    judge = {"type": "model", "path": str(save_tiny(tmp_path / "judge", num_labels=1)), "name": "judge"}
    judge |= {"input_format": "response"}
    train_policy(tiny_run(tmp_path, rewards=[judge], train__max_steps=1, train__save_steps=1))
    judge |= {"max_length": 5}
    for _ in range(2):
        with pytest.raises(RewardError, match=r"has [67] tokens .* limit is 5: set rewards\.0\.missing to"):
            train_policy(tiny_run(tmp_path, rewards=[judge], resume=True))
    train_policy(tiny_run(tmp_path, rewards=[judge | {"missing": -1.0}], resume=True))
    rows = [row for row in read_jsonl(tmp_path / "out" / "samples.jsonl") if row["step"] == 2]
    missed = [row["rewards"]["judge"] == -1 for row in rows]
    assert missed == [len(row["response"].split()) > 5 for row in rows] and len(set(missed)) == 2
    assert read_jsonl(tmp_path / "out" / "metrics.jsonl")[-1]["rewards/judge/missing"] == sum(missed) / len(rows)


def test_the_sampling_temperature_may_not_change():
    assert not may_change("sampling.temperature")


SMALLER = {
    "train__micro_batch_size": 2, "train__gradient_checkpointing": True, "sampling__batch_size": 2,
    "train__offload_idle_roles": True,
}  # fmt: skip


@pytest.mark.parametrize("key", SMALLER)
def test_a_run_goes_on_with_less_at_a_time(tmp_path, key):
    """One mini-batch an update, so that it holds the same rows: numbers are rounded otherwise, and that is said."""
    usual = tiny_run(tmp_path, output_dir=str(tmp_path / "usual"))
    train_policy(usual)
    train_policy(tiny_run(tmp_path), callbacks=[Signal(signal.SIGTERM, 1)])
    display = Heard()
    train_policy(tiny_run(tmp_path, resume=True, **{key: SMALLER[key]}), display=display)
    told = [text for text in display.said if "rounded differently" in text]
    assert len(told) == 1 and f"another {key.replace('__', '.')}:" in told[0] and "contain different" not in told[0]
    for name, x in weights(usual.output_dir).items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], x, atol=1e-6, rtol=0)
    assert [row["step"] for row in reproducible(tmp_path / "out")] == [1, 2]


@pytest.mark.parametrize("budget", [{"train__micro_batch_size": 2}, {"train__max_tokens_per_micro_batch": 64}])
def test_it_is_said_where_mini_batches_hold_other_answers(tmp_path, budget):
    minis = {"train__save_steps": 1, "ppo__num_mini_batches": 2}
    train_policy(tiny_run(tmp_path, train__max_steps=1, **minis))
    display = Heard()
    if "train__max_tokens_per_micro_batch" in budget:
        minis["train__micro_batch_size"] = None
    train_policy(tiny_run(tmp_path, resume=True, **minis | budget), display=display)
    assert sum("mini-batches contain different ones" in text for text in display.said) == 1


def test_what_was_found_to_fit_is_of_the_sizes_that_were_tried(tmp_path):
    halved = tiny_run(tmp_path, train__save_steps=1, sampling__batch_size=8)
    with open_trainer(halved) as trainer:
        trainer.state.halvings, trainer.parts.generator.batch_size = 1, 4
        trainer.save()
    path = halved.output_dir / "checkpoint-0"
    for changes, wanted in {
        (): (1, 4),
        (("train__micro_batch_size", 2),): (0, 4),
        (("sampling__batch_size", 16),): (1, 4),
        (("sampling__batch_size", 2),): (1, 2),
    }.items():
        config = tiny_run(tmp_path, resume=str(path), **{"sampling__batch_size": 8} | dict(changes))
        with open_trainer(config) as trainer:
            assert (trainer.state.halvings, trainer.parts.generator.batch_size) == wanted


def test_more_answers_are_decoded_where_as_many_as_were_asked_for_had_fitted(tmp_path):
    train_policy(tiny_run(tmp_path, train__save_steps=1, sampling__batch_size=8))
    with open_trainer(tiny_run(tmp_path, train__save_steps=1, sampling__batch_size=16, resume=True)) as trainer:
        assert trainer.parts.generator.batch_size == 16


def moved(folder, **changes):
    """A run whose model, prompts, rewards and earlier output were moved to ``folder``, with what its file says then."""
    for name in ("llama-tied", "prompts.jsonl", "rewards.py", "out"):
        (folder.parent / name).rename(folder / name)
    return tiny_run(folder, **changes)


@pytest.fixture
def other(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    return folder


def test_a_run_whose_model_data_reward_and_folder_moved_goes_on_bitwise(tmp_path, other):
    straight = tiny_run(tmp_path, output_dir=str(tmp_path / "straight"))
    train_policy(straight)
    train_policy(tiny_run(tmp_path), callbacks=[Signal(signal.SIGTERM, 1)])
    display = Heard()
    config = moved(other, resume=True)
    assert [row["step"] for row in train_policy(config, display=display).updates] == [2]
    assert_same_weights(weights(config.output_dir), weights(straight.output_dir))
    assert reproducible(config.output_dir) == reproducible(straight.output_dir)
    for key in ("model.path", "data.prompts", "rewards.0.path", "output_dir"):
        assert any(text.startswith(f"resuming with a change, {key}: was ") for text in display.said), key


@pytest.mark.parametrize("place", ["model", "reward", "prompts"])
def test_what_lies_elsewhere_must_be_the_same(tmp_path, other, place):
    train_policy(tiny_run(tmp_path), callbacks=[Signal(signal.SIGTERM, 1)])
    config = moved(other, resume=True)
    if place == "model":
        save_tiny(other / "llama-tied", "llama", tied=True, seed=1)
    elif place == "reward":
        (other / "rewards.py").write_text(REWARD.replace("/ 10", "/ 9"))
    else:
        write_prompts(other / "prompts.jsonl", ["the dog"])
    told = {
        "model": r"model\.path: was '.*llama-tied', now '.*other/llama-tied'\n.* one in a folder by its contents",
        "reward": r"rewards\.0\.path: was .*What may change: .* where unchanged models, datasets and files of rewards",
        "prompts": r"data\.prompts changed since",
    }
    with pytest.raises(CheckpointError, match=f"(?s){told[place]}"):
        train_policy(config)


def test_a_reward_function_is_repaired_in_its_place(tmp_path):
    train_policy(tiny_run(tmp_path), callbacks=[Signal(signal.SIGTERM, 1)])
    config = tiny_run(tmp_path, resume=True)
    (tmp_path / "rewards.py").write_text(REWARD.replace("/ 10", "/ 9"))
    assert [row["step"] for row in train_policy(config).updates] == [2]


def test_a_model_of_the_hub_is_known_by_its_name(tmp_path):
    before, now = (tiny_run(tmp_path, model__path=path) for path in ("org/model", "org/other"))
    with pytest.raises(CheckpointError, match=r"'org/model', now 'org/other'\n.* on the hub is known by its name and"):
        check_same_run(before, now, tmp_path, {"data.prompts": "1"}, {})
    assert check_same_run(before, before.model_copy(update={"resume": True}), tmp_path, {}, {}) == []


def test_a_finished_run_that_moved_is_finished(tmp_path, other, monkeypatch):
    train_policy(tiny_run(tmp_path, train__save_steps=1))
    config = moved(other, resume="auto", train__save_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr("tether.train.build.build_roles", None)
        assert train_policy(config).updates == []
        write_prompts(other / "prompts.jsonl", ["the dog"])
        changed = tiny_run(tmp_path, resume="auto", output_dir=str(config.output_dir))
        assert not is_finished(changed.model_copy(update={"model": config.model, "data": config.data}))


def test_a_resumed_run_hashes_its_rows_once(tmp_path, monkeypatch):
    train_policy(tiny_run(tmp_path), callbacks=[Signal(signal.SIGTERM, 1)])
    hashed = Mock(wraps=same_run.rows_digest)
    monkeypatch.setattr(same_run, "rows_digest", hashed)
    with open_trainer(tiny_run(tmp_path, resume=True)):
        assert hashed.call_count == 3  # prompts, held-out prompts, demonstrations


def test_rows_that_moved_are_read_once_to_know_a_finished_run(tmp_path, other, monkeypatch):
    changes = {"train__num_train_epochs": 1, "resume": "auto"}
    train_policy(tiny_run(tmp_path, **changes))
    config, read = moved(other, **changes), Mock(wraps=folder.load_data)
    monkeypatch.setattr(folder, "load_data", read)
    assert is_finished(config) and read.call_count == 1
