"""Every command and every program in README.md runs, in a folder with tiny models under the paths that it names."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.compat.llamafactory import PPO as LLAMAFACTORY
from tests.hub import fake_hub
from tests.tiny import save_tiny
from tests.train.runs import write_prompts
from tether.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BY_CI = {"make demo", "make test", "pip install -e .", "pip install -e '.[trl]'"}
"""Commands that install: continuous integration runs the second, the first is the same set-up and a slow test."""
REWARD_YAML = """
model: {path: path/or/hub-id, lora: {r: 4}}
data: {pairs: pairs.jsonl, eval_fraction: 0.25}
train: {batch_size: 4, micro_batch_size: 4}
output_dir: runs/reward
"""
SFT_YAML = """
model: {path: path/or/hub-id, lora: {r: 4}}
data: {demonstrations: pairs.jsonl}
train: {batch_size: 4, micro_batch_size: 4}
output_dir: runs/sft
"""
PIPELINE_YAML = """
model: {path: path/or/hub-id, lora: {r: 4}}
output_dir: runs/pipeline
reward: {data: {pairs: pairs.jsonl, eval_fraction: 0.25}, train: {batch_size: 4, micro_batch_size: 4}}
ppo:
  data: {prompts: prompts.jsonl}
  sampling: {response_length: 4}
  train: {max_steps: 1, rollout_batch_size: 4, micro_batch_size: 4}
"""


def commands() -> list[str]:
    """Indented lines of README.md, their comments left out."""
    return [line.split("  #")[0].strip() for line in README.splitlines() if re.match(r" {4}[a-z]", line)
            and not in_fence(line)]  # fmt: skip


def in_fence(line: str) -> bool:
    return any(line in block for block in re.findall(r"```.*?```", README, flags=re.DOTALL))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_tiny(tmp_path / "path/or/hub-id")
    save_tiny(tmp_path / "path/to/sequence-classifier", num_labels=1)
    write_prompts(tmp_path / "prompts.jsonl")
    write_prompts(tmp_path / "held_out.jsonl")
    pairs = [{"prompt": f"the cat {w}", "chosen": "good nice day", "rejected": "bad night"} for w in ("sees", "runs")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 4), encoding="utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "reward.yaml").write_text(REWARD_YAML, encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(SFT_YAML, encoding="utf-8")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE_YAML, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(smaller(blocks("yaml")[0]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def smaller(text: str) -> str:
    """The same run or program, short."""
    assert "10000" in text
    return text.replace("10000", "128").replace("save_steps: 50", "save_steps: 1")


def test_commands_of_the_readme_run(folder, capsys, monkeypatch):
    (folder / "their.yaml").write_text(LLAMAFACTORY, encoding="utf-8")
    with fake_hub(monkeypatch) as hub:
        run_commands(folder, capsys, monkeypatch)
    assert "README.md" in hub.files


def run_commands(folder, capsys, monkeypatch):
    told = [command for command in commands() if command not in BY_CI]
    assert {command.split()[0] for command in told} == {"tether"}
    assert len(told) >= 9
    for command in told:
        arguments = command.split()[1:]
        if "--ppo.kl_coef=0.02" in arguments:
            arguments.append("--output_dir=runs/second")
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat sees\n/quit\n"))
        assert main(arguments) == 0, f"{command}: {capsys.readouterr().err}"
    assert (folder / "merged" / "model.safetensors").exists()
    assert (folder / "runs/first/report.html").exists()


def test_programs_of_the_readme_run(folder):
    train, load = blocks("python")
    exec(compile(smaller(train), "README.md", "exec"), {})
    loaded: dict[str, object] = {}
    exec(compile(load, "README.md", "exec"), loaded)
    assert "lora_" in " ".join(name for name, _ in loaded["model"].named_parameters())
    assert (folder / "runs/first/report.html").is_file()


def test_paths_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
