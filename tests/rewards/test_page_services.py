"""What docs/rewards.md says of services and judges: its commands, its programs, its protocol."""

import json
import re
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.cli.test_serve_reward import free_port, is_up, served
from tests.rewards.batches import text_batch
from tests.rewards.services import Reply, lengths, local_service
from tests.rewards.test_judge_source import says
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.config.load import dump_config
from tether.config.rewards import HttpReward, JudgeReward
from tether.rewards.http import http_source
from tether.rewards.judge import judge_source

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
ASKED, ANSWERED = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line.split("  #")[0].split()[1:] for line in PAGE.splitlines() if line.startswith("    tether ")]
SECTIONS = [yaml.safe_load(block)["rewards"][0] for block in re.findall(r"```yaml\n(rewards:.*?)```", PAGE, re.DOTALL)]


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was(monkeypatch):
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the page names."""
    save_tiny(tmp_path / "path/or/hub-id", num_labels=1)
    source = {"rewards": [{"type": "model", "path": "path/or/hub-id"}]}
    (tmp_path / "source.yaml").write_text(yaml.safe_dump(source), encoding="utf-8")
    pair = {"prompt": "the cat", "chosen": "good", "rejected": "bad day"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair), encoding="utf-8")
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": "the cat", "response": "good"}), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(dump_config(tiny_run(tmp_path)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def section(kind):
    return next(each for each in SECTIONS if each["type"] == kind)


def posted(url, payload):
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as reply:
        return json.load(reply)


def test_commands_run(folder):
    scoring = [command for command in COMMANDS if command[0] == "score"]
    assert len(scoring) == 3
    for command in scoring:
        assert main(command) == 0, command
    assert (folder / "scored.jsonl").is_file()
    (serving,) = [command for command in COMMANDS if command[0] == "serve-reward"]
    assert serving == ["serve-reward", "source.yaml", "--port", "8000"]
    reply, code = served("source.yaml", lambda url: posted(url, ASKED))
    assert code == 0
    assert reply.keys() == ANSWERED.keys()
    assert len(reply["scores"]) == len(ASKED["responses"]) == len(ANSWERED["scores"])


def test_what_is_asked_and_answered_is_what_a_source_sends_and_reads():
    batch = text_batch(*ASKED["responses"], prompts=ASKED["prompts"], **ASKED["columns"])
    with local_service(lambda payload: Reply(ANSWERED)) as local:
        reward = HttpReward(**section("http") | {"url": local.url})
        output = http_source(reward, "judge", "rewards.0", None).score(batch)
    assert local.seen == [ASKED]
    assert output.scores == ANSWERED["scores"]
    assert output.components == ANSWERED["components"]


def test_the_service_of_the_page_scores():
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "serve_forever" in block]
    port = free_port()
    quiet = "log_message = lambda *_: None\n    "
    program = program.replace("8000", str(port)).replace("def do_POST", f"{quiet}def do_POST")
    threading.Thread(target=lambda: exec(compile(program, "service.py", "exec"), {}), daemon=True).start()
    while not is_up(port):
        time.sleep(0.01)
    reward = HttpReward(**section("http") | {"url": f"http://127.0.0.1:{port}/score"})
    assert http_source(reward, "judge", "rewards.0", None).score(text_batch("x" * 50, "x")).scores == [-0.5, -0.01]


def test_the_judge_of_the_page_is_asked(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    with local_service(lambda payload: says("**7/10**")) as local:
        reward = JudgeReward(**section("judge") | {"base_url": local.url})
        assert judge_source(reward, "judge", "rewards.0").score(text_batch("Nobody.", prompts=["Who?"])).scores == [7.0]
    asked = local.seen[0]["messages"][0]["content"]
    assert "Question: Who?\nAnswer: Nobody.\n" in asked


def test_the_tables_name_every_key_of_the_protocol():
    protocol = PAGE.split("## Scoring services")[1].split("A whole service")[0]
    keys = re.findall(r"^\| `(\w+)` \| ", protocol, re.MULTILINE)
    assert keys == list(ASKED)
    with local_service(lengths) as local:
        http_source(HttpReward(type="http", url=local.url), "judge", "rewards.0", None).score(text_batch("a"))
    assert list(local.seen[0]) == keys
