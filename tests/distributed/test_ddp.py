"""Two processes under DDP train as one does: mini-batches, micro-batches, uneven rows, all that counts tokens."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from tests.distributed.harness import alone, together
from tests.distributed.runs import (
    MOST_PARAMETER_ERROR,
    assert_both_left_out,
    assert_same_run,
    distance,
    metric_errors,
    overflowing,
    trained,
)
from tests.models.build import save_adapter
from tests.tiny import save_tiny
from tests.train.runs import tiny_run, write_prompts
from tether.errors import TrainingError
from tether.metrics.writers import read_jsonl
from tether.models.checkpoints import list_checkpoints
from tether.train.run import open_trainer, train_policy

PROMPTS = (
    "cat", "i like the red dog and you", "the sun", "you run", "is it good", "a very nice day and a very bad night",
    "rain",
)  # fmt: skip
EVERYWHERE = {
    "train__max_steps": 2, "ppo__kl_coef": 0.2, "sampling__response_length": 8,
    "train__adam_epsilon": 1e-4,  # and half the bound, as in tests/train/test_invariances.py
}  # fmt: skip
CASES = {
    "critic model, several mini-batches, whitening, adaptive KL, running score norm": {
        "value__kind": "model", "ppo__num_mini_batches": 2, "ppo__whiten_rewards": True, "ppo__kl_target": 0.1,
        "ppo__kl_horizon": 50, "ppo__score_norm": "running",
    },
    "critic head, KL in the loss, entropy": {
        "value__kind": "head", "ppo__kl_in": "loss", "ppo__kl_estimator": "k3", "ppo__entropy_coef": 0.01,
        "ppo__num_mini_batches": 2,
    },
    "four roles on one base": {
        "model__lora": {"r": 4}, "value__kind": "adapter", "ppo__num_mini_batches": 2, "ppo__score_norm": "frozen",
        "ppo__score_norm_samples": 9,
        "rewards": [{"type": "adapter", "path": "reward", "weight": 0.5, "batch_size": 3}],
    },
    "uneven rows, demonstrations, average": {
        "value__kind": "model", "train__rollout_batch_size": 7, "train__micro_batch_size": 7, "train__ema_decay": 0.5,
        "data__ptx": "ptx.jsonl", "ppo__ptx_coef": 0.5,
    },
    "fewer answers than processes at the end of a mini-batch": {
        "value__kind": "head", "value__detach": True, "train__rollout_batch_size": 9, "train__micro_batch_size": 3,
        "ppo__num_mini_batches": 3, "ppo__loss_reduction": "sequence_mean",
    },
    "token budget, several answers to a prompt": {
        "sampling__num_generations": 4, "ppo__advantage_estimator": "grpo", "ppo__loss_reduction": "fixed_length",
        "train__micro_batch_size": None, "train__max_tokens_per_micro_batch": 10_000,
    },
    "critic warm-up, LoRA": {"model__lora": {"r": 4}, "value__kind": "head", "value__warmup_steps": 1},
    "critic warm-up, full": {"value__kind": "model", "value__warmup_steps": 1, "ppo__num_mini_batches": 2},
    "mini-batches of one answer": {
        "value__kind": "model", "train__rollout_batch_size": 4, "train__micro_batch_size": 1,
        "ppo__num_mini_batches": 4,
    },
    "truncated answers left out": {"value__kind": "model", "ppo__mask_truncated": True},
    "long answers, a KL that stops updates": {
        "value__kind": "model", "ppo__max_approx_kl": 0.002, "ppo__num_ppo_epochs": 4,
        "train__gradient_checkpointing": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, its reward adapter, prompts and demonstrations."""
    folder = tmp_path_factory.mktemp("ddp")
    save_tiny(folder / "llama-tied")
    save_adapter(folder / "reward", folder / "llama-tied", reward=True)
    write_prompts(folder / "long.jsonl", PROMPTS)
    rows = [{"prompt": text, "completion": "it is a very good day"[: 4 + 3 * i]} for i, text in enumerate(PROMPTS)]
    (folder / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def settings(folder, case, *, num_processes):
    """Changes for ``tiny_run``: what all processes forward at once is the same however many there are."""
    changes = {"data__prompts": str(folder / "long.jsonl"), "data__eval_prompts": str(folder / "long.jsonl")}
    changes |= EVERYWHERE | {"output_dir": str(folder / f"{case}-{num_processes}")} | CASES[case]
    if "rewards" in changes:
        changes["rewards"] = [{**each, "path": str(folder / each["path"])} for each in changes["rewards"]]
    if "data__ptx" in changes:
        changes["data__ptx"] = str(folder / changes["data__ptx"])
    if (at_once := changes.pop("train__micro_batch_size", 2)) is not None:
        rows = changes.get("train__rollout_batch_size", 8) // changes.get("ppo__num_mini_batches", 1)
        changes["train__micro_batch_size"] = min(rows, at_once * (1 if num_processes > 1 else 2))
    else:
        changes["train__micro_batch_size"] = None
    return changes


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_does(folder, case):
    first, second = together(trained, folder, settings(folder, case, num_processes=2), folder=folder)
    one = alone(trained, folder, settings(folder, case, num_processes=1), folder=folder)
    assert (first.engine, first.num_processes, one.engine) == ("DDP", 2, "one process")
    assert distance(first.weights, second.weights) == 0
    assert metric_errors(first.updates, second.updates, most=0) == []
    assert_same_run(first, one, most=MOST_PARAMETER_ERROR / 2)


def refused(folder: Path, changes: Mapping[str, Any]) -> str:
    with pytest.raises(TrainingError) as error:
        trained(folder, changes)
    return str(error.value)


def test_a_run_that_every_answer_is_left_out_of_ends_in_both_alike(folder):
    changes = settings(folder, "truncated answers left out", num_processes=2)
    changes |= {"sampling__response_length": 1, "train__max_steps": 1, "output_dir": str(folder / "none")}
    said = together(refused, folder, changes, folder=folder)
    assert all(each.startswith("nothing was trained: none of the answers of 1 update ended") for each in said)


class Asks(TrainerCallback):
    """What a clock might: one process alone asks for a checkpoint after the first update, and for an evaluation after
    the second."""

    def __init__(self) -> None:
        self.is_first: list[tuple[bool, bool]] = []

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.is_first.append((state.is_world_process_zero, state.is_local_process_zero))
        if os.environ["RANK"] == "1":
            control.should_save = state.global_step == 1
            control.should_evaluate = state.global_step == 2


def with_callback(changes: Mapping[str, Any], folder: Path) -> tuple[list[tuple[bool, bool]], list[float]]:
    asks = Asks()
    result = train_policy(tiny_run(folder, **changes), callbacks=[asks])
    return asks.is_first, [row["step"] for row in result.evaluations]


def test_a_callback_may_ask_in_one_process_alone_and_knows_whether_it_is_the_first(folder):
    changes = settings(folder, "truncated answers left out", num_processes=2) | {"train__max_steps": 3}
    changes |= {"output_dir": str(folder / "asked")}
    first, second = together(with_callback, changes, folder, folder=folder, timeout=60)
    assert first == ([(True, True)] * 3, [0, 2, 3]) and second == ([(False, False)] * 3, [0, 2, 3])
    assert [path.name for path in list_checkpoints(folder / "asked")] == ["checkpoint-1"]


def with_a_bad_gradient(folder: Path, changes: Mapping[str, Any]) -> list[float]:
    """A run in whose only update the losses of the second process are finite and their gradients not; how many
    mini-batches were left out."""
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        backward, factor = trainer.engine.backward, math.nan if trainer.dist.rank == 1 else 1.0
        trainer.engine.backward = lambda loss, role: backward(loss * factor, role)
        trainer.fit()
        return [row["update/num_bad"] for row in trainer.log.updates]


def test_an_overflow_in_one_process_is_left_out_in_all(folder):
    changes = settings(folder, "critic warm-up, full", num_processes=2) | {"value__warmup_steps": 0}
    changes |= {"output_dir": str(folder / "fp16"), "ppo__num_ppo_epochs": 1}
    assert_both_left_out(together(overflowing, folder, changes, folder=folder))


def test_what_led_to_a_bad_gradient_is_written_down_of_all_processes(folder):
    changes = settings(folder, "critic warm-up, full", num_processes=2) | {"value__warmup_steps": 0}
    changes |= {"output_dir": str(folder / "bad"), "train__max_steps": 1, "ppo__num_ppo_epochs": 1}
    found = together(with_a_bad_gradient, folder, changes, folder=folder)
    assert found == [[2.0], [2.0]]
    lines = read_jsonl(folder / "bad" / "bad_batches.jsonl")
    halves = [{rollout["rollout"] for rollout in line["rollouts"]} for line in lines]
    assert [len(half) for half in halves] == [4, 4] and halves[0] | halves[1] == set(range(8))


def sums_of_gradients(folder: Path, changes: Mapping[str, Any]) -> dict[str, int]:
    """How many optimizer steps an update takes, and how often DDP sums gradients of the policy over processes."""
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        hosts, seen = trainer.engine._hosts, []

        def counted(state, bucket):  # DDP reads annotations, and not as text
            seen.append(bucket.is_last())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        hosts["policy"].register_comm_hook(None, counted)
        trainer.fit()
        return {"steps": round(trainer.log.updates[-1]["update/num_steps"]), "sums": sum(seen)}


def test_gradients_are_summed_over_processes_once_an_optimizer_step(folder):
    changes = settings(folder, "critic warm-up, full", num_processes=2) | {"value__warmup_steps": 0}
    changes |= {"train__max_steps": 1, "train__rollout_batch_size": 16, "train__micro_batch_size": 1}
    changes |= {"output_dir": str(folder / "sums"), "ppo__num_ppo_epochs": 1, "ppo__num_mini_batches": 2}
    assert together(sums_of_gradients, folder, changes, folder=folder) == [{"steps": 2, "sums": 2}] * 2
