"""``tether serve-reward``: any source as a service, whose scores are those that it gives in the process."""

import json
import os
import signal
import socket
import threading
import time

import pytest

from tests.rewards.test_build import save_reward_adapter
from tests.rewards.value_heads import save_value_head
from tests.tiny import save_tiny
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.config.load import dump_config
from tether.config.source import load_sources
from tether.errors import ModelError, RewardError
from tether.inference.judges import load_judges, load_reader
from tether.rewards.server import RewardServer

PROMPTS = ["the cat", [{"role": "system", "content": "be nice"}, {"role": "user", "content": "it is"}], "rain", "you"]
RESPONSES = ["sees a dog", "good", "", "not very good and not very bad"]
COLUMNS = {"answer": ["dog", None, "sun", "i"]}


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was(monkeypatch):
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def is_up(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Client(threading.Thread):
    """Waits until a service is up, does its work, and ends the service by a signal."""

    def __init__(self, port, work, number):
        super().__init__(daemon=True)
        self.port, self.work, self.number, self.result = port, work, number, None

    def run(self):
        while not is_up(self.port):
            time.sleep(0.02)
        try:
            self.result = self.work()
        finally:
            os.kill(os.getpid(), self.number)


def served(file, work, *arguments, number=signal.SIGTERM):
    """What ``work(url)`` gives while the command serves the file, and the command's exit code."""
    port = free_port()
    client = Client(port, lambda: work(f"http://127.0.0.1:{port}/score"), number)
    client.start()
    code = main(["serve-reward", str(file), "--port", str(port), *arguments])
    client.join(5)
    assert not is_up(port)
    return client.result, code


def through_http(folder, url, **keys):
    """The scores of a service, and its components."""
    file = folder / "client.yaml"
    file.write_text(json.dumps({"rewards": [{"type": "http", "url": url, "retries": 0} | keys]}), encoding="utf-8")
    return scored(file)


def scored(file):
    config = load_sources(file)
    judges = load_judges(config, load_reader(config))
    places = [f"row {i}" for i in range(len(PROMPTS))]
    return judges.rewards.score(judges.reader.batch(PROMPTS, RESPONSES, COLUMNS, places))


def model(folder):
    save_tiny(folder / "judge", num_labels=1)
    return {"rewards": [{"type": "model", "path": str(folder / "judge")}]}


def other_tokenizer(folder):
    save_tiny(folder / "judge", "qwen2", num_labels=1)
    save_tiny(folder / "policy")
    return {"rewards": [{"type": "model", "path": str(folder / "judge")}], "model": {"path": str(folder / "policy")}}


def value_head(folder):
    return {"rewards": [{"type": "value_head", "path": str(save_value_head(folder))}]}


def adapter(folder):
    base = save_tiny(folder / "policy")
    save_reward_adapter(folder / "adapter", base)
    return {"rewards": [{"type": "adapter", "path": str(folder / "adapter")}], "model": {"path": str(base)}}


def several(folder):
    file = folder / "words.py"
    file.write_text("def words(prompts, completions, answer): return [len(str(a)) / 3 for a in answer]")
    function = {"type": "function", "path": str(file), "name": "words", "weight": 0.7}
    return {"rewards": [function, *model(folder)["rewards"]]}


def ensemble(folder):
    sources = adapter(folder)
    members = [*model(folder)["rewards"], *sources["rewards"]]
    return sources | {"rewards": [{"type": "ensemble", "members": members, "reduce": "min"}]}


@pytest.mark.parametrize("make", [model, other_tokenizer, value_head, adapter, several, ensemble])
def test_served_scores_are_those_of_the_process(tmp_path, make):
    file = tmp_path / "source.yaml"
    file.write_text(json.dumps(make(tmp_path)), encoding="utf-8")
    here = scored(file)
    there, code = served(file, lambda url: through_http(tmp_path, url))
    assert code == 0
    assert there.scores == here.scores
    assert {name.removeprefix("http/"): values for name, values in there.components.items() if name != "http"} == (
        here.components
    )


def test_a_runs_own_file_will_do_and_its_system_message_is_put_before_prompts(tmp_path):
    save_tiny(tmp_path / "judge", num_labels=1)
    judge = [{"type": "model", "path": str(tmp_path / "judge")}]
    scores = []
    for system in ("you likes it", None):
        file = tmp_path / f"{system}.yaml"
        run = tiny_run(tmp_path, rewards=judge, data__system_prompt=system)
        file.write_text(dump_config(run), encoding="utf-8")
        scores.append(served(file, lambda url: through_http(tmp_path, url).scores)[0])
    assert scores[0][0] != scores[1][0]
    assert scores[0][1] == pytest.approx(scores[1][1], abs=1e-6)  # it brings a system message of its own


def test_an_error_of_a_source_reaches_the_client(tmp_path):
    file = tmp_path / "source.yaml"
    file.write_text(json.dumps(several(tmp_path)), encoding="utf-8")

    def work(url):
        with pytest.raises(RewardError, match=r"got status 500 and .*words needs answer"):
            through_http(tmp_path, url, columns=[])
        return len(through_http(tmp_path, url).scores)

    assert served(file, work) == (4, 0)


def test_ctrl_c_ends_it_and_what_it_says(tmp_path, capsys):
    file = tmp_path / "source.yaml"
    file.write_text(json.dumps(several(tmp_path)), encoding="utf-8")
    assert served(file, lambda url: None, "--rewards.0.weight=2", number=signal.SIGINT)[1] == 0
    shown = capsys.readouterr().out
    assert "serving words, model_1 at http://127.0.0.1:" in shown
    assert "stopped by SIGINT" in shown
    assert "no authentication" not in shown


def test_whoever_opens_it_to_others_is_told(tmp_path, capsys):
    file = tmp_path / "source.yaml"
    file.write_text(json.dumps(several(tmp_path)), encoding="utf-8")
    assert served(file, lambda url: None, "--host", "0.0.0.0")[1] == 0
    assert "anyone who reaches this address can request scores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none.yaml"], "none.yaml: there is no such file"),
        (["source.yaml", "--port", "70000"], "got 70000, wanted a number from 0 to 65535"),
        (["source.yaml", "--rewards.0.path=none"], "rewards.0.path: there is no folder none"),
        ([], "the following arguments are required: SOURCE.yaml"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, arguments, told):
    (tmp_path / "source.yaml").write_text("rewards: [{type: model, path: judge}]", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["serve-reward", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_an_address_that_is_taken_is_told_before_models_load(tmp_path, monkeypatch, capsys):
    file = tmp_path / "source.yaml"
    file.write_text(json.dumps(several(tmp_path)), encoding="utf-8")
    monkeypatch.setattr("tether.inference.judges.load_judges", lambda *given: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve-reward", str(file), "--port", str(port)]) == 2
    assert f"--port {port}: cannot listen there" in capsys.readouterr().err


def test_the_address_is_free_again_when_models_cannot_be_loaded(tmp_path, monkeypatch, capsys):
    bound = []

    class Kept(RewardServer):
        def server_bind(self):
            bound.append(self.socket)
            super().server_bind()

    def load(config, reader):
        assert not is_up(bound[0].getsockname()[1])  # nobody is kept waiting
        raise ModelError("its weights are gone")

    file = tmp_path / "source.yaml"
    file.write_text(json.dumps(several(tmp_path)), encoding="utf-8")
    monkeypatch.setattr("tether.inference.judges.RewardServer", Kept)
    monkeypatch.setattr("tether.inference.judges.load_judges", load)
    assert main(["serve-reward", str(file), "--port", "0"]) == 2
    assert "its weights are gone" in capsys.readouterr().err
    assert [each.fileno() for each in bound] == [-1]
