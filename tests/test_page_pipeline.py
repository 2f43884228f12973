"""docs/pipeline.md: every command in it runs, on tiny models under the paths that it names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.tiny import CHAT_TEMPLATE, save_tiny
from tether.cli.main import main
from tether.models.chat import NAMES

PAGE = (Path(__file__).parents[1] / "docs" / "pipeline.md").read_text(encoding="utf-8")
WORDS = ("cat", "dog", "sun", "day", "rain", "night", "red", "blue", "green", "two")
PPO = """
model: {path: path/or/hub-id, lora: {r: 2}}
rewards: [{type: length_target, target: 4}]
data: {prompts: prompts.jsonl}
sampling: {response_length: 4}
train: {max_steps: 1, rollout_batch_size: 4, micro_batch_size: 4}
output_dir: runs/ppo
"""


def commands() -> list[str]:
    """Indented lines that start with tether, their comments left out."""
    return [line.split("  #")[0].strip() for line in PAGE.splitlines() if line.startswith("    tether ")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def write(path: Path, rows: list[dict], *, as_list: bool = False) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows) if as_list else "\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tokenizer = save_tiny(tmp_path / "path/or/hub-id") / "chat_template.jinja"
    tokenizer.write_text("{% if enable_thinking is false %}<bos>{% endif %}" + CHAT_TEMPLATE)
    pairs = [{"prompt": f"the {w}", "chosen": "is good", "rejected": "is bad"} for w in WORDS]
    write(tmp_path / "pairs.jsonl", pairs)
    write(tmp_path / "prompts.jsonl", [{"prompt": f"the {w}"} for w in WORDS])
    write(tmp_path / "demonstrations.jsonl", [{"prompt": f"the {w}", "completion": "is good"} for w in WORDS])
    good, bad = ({"from": "gpt", "value": f"is {word}"} for word in ("good", "bad"))
    verdicts = [
        {"conversations": [{"from": "human", "value": f"a {w}"}], "chosen": good, "rejected": bad} for w in WORDS
    ]
    stories = [{"instruction": f"the {w}", "output": "is red"} for w in WORDS]
    write(tmp_path / "data/verdicts.json", verdicts, as_list=True)
    write(tmp_path / "data/stories.json", stories, as_list=True)
    (tmp_path / "data/dataset_info.json").write_text(blocks("json")[0])
    for name, text in zip(("run", "sft", "reward"), blocks("yaml"), strict=True):
        text = text.replace("10000", "64").replace("save_steps: 20", "save_steps: 1")
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "ppo.yaml").write_text(PPO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_runs(folder, capsys):
    told = commands()
    assert {command.split()[1] for command in told} == {"pipeline", "sft", "reward", "ppo"}
    for command in told:
        arguments = shlex.split(command)[1:]
        if arguments[0] == "pipeline":
            arguments.append("--ppo.sampling.response_length=4")
        assert main(arguments) == 0, f"{command}: {capsys.readouterr().err}"
    for made in ("all/ppo", "other/ppo", "named/ppo", "sft", "sft-long", "best", "reward", "ppo"):
        assert (folder / "runs" / made / "adapter_model.safetensors").is_file(), made


def test_the_page_names_every_template():
    listed = re.search(r"a built-in\s+template\s+\((.*?)\)", PAGE, flags=re.DOTALL).group(1)
    assert tuple(listed.replace("\n", " ").split(", ")) == NAMES
