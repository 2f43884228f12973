"""Reward models under engines that spread weights: each of two processes has a part, and scores are those of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed import harness
from tests.distributed.runs import Trained, assert_same_run, fitted
from tests.distributed.spread import settings, write_material
from tests.models.build import edit_json
from tests.rewards.batches import chat_batch
from tests.rewards.encoders import save_encoder
from tests.rewards.value_heads import save_value_head
from tests.tiny import save_tiny, tiny_tokenizer
from tests.train.runs import tiny_run
from tether.config.rewards import ModelReward
from tether.errors import ConfigError
from tether.machine.distributed import Dist
from tether.models.stop_strings import continued
from tether.rewards.build import build_rewards, check_sharded
from tether.rewards.combine import Part
from tether.rewards.ensemble import Ensemble
from tether.train.engines.build import build_engine
from tether.train.run import open_trainer
from tether.train.sharing import shared
from tether.types import RewardSource

ENGINES = {
    "FSDP2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "ZeRO-3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
TURNS = [(f"the cat sees {'a dog ' * i}", f"{'very ' * (7 - i)}nice") for i in range(7)]
SECONDS = 20.0

together = partial(harness.together, timeout=400)
alone = partial(harness.alone, timeout=400)
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def is_there(request):
    engine = request.node.callspec.params["engine"] if hasattr(request.node, "callspec") else None
    if engine == "ZeRO-3" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install --no-build-isolation -e .[deepspeed]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models that judge: decoders of the policy's tokenizer and of another, a value head, an encoder."""
    folder = write_material(tmp_path_factory.mktemp("judges"))
    save_tiny(folder / "classifier", num_labels=1, seed=1)
    save_tiny(folder / "stranger", "qwen2", num_labels=1, seed=2)
    save_value_head(folder / "value")
    save_encoder(folder / "encoder", seed=3)
    return folder


def rewards(folder: Path) -> list[dict[str, Any]]:
    """Every kind of model, in several forwards each; one that each process has, and one that the first has."""
    joined = {"input_format": "joined", "batch_size": 2}
    return [
        {"type": "model", "name": "classifier", "path": str(folder / "classifier"), "batch_size": 2},
        {"type": "value_head", "name": "value", "path": str(folder / "value" / "reward"), "batch_size": 3},
        {"type": "ensemble", "name": "both", "members": [
            {"type": "model", "name": "encoder", "path": str(folder / "encoder"), "processes": "sharded"} | joined,
            {"type": "model", "name": "stranger", "path": str(folder / "stranger"), "dtype": "bfloat16"} | joined]},
        {"type": "model", "name": "everywhere", "path": str(folder / "classifier"), "processes": "all"},
        {"type": "model", "name": "once", "path": str(folder / "classifier"), "processes": "one"},
    ]  # fmt: skip


def part(parameter: Tensor) -> float:
    """What this process has of a parameter, as a share of it."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().numel() / parameter.numel()
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel() / parameter.ds_numel
    return 1.0


def kept(source: RewardSource, prefix: str = "") -> dict[str, float]:
    """The largest share that this process has of a matrix, of each model; 0 where it has none of it."""
    if isinstance(source, Part):
        return kept(getattr(source.source, "source", source.source), f"{prefix}{source.name}")
    if isinstance(source, Ensemble) or hasattr(source, "parts"):
        parts = getattr(source, "members", None) or source.parts
        under = f"{prefix}/" if prefix else ""
        return {name: share for each in parts for name, share in kept(each, under).items()}
    parameters = [] if source is None else source.model.parameters()
    return {prefix: max((part(p) for p in parameters if getattr(p, "ds_numel", p.numel()) > 40), default=0.0)}


def scored(folder: Path) -> tuple[str, dict[str, float], list[dict[str, list[float]]]]:
    """The engine, what is kept of each model, and all scores of seven answers, of three and of one."""
    dist, tokenizer = Dist(), tiny_tokenizer()
    engine = build_engine(dist)
    config = tiny_run(folder, rewards=rewards(folder))
    source = build_rewards(
        config.rewards,
        config.reward_names,
        roles=None,
        tokenizer=tokenizer,
        device=dist.device,
        shards=engine.spreads_weights,
        shared=partial(shared, dist=dist, engine=engine),
    )
    found = []
    for count in (7, 3, 1):
        batch = replace(chat_batch(tokenizer, TURNS[:count]), decode=partial(continued, tokenizer=tokenizer))
        output = source.score(batch)
        found.append({"": output.scores} | dict(output.components))
    return engine.name, kept(source), found


@engines
def test_scores_are_those_of_one_process_with_a_part_of_each_model(folder, engine):
    (name, share, first), (_, other_share, second) = together(
        scored, folder, folder=folder, environment=ENGINES[engine]
    )
    _, whole, one = alone(scored, folder, folder=folder)
    assert name == engine and set(whole.values()) == {1.0}
    for shares, once in ((share, 1.0), (other_share, 0.0)):
        assert shares.pop("once") == once and shares.pop("everywhere") == 1.0
        assert len(shares) == 4 and all(0.3 < share <= 0.6 for share in shares.values()), shares
    assert first == second
    largest = 0.0
    for ours, theirs in zip(first, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key, scores in theirs.items():
            assert len(set(scores)) == len(scores)
            largest = max(largest, *(abs(a - b) for a, b in zip(ours[key], scores, strict=True)))
    print(f"{engine}: largest difference of a score {largest:.1e}")
    assert largest <= 5e-6


def judged(folder: Path, changes: Mapping[str, Any]) -> tuple[dict[str, float], Trained]:
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        return kept(trainer.parts.rewards), fitted(trainer)


@engines
def test_a_run_that_they_judge_is_that_of_one_process(folder, engine):
    case = {
        "value__kind": "head", "ppo__kl_coef": 0.2, "train__rollout_batch_size": 7, "train__micro_batch_size": 7,
        "rewards": [
            {"type": "model", "path": "classifier", "batch_size": 2, "norm": "auto"},
            {"type": "value_head", "path": "value/reward"},
        ],
    }  # fmt: skip
    runs = [settings(folder, case, f"{engine} judged by {n}", n) for n in (1, 2)]
    (share, first), _ = together(judged, folder, runs[1], folder=folder, environment=ENGINES[engine])
    _, one = alone(judged, folder, runs[0], folder=folder)
    assert first.engine == engine and all(0.3 < each <= 0.6 for each in share.values()), share
    assert_same_run(first, one)


def fails(folder: Path, changes: Mapping[str, Any], fault: str) -> None:
    """A run in which the second process meets an answer that is too long, or has no memory left in a forward."""
    with open_trainer(tiny_run(folder, **changes)) as trainer:
        judge = trainer.parts.rewards.parts[0].source.source
        if not trainer.dist.is_main and fault == "too long":
            judge.max_length = 1
        elif not trainer.dist.is_main:

            def full(*call: Any) -> None:
                raise torch.OutOfMemoryError("no more")

            judge.model.base_model.layers[1].register_forward_pre_hook(full)
        trainer.fit()


@engines
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("too long", "RewardError"),
        ("memory", "OutOfStep: out of memory in a forward pass, in which all processes take part (no more)"),
    ],
)
def test_what_one_process_meets_ends_all(folder, engine, fault, said):
    case = {"value__kind": "head", "rewards": [{"type": "model", "path": "classifier"}]}
    changes = settings(folder, case, f"{engine} {fault}", 2)
    first, second = harness.started(
        fails, folder, changes, fault, folder=folder, environment=ENGINES[engine], grace=SECONDS
    )
    assert not first.is_hung and not second.is_hung, first.told() + second.told()
    assert said in second.error, second.told()
    assert (said if fault == "too long" else "LostProcess") in first.error, first.told()


def test_what_cannot_be_sharded_is_told_before_a_model_is_loaded(folder):
    (reward,) = tiny_run(folder, rewards=[rewards(folder)[0] | {"processes": "sharded"}]).rewards
    check_sharded([reward], "FSDP2", spreads=True)
    with pytest.raises(ConfigError, match=r"^rewards.0.processes: got sharded, wanted all or one under DDP, which"):
        check_sharded([reward], "DDP", spreads=False)
    for key, value in {"quantization": "4bit", "compile": True}.items():
        with pytest.raises(ValidationError, match=r"processes sharded: .* cannot be combined; leave one out"):
            ModelReward(type="model", path="judge", processes="sharded", **{key: value})
    saved = save_tiny(folder / "few-bits", num_labels=1)
    edit_json(saved / "config.json", lambda found: found.update(quantization_config={"quant_method": "bitsandbytes"}))
    with pytest.raises(ConfigError, match=r"^rewards.0.processes: got sharded, but .* holds quantized weights"):
        check_sharded([ModelReward(type="model", path=str(saved), processes="sharded")], "FSDP2", spreads=True)
