"""The pages of docs/ say what is true."""

import json
import re
from pathlib import Path

import pytest

from tests.generation import stand_in_vllm
from tests.train.runs import tiny_run
from tether.report.limits import GRADIENT_SPIKE, KL_LENGTH, LIMITS, LOGPROB_GAP, LOW_EOS_RATE, MOST_SHARE, STRETCH
from tether.train.run import train_policy

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
CHANGES = {
    "defaults": {},
    "everything": {
        "value__kind": "model", "value__warmup_steps": 1, "ppo__kl_in": "loss", "ppo__kl_target": 1.0,
        "ppo__entropy_coef": 0.01, "ppo__dual_clip": 3.0, "ppo__ptx_coef": 0.1, "ppo__max_approx_kl": 0.1,
        "ppo__score_norm": "frozen", "ppo__score_norm_samples": 8, "ppo__overlong_buffer": 3,
        "train__ema_decay": 0.9,
    },
    "cut answers left out": {"ppo__mask_truncated": True, "ppo__ptx_coef": 0.1},
    "fp16": {"train__fp16": True},
    "shared trunk, no reference": {"value__kind": "head", "ppo__kl_coef": 0.0},
    "no critic": {"ppo__advantage_estimator": "rloo", "sampling__num_generations": 2},
    "answers by vLLM": {"sampling__vllm": {}},
}  # fmt: skip


def defined():
    """Names of metrics that the page defines: in the first column of its tables, and in the section on evaluation."""
    page = PAGE.read_text(encoding="utf-8")
    tables, evaluation = page.split("## Patterns")[0].split("## Evaluation")
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("|")]
    return {name for text in (*cells, evaluation) for name in re.findall(r"`([a-z_]+(?:/[A-Za-z_0-9]+)?)`", text)}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Names of metrics that each of the runs logs."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "ptx.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": "sees you"}), encoding="utf-8")
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        stand_in_vllm.install(patch)
        for case, changes in CHANGES.items():
            data = {"data__eval_prompts": str(folder / "prompts.jsonl")}
            if "ppo__ptx_coef" in changes:
                data["data__ptx"] = str(folder / "ptx.jsonl")
            result = train_policy(tiny_run(folder, output_dir=str(folder / case), **data, **changes))
            rows = (*result.updates, *result.evaluations)
            names[case] = {name.replace("/letters", "/NAME") for row in rows for name in row}
    return names


@pytest.mark.parametrize("case", CHANGES)
def test_every_metric_of_a_run_is_defined_in_the_docs(logged, case):
    assert logged[case] - defined() == set()


def healthy(metric):
    """What the page says of a metric's healthy range."""
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    (cell,) = [row[2] for row in rows if len(row) == 3 and f"`{metric}`" in row[0]]
    return cell


def test_the_ranges_of_the_docs_are_those_of_the_report():
    for metric, limits in LIMITS.items():
        assert limits.text() in healthy(metric), metric
    for name, limits in LOGPROB_GAP.items():
        assert f"{name} {limits.text()}" in healthy("rollout/logprob_gap")
    assert f"up to {KL_LENGTH} tokens" in healthy("objective/kl")
    assert f"below {MOST_SHARE}" in healthy("rollout/top_token_share")
    assert f"below {MOST_SHARE}" in healthy("rollout/top_answer_share")
    assert f"below {LOW_EOS_RATE}" in healthy("rollout/eos_rate")
    assert f"above {GRADIENT_SPIKE:g} times its median" in healthy("policy/grad_norm")
    assert STRETCH == 5 and "worst five updates in a row" in PAGE.read_text(encoding="utf-8")


def test_every_metric_in_the_docs_is_logged_by_a_run(logged):
    assert defined() - set().union(*logged.values()) == set()


def test_metrics_are_absent_where_the_docs_say_so(logged):
    assert {"objective/kl", "objective/kl_k3", "eval_kl"} <= logged["defaults"] - logged["shared trunk, no reference"]
    assert {"loss/kl_avg", "loss/ptx_avg", "policy/dual_clipfrac"} <= logged["everything"] - logged["defaults"]
    of_the_critic = {name for name in logged["defaults"] if "value" in name or name.startswith("val/clip")}
    assert of_the_critic | {"val/explained_variance"} == logged["defaults"] - logged["no critic"]
    assert {"value/lr", "value/grad_norm"} == logged["defaults"] - logged["shared trunk, no reference"] - {
        "objective/kl", "objective/kl_k3", "eval_kl",
        "time/reference_s", "memory/reference", "time/values_s", "memory/values",
    }  # fmt: skip
