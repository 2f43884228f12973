"""The functions behind the commands, as a script calls them: all names from ``tether``, all paths as text."""

import json

import pytest
from transformers import AutoModelForCausalLM

import tether
from tests.tiny import save_tiny

REWARDS = """
def brevity(prompts, completions):
    return [-len(text.split()) / 10 for text in completions]
"""
SFT = """
model: {{path: {folder}/tiny}}
data: {{demonstrations: {folder}/demonstrations.jsonl, max_length: 32}}
train: {{max_steps: 1}}
output_dir: {folder}/sft
"""
PPO = """
model: {{path: {folder}/sft, lora: {{r: 2}}}}
rewards: [{{type: function, path: {folder}/rewards.py, name: brevity}}]
data: {{prompts: {folder}/prompts.jsonl}}
sampling: {{response_length: 4}}
train: {{max_steps: 1, rollout_batch_size: 4, micro_batch_size: 2}}
output_dir: {folder}/ppo
"""


def lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_a_script_does_what_the_commands_do(tmp_path):
    save_tiny(tmp_path / "tiny")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    prompts = lines(tmp_path / "prompts.jsonl", {"prompt": "good"}, {"prompt": "a good day"})
    lines(tmp_path / "demonstrations.jsonl", *[{"prompt": "good", "completion": "very good"}] * 4)
    pairs = lines(tmp_path / "pairs.jsonl", {"prompt": "good", "chosen": "very", "rejected": "very very good"})
    for name, text in (("sft", SFT), ("ppo", PPO)):
        (tmp_path / f"{name}.yaml").write_text(text.format(folder=tmp_path), encoding="utf-8")
    ppo, out = str(tmp_path / "ppo.yaml"), str(tmp_path / "ppo")

    sft = tether.train_sft(tether.load_config(tmp_path / "sft.yaml", section=tether.SftStageConfig))
    assert sft.interrupted is None and sft.metrics["train_loss"] > 0
    assert isinstance(tether.plan(tether.load_config(ppo)), tether.Plan)
    assert len(tether.train_policy(tether.load_config(ppo)).updates) == 1
    assert isinstance(tether.evaluate_path(out, prompts, output=str(tmp_path / "scored.jsonl")), tether.Evaluation)
    assert len(tether.generate_path(out, prompts)) == 2
    scored = tether.score_file(tether.load_sources(ppo), pairs, output=str(tmp_path / "pairs.scored.jsonl"))
    assert scored.tables[0].rows[0][:2] == ["score", 1.0], "the shorter answer is the chosen one"
    tether.merge_adapter(out, str(tmp_path / "merged"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert tether.write_report(out).is_file()


def test_mistakes_are_errors_of_the_package(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {path: nowhere}", encoding="utf-8")
    with pytest.raises(tether.ConfigError):
        tether.load_config(tmp_path / "run.yaml")
    for each in (tether.DataError, tether.ModelError, tether.RewardError):
        assert issubclass(each, tether.TetherError)
