"""Two processes under DeepSpeed ZeRO: states, gradients and weights are spread, and all else is as in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import harness
from tests.distributed.environment import launched
from tests.distributed.runs import Trained, assert_same_run, fitted, metric_errors, trained
from tests.distributed.spread import (
    CASES,
    COMMON,
    Told,
    assert_goes_on,
    assert_lost_is_told,
    assert_saved,
    lives,
    settings,
    write_material,
)
from tests.train.runs import tiny_run
from tether.generation.build import build_generator
from tether.train.engines.deepspeed import Zero
from tether.train.run import open_trainer
from tether.train.sharing import shared_generator
from tether.train.trainer import PPOTrainer
from tether.types import Request, Sampling

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install --no-build-isolation -e .[deepspeed]")

LIVED = [("full", 2, {}), ("four roles on one base", 3, {}), ("full", 3, {"sub_group_size": 500})]
"""Runs that are followed to their end, stages, and what more DeepSpeed is told; by its own size of sub-groups models of
more than 1e9 numbers a process have several."""
TOO_FAR = {"ppo__num_mini_batches": 2, "ppo__num_ppo_epochs": 2, "ppo__max_approx_kl": 1e-4, "train__max_steps": 3}
MORE = {
    "1: critic head that warms up, several mini-batches": {
        "value__kind": "head", "value__warmup_steps": 1, "ppo__num_mini_batches": 2, "train__weight_decay": 0.1,
    },
    "2: four roles on one base, critic that warms up, demonstrations": {
        "model__lora": {"r": 3}, "value__kind": "adapter", "value__warmup_steps": 1, "train__weight_decay": 0.1,
        "ppo__ptx_coef": 0.5, "data__ptx": "ptx.jsonl",
    },
    "3: critic model that warms up, recomputed layers, demonstrations, decoded in step": {
        "value__kind": "model", "value__warmup_steps": 1, "train__gradient_checkpointing": True,
        "ppo__kl_in": "loss", "ppo__num_mini_batches": 2, "ppo__ptx_coef": 0.5, "data__ptx": "ptx.jsonl",
        "train__ds3_gather_for_generation": False,
    },
    "1: an early stop, moments on the CPU": TOO_FAR | {"model__lora": {"r": 3}, "value__kind": "adapter"},
    "2: an early stop, moments on the CPU": TOO_FAR | {"value__kind": "model"},
    "3: an early stop, moments on the CPU": TOO_FAR | {"model__lora": {"r": 3}, "value__kind": "adapter"},
}  # fmt: skip
ON_CPU = {"offload_optimizer": {"device": "cpu"}}


together = partial(harness.together, timeout=400)
alone = partial(harness.alone, timeout=400)


def launch(folder: Path, stage: int, **more: Any) -> dict[str, str]:
    """What ``accelerate launch`` says, at stage 1 with the file that is shipped, otherwise with a DeepSpeed file; at
    stage 3 matrices of the tiny models are not small.

    Args:
        more: of ``zero_optimization``.
    """
    if stage == 1 and not more:
        return launched("zero1")
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 100} if stage == 3 else {}) | more
    file = folder / f"stage-{stage}.json"
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}), encoding="utf-8")
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("zero"))


def kept(trainer: PPOTrainer) -> dict[str, tuple[int, int]]:
    """Numbers that this process keeps, and that there are: of the frozen models' weights, of those that train, and of
    their first moments. And in how many pieces DeepSpeed steps what trains, and of how many shares they are."""
    trained = set(trainer.roles.trained.values())
    frozen = {p for role in trainer.roles.all for p in role.model.parameters()} - trained

    def counted(parameters: set) -> tuple[int, int]:
        total = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        return sum(p.ds_tensor.numel() if hasattr(p, "ds_id") else p.numel() for p in parameters), total

    moments = {id(state): state for o in trainer.optimizers for state in o.optimizer.state.values()}
    own = sum(state["exp_avg"].numel() for state in moments.values())
    units = trainer.engine._units if isinstance(trainer.engine, Zero) else []
    pieces = sum(len(getattr(unit.engine.optimizer, "fp16_groups", unit.joint.shares)) for unit in units)
    return {
        "frozen": counted(frozen),
        "trained": counted(trained),
        "moments": (own, counted(trained)[1]),
        "pieces": (pieces, sum(len(unit.joint.shares) for unit in units)),
    }


def is_half(kept: tuple[int, int]) -> bool:
    """Whether it is a half and what fills it up."""
    own, total = kept
    return total // 2 <= own <= total // 2 + 400 < total


@pytest.mark.parametrize(("case", "stage", "more"), LIVED)
def test_a_run_its_folders_and_how_it_goes_on(folder, case, stage, more):
    def of(name, num_processes, **more):
        name = f"{case} {stage if num_processes > 1 else ''} {name}"
        return settings(folder, COMMON | CASES[case], name, num_processes) | more

    (one,) = alone(lives, folder, kept, of("one", 1) | {"overwrite_output_dir": True}, folder=folder)
    checkpoints = {n: str(Path(of(name, n)["output_dir"]) / "checkpoint-1") for name, n in (("one", 1), ("two", 2))}
    (two, again, moved), (other, *_) = together(
        lives,
        folder,
        kept,
        of("two", 2),
        of("again", 2, resume=checkpoints[2]),
        of("from one", 2, resume=checkpoints[1]),
        folder=folder,
        environment=launch(folder, stage, **more),
    )
    gone_back = of("from two", 1, resume=checkpoints[2], overwrite_output_dir=True)
    (back,) = alone(lives, folder, kept, gone_back, folder=folder)

    assert two.run.engine == other.run.engine == f"ZeRO-{stage}" and two.run.num_processes == 2
    for each in (two, other):
        pieces, shares = each.kept["pieces"]
        assert pieces > 2 * shares if more else pieces == shares
        assert is_half(each.kept["moments"])
        assert is_half(each.kept["trained"]) == is_half(each.kept["frozen"]) == (stage == 3)
    assert metric_errors(two.run.updates, other.run.updates, most=0) == []
    is_adapter = "model__lora" in CASES[case]
    assert_saved(two, Path(of("two", 2)["output_dir"]), folder / "llama-tied", is_adapter=is_adapter)
    moves = {
        f"one process and is resumed with 2 processes under ZeRO-{stage}": moved,
        f"2 processes under ZeRO-{stage} and is resumed with one process": back,
    }
    assert_goes_on(one, two, again, moves)


@pytest.mark.parametrize("case", MORE)
def test_two_processes_train_as_one_does(folder, case):
    runs = [settings(folder, {"ppo__kl_coef": 0.2} | MORE[case], f"{case.replace(':', '')} {n}", n) for n in (1, 2)]
    environment = launch(folder, int(case[0]), **(ON_CPU if "on the CPU" in case else {}))
    first, second = together(trained, folder, runs[1], folder=folder, environment=environment)
    one = alone(trained, folder, runs[0], folder=folder)
    if "early stop" in case:
        assert 0 < one.updates[0]["update/num_steps"] < 4
    assert (first.engine, first.num_processes) == (f"ZeRO-{case[0]}", 2)
    assert metric_errors(first.updates, second.updates, most=0) == []
    assert_same_run(first, one)


def decoded(folder: Path, changes: Mapping[str, Any], lengths: tuple[int, ...]) -> tuple[list, list]:
    """Answers of these lengths at most, with weights gathered once and anew for each token; and how often weights were
    gathered for them."""
    counted, gather = [0], torch.distributed.all_gather_into_tensor

    def counting(*arguments: Any, **options: Any) -> Any:
        counted[0] += 1
        return gather(*arguments, **options)

    torch.distributed.all_gather_into_tensor = counting  # DeepSpeed looks it up as its group is made
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
        trainer.fit()  # hooks are back, and find everything as it was
    return answers, counts


def test_answers_are_those_of_one_process_and_gathers_do_not_grow_with_them(folder):
    changes, lengths = {"sampling__batch_size": 2, "value__kind": "head", "train__max_steps": 1}, (4, 24)
    (answers, counts), (others, other_counts) = together(
        decoded,
        folder,
        settings(folder, changes, "decoded by two", 2),
        lengths,
        folder=folder,
        environment=launch(folder, 3, stage3_prefetch_bucket_size=0),  # each module is gathered when it is needed
    )
    wanted, none = alone(decoded, folder, settings(folder, changes, "decoded by one", 1), lengths, folder=folder)
    assert none == [0, 0, 0, 0]
    assert answers == others == wanted
    assert len({len(answer) for answer in wanted[1]}) > 3, "the processes are to finish at different times"
    assert counts == other_counts
    short, long, short_in_step, long_in_step = counts
    assert 0 < short == long < 40
    assert short_in_step > 4 * short and long_in_step > 2 * short_in_step


def in_bf16(folder: Path, changes: Mapping[str, Any]) -> list[Mapping[str, float]]:
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        trainer.fit()
        return trainer.log.updates


@pytest.mark.parametrize("case", CASES)
def test_weights_in_float32_beside_weights_in_bfloat16(folder, case):
    changes = settings(folder, CASES[case] | {"train__bf16": True, "train__max_steps": 1}, f"bf16 {case}", 2)
    without_prefetch = launch(folder, 3, stage3_prefetch_bucket_size=0)  # DeepSpeed then checks the order of modules
    updates, others = together(in_bf16, folder, changes, folder=folder, environment=without_prefetch)
    assert metric_errors(updates, others, most=0) == []
    assert updates[0]["val/first_ratio_error"] == updates[0]["objective/kl"] == 0
    assert updates[0]["policy/grad_norm"] > 0


def left_out(folder: Path, changes: Mapping[str, Any]) -> tuple[Trained, list[str]]:
    """A run of which the last process's second backward brings a gradient that is not finite."""
    display = Told()
    with open_trainer(tiny_run(folder, **changes), display=display) as trainer:
        engine, number, backward = trainer.engine, [0], trainer.engine.backward
        is_last = trainer.dist.rank == trainer.dist.num_processes - 1

        def broken(loss: Tensor, role: str) -> None:
            number[0] += 1
            backward(loss * (torch.inf if number[0] == 2 and is_last else 1), role)

        engine.backward = broken
        return fitted(trainer), display.messages


@pytest.mark.parametrize(("stage", "more"), [(2, {}), (3, {}), (2, ON_CPU), (3, ON_CPU)])
def test_a_gradient_that_is_not_finite_in_one_process_is_left_out_in_all(folder, stage, more):
    case = {"model__lora": {"r": 3}, "value__kind": "adapter", "train__max_steps": 2, "ppo__num_ppo_epochs": 1}
    name = f"left out {stage} {len(more)}"
    environment = launch(folder, stage, **more)
    outcomes = together(left_out, folder, settings(folder, case, name, 2), folder=folder, environment=environment)
    one, _ = alone(left_out, folder, settings(folder, case, f"{name} one", 1), folder=folder)
    for run, _ in outcomes:
        first, second = run.updates
        assert run.engine == f"ZeRO-{stage}"
        assert (first["update/num_steps"], first["update/num_bad"]) == (0, 1)
        assert (second["update/num_steps"], second["update/num_bad"]) == (1, 0)
        assert second["policy/grad_norm"] > 0
    assert any("gradient is not finite" in text for text in outcomes[0][1])
    assert_same_run(outcomes[0][0], one)


@pytest.mark.parametrize(
    ("written", "changes", "said"),
    [
        ({"zero_optimization": {"stage": 0}}, {}, "zero_optimization.stage in the DeepSpeed configuration: got 0"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled in the DeepSpeed configuration: got true, wanted auto"),
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled in the DeepSpeed configuration: got true, wanted auto, or"),
        ({}, {"train__fp16": True}, "train.fp16, or mixed_precision of the launch: got float16, which is refused"),
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping in the DeepSpeed configuration: got 0.5, wanted auto or"),
        ({"gradient_accumulation_steps": 4}, {}, "wanted auto: train.micro_batch_size sets it"),
        ({"optimizer": {"type": "AdamW"}}, {}, "wanted none: train.optim, train.learning_rate and related keys set it"),
        ({}, {"train__optim": "adamw_8bit"}, "train.optim: got adamw_8bit, wanted adamw_torch_fused or adamw_torch"),
    ],
)
def test_what_contradicts_a_run_is_told(folder, written, changes, said):
    from tether.errors import ConfigError
    from tether.train.engines.deepspeed import check

    with pytest.raises(ConfigError, match="^" + said.replace(".", r"\.") if not said.startswith("wanted") else said):
        check({"zero_optimization": {"stage": 3}} | written, tiny_run(folder, **changes))


def test_what_a_run_says_too_is_no_contradiction(folder):
    from tether.machine.deepspeed_config import filled
    from tether.train.engines.deepspeed import check

    written = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9},
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "train_batch_size": "auto", "fp16": {"enabled": "auto"},
    }  # fmt: skip
    check(written, tiny_run(folder, train__bf16=True))
    told = filled(written, 2, 16)
    assert told["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 256, "stage3_max_live_parameters": 1e9}
    assert told["train_batch_size"] == 2 and told["gradient_clipping"] == 0.0 and "bf16" not in told
    assert "auto" not in json.dumps(told).replace("Infinity", "0")


def room(folder: Path, changes: Mapping[str, Any]) -> float:
    """How large a checkpoint was taken to be before training, over what it is then."""
    sizes: list[int] = []
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        trainer.checkpoints._check_room = lambda size, *others: sizes.append(size)
        trainer.fit()
        files = (trainer.config.output_dir / "checkpoint-1").rglob("*")
        return sizes[0] / sum(file.stat().st_size for file in files) if trainer.dist.is_main else 1.0


@pytest.mark.parametrize("stage", [1, 3])
def test_room_for_checkpoints_is_that_of_whole_moments(folder, stage):
    case = {"value__kind": "model", "train__save_steps": 1, "train__max_steps": 1}
    changes = settings(folder, case, f"room {stage}", 2)
    share, _ = together(room, folder, changes, folder=folder, environment=launch(folder, stage))
    assert share == pytest.approx(1, abs=0.2)  # files have some hundred bytes around each of these tiny tensors


def test_a_process_that_is_gone_is_told_where_a_checkpoint_is_put_together(folder):
    changes = settings(folder, {"value__kind": "head", "train__max_steps": 1}, "gone", 2)
    assert_lost_is_told(folder, changes, launch(folder, 3))
