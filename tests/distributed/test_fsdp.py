"""Two processes under FSDP2: no process has a whole model, and all else is as in one process that has everything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed.harness import alone, started, together
from tests.distributed.runs import Trained, assert_same_run, distance, metric_errors, trained
from tests.models.build import save_adapter
from tests.tiny import save_tiny
from tests.train.runs import tiny_run, write_prompts
from tether.generation.build import build_generator
from tether.models.roles import POLICY, VALUE
from tether.train.display import NullDisplay
from tether.train.run import open_trainer, write_end
from tether.train.sharing import shared_generator
from tether.train.update import Update
from tether.types import Request, Sampling

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
"""What ``accelerate launch`` says."""
PROMPTS = ("cat", "i like the red dog and you", "the sun", "you run", "is it good", "a very nice day", "rain")
IDS = [[5, 7, 8, 9, 30, 12]]
COMMON = {
    "train__max_steps": 3, "train__save_steps": 1, "value__save": True, "ppo__kl_coef": 0.2, "train__ema_decay": 0.5,
}  # fmt: skip
CASES = {
    "full": {"value__kind": "model", "ppo__num_mini_batches": 2, "model__freeze_layers": 1},
    "four roles on one base": {
        "model__lora": {"r": 3}, "value__kind": "adapter", "ppo__score_norm": "frozen", "ppo__score_norm_samples": 9,
        "rewards": [{"type": "adapter", "path": "reward", "batch_size": 3}], "train__dry_step": True,
        "train__rollout_batch_size": 7, "train__micro_batch_size": 7,
    },
}  # fmt: skip
MORE = {
    "critic head, recomputed layers, untied, demonstrations": {
        "value__kind": "head", "train__gradient_checkpointing": True, "ppo__num_mini_batches": 2,
        "ppo__kl_in": "loss", "ppo__ptx_coef": 0.5, "data__ptx": "ptx.jsonl", "tied": False,
    },
    "adapter and a critic model, layers that stay gathered, decoded in step": {
        "model__lora": {"r": 3}, "value__kind": "model", "train__ds3_gather_for_generation": False,
        "FSDP_RESHARD_AFTER_FORWARD": "false",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, a reward adapter, prompts and demonstrations."""
    folder = tmp_path_factory.mktemp("fsdp")
    for tied in (True, False):
        save_tiny(folder / f"llama-{'tied' if tied else 'untied'}", tied=tied)
    tiny_run(folder)  # writes what its runs read
    save_adapter(folder / "reward", folder / "llama-tied", reward=True)
    write_prompts(folder / "long.jsonl", PROMPTS)
    rows = [{"prompt": text, "completion": "it is a very good day"[: 4 + 3 * i]} for i, text in enumerate(PROMPTS)]
    (folder / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def settings(folder: Path, case: Mapping[str, Any], name: str, num_processes: int) -> dict[str, Any]:
    """Changes for ``tiny_run``: what all processes forward at once is the same however many there are."""
    changes = {name: value for name, value in case.items() if name not in FSDP and not name.startswith("FSDP")}
    changes |= {"data__prompts": str(folder / "long.jsonl"), "data__eval_prompts": str(folder / "long.jsonl")}
    changes["output_dir"] = str(folder / name.replace(",", "").replace(" ", "-"))
    if "rewards" in changes:
        changes["rewards"] = [{**each, "path": str(folder / each["path"])} for each in changes["rewards"]]
    if "data__ptx" in changes:
        changes["data__ptx"] = str(folder / changes["data__ptx"])
    at_once = changes.pop("train__micro_batch_size", 4)
    return changes | {"train__micro_batch_size": at_once if at_once % 2 else at_once // num_processes}


class Told(NullDisplay):
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass(frozen=True)
class Lived:
    """What a process knows of a run at its end."""

    run: Trained
    whole: list[str]
    """Parameters of which this process has more than its part, of all models."""
    logits: Tensor
    """What the policy says that is saved, of ``IDS``."""
    values: Tensor
    """What the critic says of their last token."""
    messages: list[str]


def lived(folder: Path, changes: Mapping[str, Any]) -> Lived:
    """A run with everything that it leaves behind."""
    display = Told()
    with open_trainer(tiny_run(folder, **changes), display=display) as trainer:
        full, roles, average = trainer.engine.full, trainer.roles, trainer.average
        start = {name: x.clone() for name, x in full(roles.trained).items()}
        trainer.fit()
        write_end(trainer, finished=True)
        ids = torch.tensor(IDS)
        with torch.no_grad():
            with trainer.policy_to_keep(), roles.use(POLICY) as policy:
                logits = roles.through(POLICY)(lambda: policy(input_ids=ids).logits)
            with roles.use(VALUE) as critic:
                head = roles.role(VALUE).head
                values = roles.through(VALUE)(lambda: head(critic.base_model(input_ids=ids).last_hidden_state)[:, -1])
        everything = {f"{role.name} {n}": p for role in roles.all for n, p in role.model.named_parameters()}
        everything |= {f"{role.name} head": role.head.weight for role in roles.all if role.head is not None}
        run = Trained(
            engine=trainer.engine.name,
            num_processes=trainer.dist.num_processes,
            start=start,
            weights={name: x.clone() for name, x in full(roles.trained).items()},
            average={name: x.clone() for name, x in full(average.parameters, average.state_dict()).items()},
            updates=trainer.log.updates,
            evaluations=trainer.log.evaluations,
        )
        return Lived(run, [n for n, p in everything.items() if not is_spread(p)], logits, values, display.messages)


def is_spread(parameter: Tensor) -> bool:
    """Whether this process has no more than its part of it, the larger half at most."""
    if not isinstance(parameter, DTensor):
        return False
    return parameter.to_local().numel() <= -(-len(parameter) // 2) * parameter[0].numel()


def lives(folder: Path, *runs: Mapping[str, Any]) -> list[Lived]:
    """Several runs after each other."""
    return [lived(folder, changes) for changes in runs]


@pytest.mark.parametrize("case", CASES)
def test_a_run_its_folders_and_how_it_goes_on(folder, case):
    from tests.train.test_strict_loads import adapted, strictly  # which the processes need not import

    def of(name, num_processes, **more):
        return settings(folder, COMMON | CASES[case], f"{case} {name}", num_processes) | more

    (one,) = alone(lives, folder, of("one", 1), folder=folder)
    checkpoints = {name: str(Path(of(name, 1)["output_dir"]) / "checkpoint-1") for name in ("one", "two")}
    (two, again, moved), (other, *_) = together(
        lives,
        folder,
        of("two", 2),
        of("again", 2, resume=checkpoints["two"]),
        of("from one", 2, resume=checkpoints["one"]),
        folder=folder,
        environment=FSDP,
    )
    (back,) = alone(lives, folder, of("from two", 1, resume=checkpoints["two"]), folder=folder)

    assert two.run.engine == other.run.engine == "FSDP2" and two.whole == other.whole == [] and one.whole != []
    assert metric_errors(two.run.updates, other.run.updates, most=0) == []
    assert_same_run(two.run, one.run)

    # one writer, plain folders
    out, base = Path(of("two", 2)["output_dir"]), folder / "llama-tied"
    is_adapter = "model__lora" in CASES[case]
    for path in (out, out / "checkpoint-3"):
        model = (adapted if is_adapter else strictly)(path, AutoModelForCausalLM, base)
        torch.testing.assert_close(model(input_ids=torch.tensor(IDS)).logits, two.logits, atol=1e-6, rtol=0)
    model = (adapted if is_adapter else strictly)(out / "critic", AutoModelForSequenceClassification, base)
    torch.testing.assert_close(model(input_ids=torch.tensor(IDS)).logits, two.values, atol=1e-6, rtol=0)

    # the same processes go on exactly, others within rounding, and say so
    assert distance(again.run.weights, two.run.weights) == distance(again.run.average, two.run.average) == 0
    assert metric_errors(again.run.updates, two.run.updates[1:], most=0) == []
    assert not any("bitwise" in text for text in again.messages)
    for gone_on, engines in ((moved, "one process and goes on with 2 processes under FSDP2"),
                             (back, "2 processes under FSDP2 and goes on with one process")):  # fmt: skip
        assert any(f"written by {engines}" in text and "bitwise" in text for text in gone_on.messages)
        assert metric_errors(gone_on.run.updates, one.run.updates[1:]) == []
        assert distance(gone_on.run.weights, one.run.weights) <= 1e-6
        assert distance(gone_on.run.average, one.run.average) <= 1e-6


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


def launched() -> dict[str, str]:
    """What ``accelerate launch`` tells its processes with the launch file that is shipped."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = Path(__file__).parents[2] / "examples" / "accelerate" / "fsdp2.yaml"
    options = ["--config_file", str(file), "--num_processes", "2", "-m", "tether"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(options))
    variables = prepare_multi_gpu_env(arguments)
    return {name: variables[name] for name in variables if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))}


def test_answers_are_those_of_one_process_and_gathers_do_not_grow_with_them(folder):
    changes = {"sampling__batch_size": 2, "value__kind": "head"}
    lengths = (4, 24)
    (answers, counts), (others, other_counts) = together(
        decoded, folder, settings(folder, changes, "two", 2), lengths, folder=folder, environment=launched()
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


def test_adapters_in_float32_on_a_base_in_bfloat16(folder):
    case = CASES["four roles on one base"] | {"train__bf16": True, "train__max_steps": 1}
    updates, others = together(in_bf16, folder, settings(folder, case, "bf16", 2), folder=folder, environment=FSDP)
    assert metric_errors(updates, others, most=0) == []
    assert updates[0]["val/first_ratio_error"] == 0 and updates[0]["policy/grad_norm"] > 0


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
    assert "OutOfStep: out of memory in a forward, which all processes do together (no more)" in second.error
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
