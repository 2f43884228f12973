"""TRL's trainer in two processes: the run of one process with batches as large."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.compat.trl_runs import arguments, classifier, policy, rows, trainer
from tests.distributed.environment import launched
from tests.distributed.harness import alone, together
from tests.distributed.runs import distance, metric_errors
from tests.distributed.test_judges import part
from tests.tiny import tiny_tokenizer
from tether.compat.trl.optimizers import check_optimizers
from tether.errors import ConfigError
from tether.metrics.writers import read_jsonl
from tether.train.engines.base import Engine
from tether.train.engines.deepspeed import Zero
from tether.train.engines.fsdp import FullySharded
from tether.train.engines.replicated import Replicated

ENGINES = {
    "DDP": {},
    "FSDP2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "ZeRO-3": None,
}
"""What a launcher says; None: what ``accelerate launch`` says with the file that is shipped."""


def run(
    folder: Path, out: str, each: int, brings_optimizer: bool
) -> tuple[tuple[str, float], tuple[int, ...], list[dict[str, Any]], list[str]]:
    """What a script does: train, save, show answers, evaluate. Returns the engine with what is kept of the reward
    model, batch sizes, the log and the shown answers."""
    models = folder / f"{out}-models-{os.environ.get('RANK', '0')}"  # the same ones, but each process writes its own
    policy(models), classifier(models)  # while transformers knows of no other process, which would write
    args = arguments(folder / out, per_device_train_batch_size=each, num_ppo_epochs=1, save_steps=1)
    held_out = rows(tiny_tokenizer())[:3]
    given: dict[str, Any] = {"model": policy(models), "value_model": classifier(models)}
    if brings_optimizer:
        parameters = [*given["model"].parameters(), *given["value_model"].parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        given["optimizers"] = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    trained = trainer(models, args=args, eval_dataset=held_out, **given)
    trained.train()
    trained.save_model()
    shown = [row["model response"] for row in trained.generate_completions()]
    sizes = (args.world_size, args.local_batch_size, args.batch_size, args.mini_batch_size)
    engine = trained._engine.name
    assert (trained.is_deepspeed_enabled, trained.is_fsdp_enabled) == (engine == "ZeRO-3", engine == "FSDP2")
    trained.save_metrics("test", trained.evaluate(held_out, metric_key_prefix="test"))
    trained.save_state()
    return (engine, part(trained.reward_model.base_model.embed_tokens.weight)), sizes, trained.state.log_history, shown


def weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_in_two_processes(tmp_path, engine):
    if engine == "ZeRO-3" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install --no-build-isolation -e .[deepspeed]")
    own = engine != "DDP"
    kind, sizes, _, shown = alone(run, tmp_path, "one", 4, own, folder=tmp_path, timeout=400)
    said = launched("zero3") if ENGINES[engine] is None else ENGINES[engine]
    first, second = together(run, tmp_path, "two", 2, own, folder=tmp_path, environment=said, timeout=400)
    assert (kind, sizes) == (("one process", 1.0), (1, 8, 8, 8))
    for process in (first, second):
        assert process[0][0] == engine and (0.4 < process[0][1] < 0.6 if own else process[0][1] == 1.0)
        assert process[1] == (2, 4, 8, 8) and process[3] == shown
    one, two = (tmp_path / name / "out" for name in ("one", "two"))
    assert metric_errors(read_jsonl(two / "metrics.jsonl"), read_jsonl(one / "metrics.jsonl")) == []
    scores = [json.loads((folder / "test_results.json").read_text())["test_scores"] for folder in (one, two)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4) and (two / "trainer_state.json").is_file()
    start = policy(tmp_path).state_dict()
    for name in (".", "checkpoint-2"):
        got, wanted = weights(two / name), weights(one / name)
        assert distance(got, wanted) <= 1e-6 < distance(got, {key: start[key] for key in got}) / 100
        _, info = AutoModelForCausalLM.from_pretrained(two / name, output_loading_info=True)
        assert not any(info.values()), info


@pytest.mark.parametrize(
    ("engine", "make", "said"),
    [
        (FullySharded, torch.optim.Adagrad, "got Adagrad with moments of whole weights, wanted one that has none yet"),
        (Zero, torch.optim.Adagrad, "got Adagrad with moments of whole weights"),
        (Zero, torch.optim.Adafactor, r"got Adafactor, wanted one of torch's Adam, .* which gives it weights in flat"),
        (FullySharded, torch.optim.Adafactor, None),
        (Replicated, torch.optim.Adagrad, None),
        (Zero, torch.optim.AdamW, None),
    ],
)
def test_an_optimizer_that_an_engine_cannot_step_is_told(engine: type[Engine], make: Any, said: str | None):
    class Named(engine):
        name = "an engine"
        spreads_weights = engine is not Replicated

        def __init__(self) -> None:
            """Without processes."""

    optimizer = make([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    if said is None:
        check_optimizers((optimizer, None), Named())
    else:
        with pytest.raises(ConfigError, match=f"^optimizers: {said}"):
            check_optimizers((optimizer, None), Named())
