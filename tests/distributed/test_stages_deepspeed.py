"""``tether sft``, ``tether reward`` and ``tether pipeline`` in two processes under DeepSpeed ZeRO: states, gradients
and weights are sharded, and all else is as in one process."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

from tests.distributed.environment import launched
from tests.distributed.harness import alone, together
from tests.distributed.test_stages import FULL, LORA, STAGES, assert_same, config_of, run, weights, written
from tests.models.build import edit_json
from tests.test_pipeline import FULL as FULL_PIPELINE
from tests.test_pipeline import run as run_pipeline
from tests.test_pipeline import write_pipeline
from tether.config.load import load_config
from tether.config.stage import StageConfig
from tether.errors import CheckpointError, ConfigError
from tether.machine.distributed import Dist
from tether.metrics.writers import read_jsonl
from tether.stages import begin, training
from tether.stages.engine import Replicated, Zero
from tether.stages.watch import check_same_engine

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install --no-build-isolation -e .[deepspeed]")

WORST = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}
"""Keeps the model with the largest loss, which in a run that learns is the first that was evaluated."""
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sft full": ("sft", {"lora": FULL, "save_total_limit": None, **WORST}),
    "sft lora": ("sft", {"lora": LORA, "gradient_checkpointing": True}),
    "reward full": ("reward", {"lora": FULL, "center_rewards_coefficient": 0.1, "save_steps": 6}),
    "reward lora": ("reward", {"lora": LORA, **WORST}),
}
RESUMED = ("sft lora", "reward full")
STOPS_AT = 4
"""A step after which there are two more."""


@dataclass(frozen=True)
class Ended:
    """What a process knows at the end of a run."""

    engine: str
    kept: Mapping[str, tuple[int, int]]
    """Numbers that this process keeps, and that there are: of all weights, and of the moments of those that train."""
    left: int
    """Bytes that are in memory after it, of tensors that were there at its end."""
    metrics: Mapping[str, float]
    interrupted: str | None
    told: Sequence[str]


@dataclass
class _Seen:
    """What was seen at the end of training."""

    engine: str = ""
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: list[weakref.ref] = field(default_factory=list)

    def look(self, trainer: Trainer) -> None:
        engine, parameters = trainer.model_wrapped, [*trainer.model.parameters()]
        total = [getattr(p, "ds_numel", p.numel()) for p in parameters]
        own = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in parameters)
        trained = sum(n for n, p in zip(total, parameters, strict=True) if p.requires_grad)
        zero = getattr(engine, "optimizer", trainer.optimizer)
        moments = sum(state["exp_avg"].numel() for state in getattr(zero, "optimizer", zero).state.values())
        self.engine = type(engine).__name__
        self.kept = {"weights": (own, sum(total)), "moments": (moments, trained)}
        alive = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.numel() > 100]
        self.tensors = [weakref.ref(x) for x in alive]


def lives(runs: Sequence[tuple], pipeline: tuple[Path, Sequence[str]] | None = None) -> tuple[list[Ended], list]:
    """Runs after each other in the same processes, and what a pipeline says then, when it is started twice.

    Args:
        runs: arguments of ``run``, or of ``spoiled``.
    """
    seen, train, ended = _Seen(), training.train, []

    def watched(*arguments: Any) -> Trainer:
        trainer = train(*arguments)
        seen.look(trainer)
        return trainer

    training.train = watched
    for work, *arguments in runs:
        result = work(*arguments)
        gc.collect()
        left = [x() for x in seen.tensors if x() is not None]
        size = sum(x.untyped_storage().nbytes() for x in left)
        ended.append(Ended(seen.engine, seen.kept, size, *result))
    said = [] if pipeline is None else [run_pipeline(pipeline[0], *pipeline[1])[1].lines for _ in range(2)]
    return ended, said


def spoiled(name: str, file: Path) -> tuple[Mapping[str, float], str | None, list[str]]:
    """A run whose best checkpoint is damaged in its last step."""
    section, train = STAGES[name]
    config, told = load_config(file, section=section), []

    def damage(step: int, num_steps: int, logs: Mapping[str, float]) -> None:
        if step == num_steps:
            (config.output_dir / "checkpoint-3" / "model.safetensors").write_bytes(b"no weights")

    result = train(config, tell=told.append, on_progress=damage)
    return result.metrics, result.interrupted, told


def launch(folder: Path, stage: int, **more: Any) -> dict[str, str]:
    """What ``accelerate launch`` says, at stage 2 with the file that is shipped, otherwise with a DeepSpeed file; at
    stage 3 matrices of the tiny models are not small.

    Args:
        more: of the DeepSpeed configuration.
    """
    if stage == 2 and not more:
        return launched("zero2")
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 100} if stage == 3 else {})
    file = folder / f"stage-{stage}.json"
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}} | more), encoding="utf-8")
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}


def case_of(folder: Path, case: str) -> StageConfig:
    """Six steps, each of four rows in forward passes of one row."""
    name, changes = CASES[case]
    usual = {"max_steps": 6, "micro_batch_size": 1, "eval_steps": 3}
    (folder / case).mkdir(exist_ok=True)
    return config_of(folder / case, name, **usual | changes)


def pipeline_of(folder: Path, stage: int, num_processes: int) -> tuple[Path, list[str]]:
    """A pipeline of its own; full models at stage 3, adapters on one base otherwise."""
    own = folder / f"pipeline {stage} {num_processes}"
    own.mkdir()
    overrides = [f"--{name}.train.micro_batch_size={2 // num_processes}" for name in ("sft", "reward", "ppo")]
    overrides += [f"--{name}.train.bf16=false" for name in ("sft", "reward", "ppo")]
    return write_pipeline(own), [*overrides, *(FULL_PIPELINE if stage == 3 else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def one(folder):
    """Every case in one process."""
    runs = [(run, CASES[case][0], written(case_of(folder, case), "one")) for case in CASES]
    ended, _ = alone(lives, runs, folder=folder)
    return dict(zip(CASES, ended, strict=True))


@pytest.fixture(scope="module", params=[2, 3], ids=["ZeRO-2", "ZeRO-3"])
def two(request, folder):
    """Every case in two processes, some of them also stopped and resumed, and a pipeline: (stage, what the first
    process knows of each run, what the second knows, what the pipeline says)."""
    stage, runs = request.param, {}
    for case in CASES:
        name, config = CASES[case][0], case_of(folder, case)
        runs[case] = (run, name, written(config, f"two {stage}"))
        if case in RESUMED:
            file = written(config, f"cut {stage}")
            runs[f"{case} stopped"] = (run, name, file, STOPS_AT)
            runs[f"{case} resumed"] = (run, name, file, None, True)
    if stage == 3:
        runs["spoiled"] = (spoiled, "sft", written(case_of(folder, "sft full"), "spoiled"))
    pipeline = pipeline_of(folder, stage, 2)
    environment = launch(folder, stage)
    (first, said), (second, _) = together(
        lives, [*runs.values()], pipeline, folder=folder, environment=environment, timeout=400
    )
    return stage, dict(zip(runs, first, strict=True)), dict(zip(runs, second, strict=True)), said


def is_half(kept: tuple[int, int]) -> bool:
    """Whether it is a half and what fills it up."""
    own, total = kept
    return total // 2 <= own <= total // 2 + 400 < total


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_what_one_makes_with_a_share_each(folder, one, two, case):
    stage, first, second, _ = two
    for ended in (first[case], second[case]):
        assert ended.engine == "DeepSpeedEngine"
        assert is_half(ended.kept["moments"])
        assert is_half(ended.kept["weights"]) == (stage == 3)
        assert ended.left == 0, "what is sharded is not kept for the stages that follow"
    assert first[case].told[0] == f"on 2 processes, this one on cpu: ZeRO-{stage}" and second[case].told == []
    assert first[case].metrics == second[case].metrics | {"time/train_s": first[case].metrics["time/train_s"]}
    assert_same(folder / case / "one", folder / case / f"two {stage}")
    for key in one[case].metrics.keys() - {"time/train_s"}:
        assert first[case].metrics[key] == pytest.approx(one[case].metrics[key], rel=1e-4, abs=1e-5), key
    is_best = "load_best_model_at_end" in CASES[case][1]
    assert any(line.startswith("kept: the model after step 3 of 6") for line in first[case].told) == is_best


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_was_stopped_goes_on_bitwise(folder, two, case):
    stage, first, second, _ = two
    assert first[f"{case} stopped"].interrupted == second[f"{case} stopped"].interrupted == "SIGTERM"
    assert first[f"{case} resumed"].interrupted is None
    assert_same(folder / case / f"two {stage}", folder / case / f"cut {stage}", most=0.0)


@pytest.mark.parametrize("case", CASES)
def test_the_folder_loads_without_deepspeed(folder, two, case):
    stage, *_ = two
    saved, base = folder / case / f"two {stage}", folder / case / "model"
    name, changes = CASES[case]
    kind = AutoModelForCausalLM if name == "sft" else AutoModelForSequenceClassification
    tensors = weights(saved)
    assert {x.dtype for x in tensors.values()} == {torch.float32}
    if changes["lora"]:
        options = {} if name == "sft" else {"num_labels": 1}
        model = PeftModel.from_pretrained(kind.from_pretrained(base, **options), saved)
        assert (name == "reward") == any("score" in key for key in tensors)
        assert all("lora" in key or "score" in key for key in tensors)
    else:
        model, info = kind.from_pretrained(saved, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        start = load_file(base / "model.safetensors")
        assert any(not torch.equal(x, tensors[key]) for key, x in start.items() if key in tensors), "it trains"
    assert not any(p.isnan().any() or p.numel() == 0 for p in model.parameters())


def test_a_best_checkpoint_that_cannot_be_read_leaves_the_last_model(folder, one, two):
    stage, first, _, _ = two
    if stage < 3:
        pytest.skip("loaded by every process, as without ZeRO")
    told = first["spoiled"].told
    assert any("model of the last step is kept instead of the best" in line for line in told)
    saved, best = weights(folder / "sft full" / "spoiled"), weights(folder / "sft full" / "one")
    assert max((x - best[key]).abs().max().item() for key, x in saved.items()) > 1e-4, "trained further than the best"
    assert json.loads((folder / "sft full" / "spoiled" / "finished.json").read_text()) == {"step": 6, "kept_step": 6}


def test_a_pipeline_goes_through_all_stages_and_finds_them_finished(folder, two):
    stage, _, _, (said, again) = two
    assert said.count(f"on 2 processes, this one on cpu: ZeRO-{stage}") == 3
    out = folder / f"pipeline {stage} 2" / "out"
    assert again == [f"{name}: finished in {out / name}" for name in ("sft", "reward", "ppo")]
    alone(lives, [], pipeline_of(folder, stage, 1), folder=folder)
    for name, most in (("sft", 1e-6), ("reward", 1e-6), ("ppo", 1e-5)):
        ours, theirs = weights(out / name), weights(folder / f"pipeline {stage} 1" / "out" / name)
        assert max((x - theirs[key]).abs().max().item() for key, x in ours.items()) <= most, name


def test_three_processes_with_unequal_shares_of_the_held_out_answers(tmp_path):
    """Ten answers, which all read in step."""
    config = config_of(tmp_path, "reward", max_steps=2, batch_size=6, data={"eval_fraction": 0.25})
    files = {n: written(config, f"out {n}") for n in (1, 3)}
    alone(lives, [(run, "reward", files[1])], folder=tmp_path)
    environment = launch(tmp_path, 3)
    together(lives, [(run, "reward", files[3])], folder=tmp_path, num_processes=3, environment=environment)
    saved, wanted = weights(tmp_path / "out 3"), weights(tmp_path / "out 1")
    assert max((x - wanted[key]).abs().max().item() for key, x in saved.items()) <= 1e-6
    ours, theirs = (json.loads((tmp_path / f"out {n}" / "reward_eval.json").read_text())["pairs"] for n in (3, 1))
    assert len(ours) * 2 % 3 != 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_stage_1_and_half_precision_that_the_launcher_asks_for(tmp_path):
    """Forward passes are under autocast, and weights stay float32, in memory and in the folder."""
    config, runs = config_of(tmp_path, "sft", max_steps=2, bf16=None), {}
    told = launch(tmp_path, 1) | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    runs["two"] = together(lives, [(run, "sft", written(config, "two"))], folder=tmp_path, environment=told)[0]
    for name, bf16 in (("half", True), ("single", False)):
        same = config.model_copy(update={"train": config.train.model_copy(update={"bf16": bf16})})
        runs[name] = alone(lives, [(run, "sft", written(same, name))], folder=tmp_path)
    ((ended,), _) = runs["two"]
    assert (ended.engine, ended.told[0]) == ("DeepSpeedEngine", "on 2 processes, this one on cpu: ZeRO-1")
    assert is_half(ended.kept["moments"])
    assert {x.dtype for x in weights(tmp_path / "two").values()} == {torch.float32}
    losses = {name: read_jsonl(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in runs}
    assert losses["two"] == pytest.approx(losses["half"], rel=1e-6) != pytest.approx(losses["single"], rel=1e-6)


# Before a model is loaded


@pytest.mark.parametrize(
    ("written", "changes", "said"),
    [
        ({"zero_optimization": {"stage": 0}}, {}, r"zero_optimization.stage in the DeepSpeed configuration: got 0"),
        ({"optimizer": {"type": "AdamW"}}, {}, r"wanted none: train.learning_rate and related keys set it"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, r"wanted none: train.lr_scheduler_type and train.warmup_ratio set"),
        ({"train_batch_size": 64}, {}, r"train_batch_size .*: got 64, wanted auto: train.batch_size sets it"),
        ({"gradient_clipping": 0.5}, {}, r"gradient_clipping .*: got 0.5, wanted auto or train.max_grad_norm,"),
        ({"bf16": {"enabled": True}}, {}, r"bf16.enabled in the DeepSpeed configuration: got true, wanted auto, or"),
        ({}, {"bf16": None, "fp16": True}, r"train.fp16, or mixed_precision of the launch: got float16, which is"),
    ],
)
def test_what_contradicts_a_run_is_told(tmp_path, monkeypatch, written, changes, said):
    for name, value in launch(tmp_path, 3, **written).items():
        monkeypatch.setenv(name, value)
    config = config_of(tmp_path, "sft", **changes)
    with pytest.raises(ConfigError, match=said):
        Zero(Dist()).check(config)


def test_half_precision_of_the_hardware_is_no_contradiction(tmp_path, monkeypatch):
    """By itself a run is in bfloat16 where that is fast."""
    for name, value in launch(tmp_path, 3, bf16={"enabled": True}).items():
        monkeypatch.setenv(name, value)
    config = config_of(tmp_path, "sft", bf16=None)
    told = pytest.raises(ConfigError, match=r"bf16\.enabled")
    for is_fast, expectation in ((True, nullcontext()), (False, told)):
        monkeypatch.setattr("tether.models.device.bf16_supported", lambda device, is_fast=is_fast: is_fast)
        with expectation:
            Zero(Dist()).check(config)


@pytest.mark.parametrize("name", STAGES)
def test_a_base_with_quantized_weights_is_refused(tmp_path, monkeypatch, name):
    config = config_of(tmp_path, name, lora=LORA)
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    edit_json(tmp_path / "model" / "config.json", lambda content: content.update(quantized))
    save_file({}, tmp_path / "model" / "model.safetensors")  # to load this would be another error
    dist = Dist()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(begin, "Dist", lambda timeout: dist)
    with pytest.raises(ConfigError, match="holds quantized weights, wanted none under ZeRO: they cannot be sharded"):
        STAGES[name][1](config)


def test_a_checkpoint_is_resumed_by_the_engine_that_wrote_it(folder, two, tmp_path, monkeypatch):
    stage, *_ = two
    checkpoint = folder / "reward full" / f"two {stage}" / "checkpoint-6"
    dist = Dist()
    told = f"checkpoint-6 was written by 2 processes under ZeRO-{stage}, and cannot be resumed "
    with pytest.raises(CheckpointError, match=f"{told}without ZeRO: launch the run as before"):
        check_same_engine(checkpoint, Replicated(dist), dist)
    config = case_of(folder, "reward full").model_copy(
        update={"output_dir": tmp_path / "out", "resume": str(checkpoint)}
    )
    with pytest.raises(CheckpointError, match=f"{told}without ZeRO"):
        STAGES["reward"][1](config)
    for name, value in launch(tmp_path, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=f"{told}by 1 process under ZeRO-1"):
        check_same_engine(checkpoint, Zero(dist), dist)
