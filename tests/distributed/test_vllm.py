"""Two processes under DDP with a vLLM engine each, where vLLM is installed, train as one does."""

from __future__ import annotations

import pytest

from tests.distributed.harness import alone, together
from tests.distributed.runs import assert_same_run, distance, metric_errors, trained
from tests.tiny import save_tiny

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.slow

VLLM = {"enforce_eager": True, "gpu_memory_utilization": 0.02}
ENVIRONMENT = {"PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    save_tiny(folder / "llama-tied", hidden=128)  # heads of 32, as vLLM wants
    return folder


def settings(folder, name, num_processes, **changes):
    return {
        "sampling__vllm": VLLM, "train__max_steps": 2, "train__micro_batch_size": 4 // num_processes,
        "train__adam_epsilon": 1e-4, "output_dir": str(folder / f"{name}-{num_processes}"),
        "data__eval_prompts": str(folder / "prompts.jsonl"), **changes,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), [("full", {"value__kind": "model"}), ("lora", {"model__lora": {"r": 8}})])
def test_two_processes_with_an_engine_each_train_as_one_does(folder, name, changes):
    both = {"folder": folder, "timeout": 400.0}
    first, second = together(
        trained, folder, settings(folder, name, 2, **changes), environment=ENVIRONMENT, **both
    )
    one = alone(trained, folder, settings(folder, name, 1, **changes), **both)
    assert (first.engine, first.num_processes) == ("DDP", 2)
    assert distance(first.weights, second.weights) == 0
    assert metric_errors(first.updates, second.updates, most=0) == []
    assert all(row["rollout/logprob_gap"] < 1e-4 for row in (*first.updates, *one.updates))
    # the gap is rounding itself: it is no number of the algorithm that two processes must share with one
    for run in (first, one):
        for row in run.updates:
            for metric in ("rollout/logprob_gap", "rollout/importance_mean", "rollout/importance_max"):
                row.pop(metric)
    assert_same_run(first, one)
