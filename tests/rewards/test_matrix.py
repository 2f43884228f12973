"""Every source of rewards with every sharing of models: a run trains, saves, and has the scores of ``tether score``."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError

from tests.models.build import save_adapter
from tests.rewards.encoders import save_encoder
from tests.rewards.services import lengths, local_service
from tests.rewards.test_judge_source import RUBRIC, by_length
from tests.rewards.value_heads import save_value_head
from tests.tiny import EOS, save_tiny
from tests.train.runs import REWARD, tiny_run
from tether.config.source import SourceConfig
from tether.generation.fake import FakeGenerator
from tether.inference.scoring import score_file
from tether.metrics.writers import read_jsonl
from tether.models.loading import load_causal_lm
from tether.train.run import train_policy

ANSWERS = [
    [10, 11, 12, EOS], [20, EOS], [13, 14, 15, 16, 17, EOS], [21, 22, EOS],
    [39, EOS], [30, 31, 32, 33, EOS], [12, 12, 12, 12, EOS], [25, 26, EOS],
]  # fmt: skip
"""Words with an end: what an answer is in a file, too."""
SHARINGS = {"full": None, "lora": {"r": 2}}


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """Models, a function and services, by the sources that are made of them."""
    folder = tmp_path_factory.mktemp("judges")
    policy = save_tiny(folder / "llama-tied")
    (folder / "letters.py").write_text(REWARD)
    with local_service(lengths) as scores, local_service(by_length) as grades:
        one = {
            "model, same tokenizer": {"type": "model", "path": str(save_tiny(folder / "same", num_labels=1, seed=1))},
            "model, other tokenizer": {
                "type": "model", "path": str(save_tiny(folder / "other", "qwen2", num_labels=1, seed=2)),
            },
            "encoder": {"type": "model", "path": str(save_encoder(folder / "bert")), "input_format": "pair"},
            "value_head": {"type": "value_head", "path": str(save_value_head(folder / "llamafactory", "gpt2"))},
            "adapter": {"type": "adapter", "path": str(save_adapter(folder / "adapter", policy, reward=True))},
            "http": {"type": "http", "url": scores.url, "batch_size": 3},
            "judge": {
                "type": "judge", "base_url": grades.url, "model": "m", "rubric": RUBRIC, "scale": [0, 100],
            },
            "function": {"type": "function", "path": str(folder / "letters.py"), "name": "letters"},
            "ready-made": {"type": "length_target", "target": 16, "unit": "characters"},
        }  # fmt: skip
        members = [one["model, same tokenizer"], one["encoder"], one["function"] | {"weight": 0.1}]
        several = {
            "ensemble": [{"type": "ensemble", "reduce": "uwo", "coef": 0.5, "members": members}],
            "weighted sum": [
                one["model, other tokenizer"] | {"norm": [0.5, 2.0], "clip": 1.5},
                one["http"] | {"weight": -0.1},
                one["encoder"] | {"weight": 2.0},
            ],
        }
        yield folder, {name: [section] for name, section in one.items()} | several


CELLS = [
    (source, sharing)
    for source in (
        "model, same tokenizer", "model, other tokenizer", "encoder", "value_head", "adapter", "http", "judge",
        "function", "ready-made", "ensemble", "weighted sum",
    )
    for sharing in SHARINGS
    if (source, sharing) != ("adapter", "full")
]  # fmt: skip


def run_of(judges, source, sharing, out):
    folder, sections = judges
    lora = SHARINGS[sharing]
    return tiny_run(
        folder,
        rewards=sections[source],
        output_dir=str(out),
        train__max_steps=1,
        ppo__num_ppo_epochs=1,
        **({} if lora is None else {"model__lora": lora}),
    )


@pytest.mark.parametrize(("source", "sharing"), CELLS)
def test_a_run_trains_and_has_the_scores_of_tether_score(judges, tmp_path, monkeypatch, source, sharing):
    monkeypatch.setattr("tether.train.build.build_generator", lambda config, roles: FakeGenerator(ANSWERS))
    config = run_of(judges, source, sharing, tmp_path / "out")
    result = train_policy(config)
    rows = read_jsonl(config.output_dir / "samples.jsonl")
    assert len({round(row["score"], 4) for row in rows}) > 3, "hardly a signal"
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"prompt": r["prompt"], "response": r["response"]}) + "\n" for r in rows))
    asked = {"rewards": config.rewards, "model": config.model, "bf16": False}
    scored = score_file(SourceConfig.model_validate(asked), str(file)).rows
    for ours, theirs in zip(rows, scored, strict=True):
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)
        assert ours["rewards"] == pytest.approx(theirs["rewards"], abs=1e-5)
    mean = sum(row["score"] for row in scored) / len(scored)
    assert result.updates[0]["objective/scores"] == pytest.approx(mean, abs=1e-5)
    start, end = (load_causal_lm(str(path), dtype=torch.float32) for path in (config.model.path, config.output_dir))
    pairs = zip(start.state_dict().values(), end.state_dict().values(), strict=True)
    moved = [float((a - b).abs().max()) for a, b in pairs]
    assert 1e-4 < max(moved) < 0.1


def test_a_reward_adapter_needs_a_base_that_stays(judges, tmp_path):
    with pytest.raises(ValidationError, match="type adapter shares the policy's base, which full fine-tuning changes"):
        run_of(judges, "adapter", "full", tmp_path / "out")
