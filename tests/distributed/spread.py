"""Runs under engines that spread weights, followed to their end and on from it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed.harness import started
from tests.distributed.runs import Trained, assert_same_run, distance, fitted, metric_errors
from tests.models.build import save_adapter
from tests.tiny import save_tiny
from tests.train.runs import tiny_run, write_prompts
from tether.models.roles import POLICY, VALUE
from tether.train.display import NullDisplay
from tether.train.run import open_trainer, write_end
from tether.train.trainer import PPOTrainer

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


def write_material(folder: Path) -> Path:
    """Models, a reward adapter, prompts and demonstrations."""
    for tied in (True, False):
        save_tiny(folder / f"llama-{'tied' if tied else 'untied'}", tied=tied)
    tiny_run(folder)  # writes what its runs read
    save_adapter(folder / "reward", folder / "llama-tied", reward=True)
    save_tiny(folder / "judge", num_labels=1)
    write_prompts(folder / "long.jsonl", PROMPTS)
    rows = [{"prompt": text, "completion": "it is a very good day"[: 4 + 3 * i]} for i, text in enumerate(PROMPTS)]
    (folder / "ptx.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def settings(folder: Path, case: Mapping[str, Any], name: str, num_processes: int) -> dict[str, Any]:
    """Changes for ``tiny_run``: what all processes forward at once is the same however many there are."""
    changes = {name: value for name, value in case.items() if not name.startswith("FSDP")}
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
    kept: Any
    """What of the models this process keeps."""
    logits: Tensor
    """What the policy says that is saved, of ``IDS``."""
    values: Tensor
    """What the critic says of their last token."""
    messages: list[str]


def lived(folder: Path, look: Callable[[PPOTrainer], Any], changes: Mapping[str, Any]) -> Lived:
    """A run with everything that it leaves behind.

    Args:
        look: what this process keeps of its models.
    """
    display = Told()
    with open_trainer(tiny_run(folder, **changes), display=display) as trainer:
        run, roles = fitted(trainer), trainer.roles
        write_end(trainer, finished=True)
        ids = torch.tensor(IDS)
        with torch.no_grad():
            with trainer.policy_to_keep(), roles.use(POLICY) as policy:
                logits = roles.through(POLICY)(lambda: policy(input_ids=ids).logits)
            with roles.use(VALUE) as critic:
                head = roles.role(VALUE).head
                values = roles.through(VALUE)(lambda: head(critic.base_model(input_ids=ids).last_hidden_state)[:, -1])
        return Lived(run, look(trainer), logits, values, display.messages)


def lives(folder: Path, look: Callable[[PPOTrainer], Any], *runs: Mapping[str, Any]) -> list[Lived]:
    """Several runs after each other."""
    return [lived(folder, look, changes) for changes in runs]


def assert_saved(two: Lived, out: Path, base: Path, *, is_adapter: bool) -> None:
    """Asserts that one process wrote plain folders of the weights that were there at the end."""
    # which the processes need not import
    from tests.train.test_strict_loads import assert_adapter_loads, assert_loads_strictly

    for path in (out, out / "checkpoint-3"):
        model = (assert_adapter_loads if is_adapter else assert_loads_strictly)(path, AutoModelForCausalLM, base)
        torch.testing.assert_close(model(input_ids=torch.tensor(IDS)).logits, two.logits, atol=1e-6, rtol=0)
    if is_adapter:  # copied from the judge, with the mean of score_norm in a bias, which classifiers of PEFT have not
        name = "base_model.model.score.bias"
        model = assert_adapter_loads(out / "critic", AutoModelForSequenceClassification, base, beside={name})
        bias = load_file(out / "critic" / "adapter_model.safetensors")[name]
    else:
        model = assert_loads_strictly(out / "critic", AutoModelForSequenceClassification, base)
        bias = torch.zeros(1)
    torch.testing.assert_close(model(input_ids=torch.tensor(IDS)).logits + bias, two.values, atol=1e-6, rtol=0)


def assert_goes_on(one: Lived, two: Lived, again: Lived, moved: Mapping[str, Lived]) -> None:
    """Asserts that as many processes go on exactly, and others within rounding, and say so.

    Args:
        again: from the first checkpoint of ``two``, in as many processes.
        moved: by what they say of it, runs from a first checkpoint in another number of processes.
    """
    assert_same_run(two.run, one.run)
    assert distance(again.run.weights, two.run.weights) == distance(again.run.average, two.run.average) == 0
    assert metric_errors(again.run.updates, two.run.updates[1:], most=0) == []
    assert not any("bitwise" in text for text in again.messages)
    for said, gone_on in moved.items():
        assert any(f"written by {said}" in text and "bitwise" in text for text in gone_on.messages)
        assert metric_errors(gone_on.run.updates, one.run.updates[1:]) == []
        assert distance(gone_on.run.weights, one.run.weights) <= 1e-6
        assert distance(gone_on.run.average, one.run.average) <= 1e-6


def gathers_of_the_last(folder: Path, changes: Mapping[str, Any]) -> None:
    """What the first process says to be wrong where it puts weights and moments together after the second was killed,
    at the end of a run."""
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        trainer.fit()
        if not trainer.dist.is_main:
            os.kill(os.getpid(), signal.SIGKILL)
        engine, optimizer = trainer.engine, trainer.optimizers[0]
        for gather in (partial(engine.full, trainer.roles.trained), partial(engine.optimizer_state, optimizer)):
            try:
                gather()
            except Exception as error:
                print("said:", type(error).__name__)
        os._exit(3)


def assert_lost_is_told(folder: Path, changes: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Asserts that a process that is gone is known as that where a checkpoint is put together."""
    first, second = started(gathers_of_the_last, folder, changes, folder=folder, environment=environment, timeout=60.0)
    assert (first.exit_code, second.exit_code) == (3, -signal.SIGKILL), first.told()
    assert re.findall("said: (.*)", first.output) == ["LostProcess", "LostProcess"], first.told()
