"""A reward model of another family drives PPO: a BERT-type classifier with a vocabulary of its own."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.models.build import checksums
from tests.rewards.encoders import plain_score, save_encoder
from tests.rewards.value_heads import save_value_head
from tests.train.runs import tiny_run
from tether.errors import ConfigError
from tether.models.loading import load_causal_lm
from tether.train.inputs import model_paths
from tether.train.plan import plan
from tether.train.run import train_policy


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_bert_judges_what_the_policy_wrote(tmp_path, lora):
    """Every answer's reward is what transformers alone gives for the text, the run's system message in it."""
    judge = save_encoder(tmp_path / "judge")
    changes = {"model__lora": lora} if lora else {}
    config = tiny_run(
        tmp_path,
        rewards=[{"type": "model", "path": str(judge), "name": "bert", "input_format": "pair"}],
        data__system_prompt="be nice",
        **changes,
    )
    before = checksums(load_causal_lm(config.model.path, dtype=torch.float32))
    result = train_policy(config)
    rows = [json.loads(line) for line in (config.output_dir / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * config.train.rollout_batch_size
    for row in rows:
        expected = plain_score(judge, f"be nice\n\n{row['prompt']}", row["response"])
        assert row["rewards"]["bert"] == pytest.approx(expected, abs=1e-5)
    means = [sum(row["rewards"]["bert"] for row in rows[i : i + 8]) / 8 for i in (0, 8)]
    assert [update["rewards/bert"] for update in result.updates] == pytest.approx(means, abs=1e-5)
    assert len({round(row["rewards"]["bert"], 4) for row in rows}) > 4
    after = checksums(load_causal_lm(str(config.output_dir), dtype=torch.float32))
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_judge_that_cannot_be_shown_the_conversations_is_refused_before_a_model_loads(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, rewards=[{"type": "model", "path": str(save_encoder(tmp_path / "judge"))}])
    monkeypatch.setattr("tether.train.run.build_trainer", None)
    with pytest.raises(ConfigError, match=r"rewards\.0: .*answer to row 0 .*input_format to joined, pair or response"):
        train_policy(config)


def test_the_plan_counts_judges_of_every_kind(tmp_path):
    paths = {"model": save_encoder(tmp_path / "bert"), "value_head": save_value_head(tmp_path / "llamafactory")}
    rewards = [{"type": kind, "path": str(path), "input_format": "pair"} for kind, path in paths.items()]
    sizes = [
        sum(tensor.numel() for tensor in load_file(paths["model"] / "model.safetensors").values()),
        sum(tensor.numel() for tensor in load_file(paths["value_head"] / "model.safetensors").values()) + 16,
    ]
    members = [{"type": "json_valid"}, rewards[0] | {"name": "bert"}]
    config = tiny_run(tmp_path, rewards=[*rewards, {"type": "ensemble", "name": "jury", "members": members}])
    roles = [role for role in plan(config).roles if role.role.startswith("reward")]
    assert [(role.role, role.source, role.parameters) for role in roles] == [
        ("reward model_0", str(paths["model"]), sizes[0]),
        ("reward value_head_1", str(paths["value_head"]), sizes[1]),
        ("reward jury/json_valid_0", "json_valid", 0),
        ("reward jury/bert", str(paths["model"]), sizes[0]),
    ]
    assert set(model_paths(config)) >= {"rewards.0.path", "rewards.1.path", "rewards.2.members.1.path"}
