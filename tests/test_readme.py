"""Every file, command and program in README.md works, in a folder with tiny models under the paths that it names."""

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
from tests.train.runs import tiny_run, write_prompts
from tether.cli.commands import COMMANDS
from tether.cli.main import main
from tether.config.keys import describe
from tether.config.schema import RunConfig
from tether.train.run import train_policy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BY_CI = {
    "make demo", "make test",
    "python3 -m venv .venv", ". .venv/bin/activate", "pip install -e .", "pip install -e '.[trl]'",
}  # fmt: skip
"""Commands that install: continuous integration runs the second, the others are what it does."""
HUB, MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct", "path/or/hub-id"
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


def listed_files() -> set[str]:
    """Files and folders in the first column of the table of outputs."""
    table = README.split("## Output")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} - {"output_dir"}


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_the_table_of_outputs_lists_what_a_run_writes(lora, tmp_path):
    config = tiny_run(tmp_path, model__lora=lora, train__save_steps=1, value__save=True, ppo__score_norm="running")
    train_policy(config)
    written = {re.sub(r"-\d+$", "-N", path.name) + "/" * path.is_dir() for path in config.output_dir.iterdir()}
    policy, other = {"config.json", "model.safetensors"}, {"adapter_config.json", "adapter_model.safetensors"}
    assert written - listed_files() == set()
    sometimes = {"bad_batches.jsonl", "logs/", "base/"} | (policy if lora else other)
    assert listed_files() - written == sometimes


def commands() -> list[str]:
    """Indented lines of README.md, their comments left out, and the commands in its table; each once."""
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL).replace(" \\\n       ", "")
    indented = [line.split("  #")[0].strip() for line in re.findall(r"^ {4}([a-z.].*)", prose, flags=re.MULTILINE)]
    table = README.split("## Commands")[1].split("\n## ")[0]
    return list(dict.fromkeys(indented + re.findall(r"^\|.*\| `(tether .*)` \|$", table, flags=re.MULTILINE)))


def files() -> dict[str, str]:
    """Contents of the files that README.md names at the beginning of the line before their block."""
    named = r"^`([a-z]+\.[a-z]+)`[^\n]*:\n\n```[a-z]+\n(.*?)```"
    return dict(re.findall(named, README, flags=re.DOTALL | re.MULTILINE))


def programs() -> list[str]:
    """Blocks of Python that are no file: they are run, not saved."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return [block for block in blocks if block not in files().values()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_tiny(tmp_path / MODEL)
    save_tiny(tmp_path / "path/to/sequence-classifier", num_labels=1)
    write_prompts(tmp_path / "held_out.jsonl")
    pairs = [{"prompt": f"the cat {w}", "chosen": "good nice day", "rejected": "bad night"} for w in ("sees", "runs")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 4), encoding="utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "reward.yaml").write_text(REWARD_YAML, encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(SFT_YAML, encoding="utf-8")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE_YAML, encoding="utf-8")
    for name, text in files().items():
        (tmp_path / name).write_text(smaller(text) if name.endswith(".yaml") else text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def smaller(text: str) -> str:
    """The same run or program with few and short answers, on a tiny model."""
    assert re.search(r"total_episodes\W+(640|10000)\b", text) is not None
    if "response_length" not in text:
        text = text.replace("output_dir:", "sampling: {response_length: 8}\noutput_dir:")
    for key, size in {"total_episodes": 64, "rollout_batch_size": 32, "response_length": 8, "save_steps": 1}.items():
        text = re.sub(rf"({key}\W+)\d+", rf"\g<1>{size}", text)
    return text.replace(HUB, MODEL)


def test_files_of_the_readme_are_found(folder):
    assert files().keys() == {"prompts.jsonl", "rewards.py", "run.yaml", "full.yaml"}
    assert HUB in README and HUB not in (folder / "run.yaml").read_text(encoding="utf-8")


def test_commands_of_the_readme_run(folder, capsys, monkeypatch):
    (folder / "their.yaml").write_text(LLAMAFACTORY, encoding="utf-8")
    with fake_hub(monkeypatch) as hub:
        run_commands(folder, capsys, monkeypatch)
    assert "README.md" in hub.files


def run_commands(folder, capsys, monkeypatch):
    told = [command for command in commands() if command not in BY_CI]
    assert {command.split()[0] for command in told} == {"tether"}
    assert len(told) >= 15
    for command in told:
        arguments = command.split()[1:]
        if "examples/preference_lora.yaml" in arguments:
            arguments += ["--train.total_episodes=32", "--train.rollout_batch_size=16", "--train.micro_batch_size=4"]
            arguments += ["--ppo.score_norm_samples=8", "--sampling.response_length=8", "--data.eval_fraction=0.25"]
            arguments += ["--value.warmup_steps=1"]
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat sees\n/quit\n"))
        assert main(arguments) == 0, f"{command}: {capsys.readouterr().err}"
    assert (folder / "merged" / "model.safetensors").exists()
    assert (folder / "runs/first/report.html").exists()


def test_the_full_configuration_runs(folder):
    assert main(["ppo", "full.yaml"]) == 0
    assert list((folder / "runs/full").glob("checkpoint-*"))


def test_programs_of_the_readme_run(folder):
    migrate, load, train = programs()
    exec(compile(migrate, "README.md", "exec"), {})
    assert main(["ppo", "run.yaml"]) == 0
    loaded: dict[str, object] = {}
    exec(compile(load, "README.md", "exec"), loaded)
    assert "lora_" in " ".join(name for name, _ in loaded["model"].named_parameters())
    exec(compile(smaller(train), "README.md", "exec"), {})
    assert (folder / "runs/python/report.html").is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/howto.md"])
def test_paths_that_the_pages_link_to_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text):
        if target.startswith("http"):
            continue
        path = (ROOT / page).parent / target
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, (target, anchor)


def test_keys_and_commands_of_the_how_to_exist():
    page = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    known = {doc.key for doc in describe(RunConfig)}
    named = re.findall(r"`((?:data|sampling|ppo|value|train|model)\.\w+)", page)
    assert len(named) > 20 and set(named) - known == set()
    assert {word for word in re.findall(r"`tether ([a-z-]+)", page)} <= COMMANDS.keys()
