"""TRL's trainer in two processes: the run of one process with batches as large."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.compat.trl_runs import arguments, classifier, policy, rows, trainer
from tests.distributed.harness import alone, together
from tests.distributed.runs import distance, metric_errors
from tests.tiny import tiny_tokenizer
from tether.metrics.writers import read_jsonl

ENGINES = {
    "DDP": {},
    "ZeRO-3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}


def run(folder: Path, out: str, each: int) -> tuple[str, tuple[int, ...], list[dict[str, Any]], list[str]]:
    """What a script does: train, save, show answers. Returns the engine, batch sizes, the log and the shown answers."""
    models = folder / f"{out}-models-{os.environ.get('RANK', '0')}"  # the same ones, but each process writes its own
    policy(models), classifier(models)  # while transformers knows of no other process, which would write
    args = arguments(folder / out, per_device_train_batch_size=each, num_ppo_epochs=1, save_steps=1)
    held_out = rows(tiny_tokenizer())[:3]
    trained = trainer(models, args=args, eval_dataset=held_out)
    trained.train()
    trained.save_model()
    shown = [row["model response"] for row in trained.generate_completions()]
    sizes = (args.world_size, args.local_batch_size, args.batch_size, args.mini_batch_size)
    return trained.accelerator.distributed_type.value, sizes, trained.state.log_history, shown


def weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_in_two_processes(tmp_path, engine):
    if engine != "DDP" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install --no-build-isolation -e .[deepspeed]")
    kind, sizes, _, shown = alone(run, tmp_path, "one", 4, folder=tmp_path, timeout=400)
    first, second = together(
        run, tmp_path, "two", 2, folder=tmp_path, environment=ENGINES[engine], timeout=400
    )
    assert (kind, sizes) == ("NO", (1, 8, 8, 8))
    for process in (first, second):
        assert process[0] == {"DDP": "MULTI_CPU", "ZeRO-3": "DEEPSPEED"}[engine]
        assert process[1] == (2, 4, 8, 8) and process[3] == shown
    one, two = (tmp_path / name / "out" for name in ("one", "two"))
    assert metric_errors(read_jsonl(two / "metrics.jsonl"), read_jsonl(one / "metrics.jsonl")) == []
    start = policy(tmp_path).state_dict()
    for name in (".", "checkpoint-2"):
        got, wanted = weights(two / name), weights(one / name)
        assert distance(got, wanted) <= 1e-6 < distance(got, {key: start[key] for key in got}) / 100
        _, info = AutoModelForCausalLM.from_pretrained(two / name, output_loading_info=True)
        assert not any(info.values()), info
