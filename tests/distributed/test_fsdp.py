"""Two processes under FSDP2: no process has a whole model, and all else is as in one process that has everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.environment import launched
from tests.distributed.harness import alone, started, together
from tests.distributed.runs import (
    Trained,
    assert_both_left_out,
    assert_same_run,
    metric_errors,
    overflowing,
    trained,
)
from tests.distributed.spread import (
    CASES,
    COMMON,
    assert_goes_on,
    assert_lost_is_told,
    assert_saved,
    lives,
    settings,
    write_material,
)
from tests.train.runs import tiny_run
from tether.generation.build import build_generator
from tether.machine.distributed import Dist
from tether.models.roles import VALUE
from tether.train.engines.fsdp import FullySharded
from tether.train.run import open_trainer
from tether.train.sharing import shared_generator
from tether.train.trainer import PPOTrainer
from tether.train.update import Update
from tether.types import Request, Sampling

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
"""What ``accelerate launch`` says."""
MORE = {
    "critic head, recomputed layers, untied, demonstrations": {
        "value__kind": "head", "train__gradient_checkpointing": True, "ppo__num_mini_batches": 2,
        "ppo__kl_in": "loss", "ppo__ptx_coef": 0.5, "data__ptx": "ptx.jsonl", "tied": False,
    },
    "a critic copied from the judge, put on the scale of scores": {
        "rewards": [{"type": "model", "path": "judge", "weight": -2.0}], "ppo__score_norm": "running",
    },
    "adapter and a critic model, layers that stay gathered, decoded in step": {
        "model__lora": {"r": 3}, "value__kind": "model", "train__ds3_gather_for_generation": False,
        "FSDP_RESHARD_AFTER_FORWARD": "false",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("fsdp"))


def whole(trainer: PPOTrainer) -> list[str]:
    """Parameters of which this process has more than its part, of all models."""
    roles = trainer.roles.all
    everything = {f"{role.name} {n}": p for role in roles for n, p in role.model.named_parameters()}
    everything |= {f"{role.name} head": role.head.weight for role in roles if role.head is not None}
    return [name for name, parameter in everything.items() if not is_spread(parameter)]


def is_spread(parameter: Tensor) -> bool:
    """Whether this process has no more than its part of it, the larger half at most."""
    if not isinstance(parameter, DTensor):
        return False
    return parameter.to_local().numel() <= -(-len(parameter) // 2) * parameter[0].numel()


@pytest.mark.parametrize("case", CASES)
def test_a_run_its_folders_and_how_it_goes_on(folder, case):
    def of(name, num_processes, **more):
        return settings(folder, COMMON | CASES[case], f"{case} {name}", num_processes) | more

    (one,) = alone(lives, folder, whole, of("one", 1), folder=folder)
    checkpoints = {name: str(Path(of(name, 1)["output_dir"]) / "checkpoint-1") for name in ("one", "two")}
    (two, again, moved), (other, *_) = together(
        lives,
        folder,
        whole,
        of("two", 2),
        of("again", 2, resume=checkpoints["two"]),
        of("from one", 2, resume=checkpoints["one"]),
        folder=folder,
        environment=FSDP,
    )
    (back,) = alone(lives, folder, whole, of("from two", 1, resume=checkpoints["two"]), folder=folder)

    assert two.run.engine == other.run.engine == "FSDP2" and two.kept == other.kept == [] and one.kept != []
    assert metric_errors(two.run.updates, other.run.updates, most=0) == []
    is_adapter = "model__lora" in CASES[case]
    assert_saved(two, Path(of("two", 2)["output_dir"]), folder / "llama-tied", is_adapter=is_adapter)
    moves = {
        "one process and is resumed with 2 processes under FSDP2": moved,
        "2 processes under FSDP2 and is resumed with one process": back,
    }
    assert_goes_on(one, two, again, moves)


@pytest.mark.parametrize("case", MORE)
def test_two_processes_train_as_one_does(folder, case):
    options = {name: value for name, value in MORE[case].items() if name.startswith("FSDP")}
    runs = [settings(folder, {"ppo__kl_coef": 0.2} | MORE[case], f"{case} {n}", n) for n in (1, 2)]
    first, _ = together(trained, folder, runs[1], folder=folder, environment=FSDP | options)
    one = alone(trained, folder, runs[0], folder=folder)
    assert (first.engine, first.num_processes) == ("FSDP2", 2)
    assert_same_run(first, one)


def with_bad_losses(folder: Path, changes: Mapping[str, Any]) -> Trained:
    """A run in whose first update the second mini-batch has losses that are not finite."""
    losses = Update.losses

    def bad(self: Update, *arguments: Any, is_first: bool) -> dict[str, Tensor]:
        found = losses(self, *arguments, is_first=is_first)
        return found if self.step > 0 or is_first else {name: x * math.nan for name, x in found.items()}

    Update.losses = bad
    return trained(folder, changes)


def test_mini_batches_that_are_left_out_before_their_backward(folder):
    case = {"value__kind": "head", "ppo__num_mini_batches": 2, "ppo__num_ppo_epochs": 1, "train__learning_rate": 5e-4}
    first, _ = together(with_bad_losses, folder, settings(folder, case, "bad", 2), folder=folder, environment=FSDP)
    one = alone(with_bad_losses, folder, settings(folder, case, "bad alone", 1), folder=folder)
    assert [row["update/num_bad"] for row in first.updates] == [1, 0]
    assert_same_run(first, one)


def decoded(folder: Path, changes: Mapping[str, Any], lengths: tuple[int, ...]) -> tuple[list, list]:
    """Answers of these lengths at most, with weights gathered once and with each layer gathered for each token; and how
    often weights were gathered for them."""
    counted, gather = [0], torch.distributed.all_gather_single

    def counting(*arguments: Any, **options: Any) -> Any:
        counted[0] += 1
        return gather(*arguments, **options)

    torch.distributed.all_gather_single = counting
    answers, counts = [], []
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        parts, requests = trainer.parts, [Request(p.token_ids, key) for key, p in enumerate(trainer.parts.prompts)]
        for once in (True, False):
            own = build_generator(trainer.config, parts.roles)
            generator = shared_generator(own, parts.dist, parts.engine, gather=once)
            for length in lengths:
                counted[0] = 0
                found = dict(generator.generate(requests, Sampling(length, 1.0, parts.sampling.stop_token_ids)))
                counts.append(counted[0])
                answers.append([found[i].token_ids for i in range(len(requests))])
    return answers, counts


def test_answers_are_those_of_one_process_and_gathers_do_not_grow_with_them(folder):
    changes = {"sampling__batch_size": 2, "value__kind": "head"}
    lengths = (4, 24)
    shipped = launched("fsdp2")
    (answers, counts), (others, other_counts) = together(
        decoded, folder, settings(folder, changes, "two", 2), lengths, folder=folder, environment=shipped
    )
    wanted, none = alone(decoded, folder, settings(folder, changes, "one", 1), lengths, folder=folder)
    assert none == [0, 0, 0, 0]
    assert answers == others == wanted
    ended = [len(answer) for answer in wanted[1]]
    assert len(set(ended)) > 3, "the processes are to finish at different times"
    assert counts == other_counts
    short, long, short_in_step, long_in_step = counts
    units = 2 + 1 + 1  # layers, the head, the rest
    assert short == long == units
    layers_a_token = 2 + 1
    forwards = [count / layers_a_token for count in (short_in_step, long_in_step)]
    assert forwards[0] >= lengths[0] and forwards[1] >= max(ended) and forwards[1] > 2 * forwards[0]


def in_bf16(folder: Path, changes: Mapping[str, Any]) -> list[Mapping[str, float]]:
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        trainer.fit()
        return trainer.log.updates


@pytest.mark.parametrize("case", CASES)
def test_weights_in_float32_beside_weights_in_bfloat16(folder, case):
    changes = settings(folder, CASES[case] | {"train__bf16": True, "train__max_steps": 1}, f"bf16 {case}", 2)
    updates, others = together(in_bf16, folder, changes, folder=folder, environment=FSDP)
    assert metric_errors(updates, others, most=0) == []
    assert updates[0]["val/first_ratio_error"] == updates[0]["objective/kl"] == 0
    assert updates[0]["policy/grad_norm"] > 0


@pytest.mark.parametrize("lora", [None, {"r": 3}], ids=["full", "LoRA"])
def test_an_overflow_in_one_process_is_left_out_in_all(folder, lora):
    case = {"value__kind": "model", "ppo__num_mini_batches": 2, "ppo__num_ppo_epochs": 1, "model__lora": lora}
    changes = settings(folder, case, f"fp16 {lora is None}", 2)
    assert_both_left_out(together(overflowing, folder, changes, folder=folder, environment=FSDP))


def out_of_memory(folder: Path, changes: Mapping[str, Any]) -> None:
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        if not trainer.dist.is_main:

            def full(*call: Any) -> None:
                raise torch.OutOfMemoryError("no more")

            trainer.roles.role(VALUE).model.base_model.layers[1].register_forward_pre_hook(full)
        trainer.fit()


def test_a_process_out_of_memory_in_a_forward_of_all_ends_all(folder):
    changes = settings(folder, {"value__kind": "model"}, "memory", 2)
    first, second = started(out_of_memory, folder, changes, folder=folder, environment=FSDP, grace=20)
    assert not first.is_hung and not second.is_hung
    assert "OutOfStep: out of memory in a forward pass, in which all processes take part (no more)" in second.error
    assert "LostProcess" in first.error


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: got 1, wanted 2"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set train.gradient_checkpointing"),
        ({"FSDP_IGNORED_MODULES": "lm_head"}, "fsdp_ignored_modules"),
    ],
)
def test_what_a_launch_may_not_ask_for_is_told_before_a_model_is_loaded(folder, asked, said):
    changes = settings(folder, {}, "refused", 2)
    outcomes = started(trained, folder, changes, folder=folder, environment=FSDP | asked, grace=10)
    assert all("ConfigError: " in each.error and said in each.error for each in outcomes), outcomes[0].told()
    assert not any("Loading" in each.output for each in outcomes)


def test_a_process_that_is_gone_is_told_where_a_checkpoint_is_put_together(folder):
    changes = settings(folder, {"value__kind": "head", "train__max_steps": 1}, "gone", 2)
    assert_lost_is_told(folder, changes, FSDP)


@pytest.mark.parametrize("asked", ["true", "false"])
def test_what_a_launch_asks_for_in_vain_is_told(monkeypatch, caplog, asked):
    dist = Dist()
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", asked)
    FullySharded(dist)
    told = [record.message for record in caplog.records if "fsdp_cpu_ram_efficient_loading" in record.message]
    assert len(told) == (asked == "true")
