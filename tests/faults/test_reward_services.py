"""Class D of the fault list: reward services that fail.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import gzip
import os
import signal
import threading
import time

import pytest

from tests.rewards.services import Close, Flood, Hang, Reply, in_turn, lengths, local_service
from tests.rewards.test_judge_source import says
from tests.train.runs import tiny_run
from tests.train.test_run import assert_same_weights, reproducible, weights
from tether.cli.main import main
from tether.config.load import dump_config
from tether.errors import CheckpointError, ConfigError, RewardError, RewardResponseError
from tether.inference.evaluate import evaluate_path
from tether.metrics.writers import read_jsonl
from tether.train.run import train_policy
from tether.train.same_run import SERVICE_MAY_CHANGE

FAILURES = {
    "49: 500 with scores": lambda n: Reply({"scores": [0.5] * n}, 500),
    "49: 404 with a page": lambda n: Reply(b"<html>nothing here</html>", 404),
    "49: one score too few": lambda n: Reply({"scores": [0.5] * (n - 1)}),
    "49: one score too many": lambda n: Reply({"scores": [0.5] * (n + 1)}),
    "49: NaN": lambda n: Reply(b'{"scores": [' + b", ".join([b"NaN"] * n) + b"]}"),
    "49: null": lambda n: Reply({"scores": [None] * n}),
    "49: text": lambda n: Reply({"scores": "0.5"}),
    "49: numbers as text": lambda n: Reply({"scores": ["0.5"] * n}),
    "49: nested": lambda n: Reply({"scores": [[0.5]] * n}),
    "49: nested once more": lambda n: Reply({"scores": [[[[0.5]]]] * n}),
    "49: a step that is NaN": lambda n: Reply(b'{"scores": [' + b", ".join([b"[[1, NaN]]"] * n) + b"]}"),
    "49: a hang": lambda n: Hang(),
    "49: a closed socket": lambda n: Close(),
    "49: a gigabyte": lambda n: Flood(),
    "50: 422": lambda n: Reply({"detail": "unprocessable"}, 422),
}


class Failing:
    """Scores by length; whatever it is asked while ``fails`` it answers by a failure."""

    def __init__(self, failure):
        self.failure, self.calls, self.fails = failure, 0, lambda call: False

    def __call__(self, payload):
        self.calls += 1
        return self.failure(len(payload["responses"])) if self.fails(self.calls) else lengths(payload)


def service_run(folder, url, name="out", *, read_timeout=0.5, **changes):
    quick = {"connect_timeout": 0.5, "read_timeout": read_timeout, "retries": 1, "retry_delay": 0.01, "batch_size": 64}
    rewards = [{"type": "http", "url": url, "weight": 0.1, **quick}]
    changes = {"train__max_steps": 3, "ppo__num_ppo_epochs": 1} | changes
    return tiny_run(folder, rewards=rewards, output_dir=str(folder / name), **changes)


@pytest.fixture
def straight(tmp_path):
    """The same run with a service that always works."""
    with local_service(lengths) as local:
        config = service_run(tmp_path, local.url, "straight")
        train_policy(config)
    return config.output_dir


def test_50_a_service_down_for_good_ends_the_run_with_its_state_saved_and_it_goes_on_bitwise(
    tmp_path, straight, capsys
):
    behaviour = Failing(lambda n: Reply(b"overloaded", 503))
    behaviour.fails = lambda call: call > 3  # a first try before the run, and two updates
    with local_service(behaviour) as local:
        config = service_run(tmp_path, local.url, "failing")
        file = tmp_path / "run.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        assert main(["ppo", str(file)]) == 1
        told = capsys.readouterr().err
        assert f"tether: reward http: POST {local.url}, tried 2 times: got status 503 and 'overloaded'" in told
        assert "tether: the state after 2 updates is saved; --resume continues from there" in told
        assert [path.name for path in config.output_dir.glob("checkpoint-*")] == ["checkpoint-2"]
        assert len(read_jsonl(config.output_dir / "metrics.jsonl")) == 2
    with local_service(lengths) as moved:  # on another port, with more patience
        assert main(["ppo", str(file), "--resume", f"--rewards.0.url={moved.url}", "--rewards.0.read_timeout=9"]) == 0
    assert reproducible(config.output_dir) == reproducible(straight)
    assert_same_weights(weights(config.output_dir), weights(straight))


def test_50_what_changes_the_scores_may_not_change_on_the_way(tmp_path):
    behaviour = Failing(lambda n: Reply(b"", 422))
    behaviour.fails = lambda call: call > 2
    with local_service(behaviour) as local:
        with pytest.raises(RewardResponseError):
            train_policy(service_run(tmp_path, local.url))
        with pytest.raises(CheckpointError, match=r"rewards\.0\.weight: was 0\.1, now 0\.2"):
            changed = {"type": "http", "url": "http://127.0.0.1:1/", "weight": 0.2, "batch_size": 64}
            train_policy(tiny_run(tmp_path, rewards=[changed], resume=True, train__max_steps=3))


@pytest.mark.parametrize("key", ["rewards.0.url", "rewards.11.members.2.read_timeout"])
def test_where_and_how_a_service_is_asked_may_change(key):
    assert SERVICE_MAY_CHANGE.fullmatch(key)
    assert not SERVICE_MAY_CHANGE.fullmatch(key + "s")
    assert not SERVICE_MAY_CHANGE.fullmatch(key.rpartition(".")[0] + ".path")


def test_a_service_that_fails_in_the_first_update_does_not_cost_the_evaluation_before_it(tmp_path):
    held_out = {"data__eval_prompts": str(tmp_path / "prompts.jsonl")}
    with local_service(lengths) as local:
        straight = service_run(tmp_path, local.url, "straight", **held_out)
        train_policy(straight)
    behaviour = Failing(lambda n: Reply({"detail": "down"}, 422))
    behaviour.fails = lambda call: call == 3  # after the trial call and the evaluation
    with local_service(behaviour) as local:
        config = service_run(tmp_path, local.url, **held_out)
        with pytest.raises(RewardError, match=local.url) as caught:
            train_policy(config)
        assert caught.value.__notes__ == ["the state after 0 updates is saved; --resume continues from there"]
        assert (config.output_dir / "checkpoint-0" / "manifest.json").is_file()
        train_policy(service_run(tmp_path, local.url, resume=True, **held_out))
    assert reproducible(config.output_dir) == reproducible(straight.output_dir)
    assert_same_weights(weights(config.output_dir), weights(straight.output_dir))


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_no_failure_reaches_the_optimizer(tmp_path, failure):
    behaviour = Failing(failure)
    behaviour.fails = lambda call: call > 2
    with local_service(behaviour) as local:
        config = service_run(tmp_path, local.url)
        with pytest.raises(RewardError, match=local.url) as caught:
            train_policy(config)
    assert caught.value.__notes__ == ["the state after 1 update is saved; --resume continues from there"]
    assert [row["step"] for row in read_jsonl(config.output_dir / "metrics.jsonl")] == [1]
    assert (config.output_dir / "checkpoint-1" / "manifest.json").is_file()
    assert not (config.output_dir / "model.safetensors").exists()


def test_49_of_a_gigabyte_only_the_beginning_is_read(tmp_path):
    with local_service(in_turn(lengths({"responses": ["Hello."]}), Flood())) as local:
        with pytest.raises(RewardResponseError, match=rf"{local.url}.* returned more than 16 MiB; wanted JSON"):
            train_policy(service_run(tmp_path, local.url, read_timeout=20.0))
        assert 2**24 <= local.flooded < 2**26


def test_49_a_packed_answer_is_not_unpacked(tmp_path):
    """A kilobyte of it may be a megabyte."""
    bomb = Reply(gzip.compress(b'{"scores": [' + b" " * 2**22 + b"]}"), headers={"Content-Encoding": "gzip"})
    packed = r"http://.* \(status 200\) compressed its reply as gzip"
    with local_service(in_turn(lengths({"responses": ["Hello."]}), bomb)) as local:
        config = service_run(tmp_path, local.url)
        with pytest.raises(RewardResponseError, match=packed):
            train_policy(config)


@pytest.mark.parametrize("where", ["update", "evaluation"])
def test_50_a_signal_while_a_service_hangs_ends_the_run_at_once_with_its_state_saved(tmp_path, where):
    """Not when the service has had all its time, which may be more than the machine is left to the run."""
    behaviour = Failing(lambda n: Hang())
    behaviour.fails = lambda call: call > 3 and not behaviour.is_well
    behaviour.is_well = False
    held_out = {"data__eval_prompts": str(tmp_path / "prompts.jsonl"), "train__eval_steps": 2}
    with local_service(behaviour) as local:
        changes = held_out if where == "evaluation" else {}
        config = service_run(tmp_path, local.url, read_timeout=60.0, **changes)
        stopper = threading.Thread(target=stop_once, args=(local, 4))
        stopper.start()
        start = time.monotonic()
        assert train_policy(config).interrupted == "SIGTERM"
        stopper.join()
        assert time.monotonic() - start < 40
        behaviour.is_well = True
        train_policy(config.model_copy(update={"resume": True}))
    with local_service(lengths) as local:
        usual = service_run(tmp_path, local.url, "usual", **changes)
        train_policy(usual)
    assert reproducible(config.output_dir) == reproducible(usual.output_dir)
    assert_same_weights(weights(config.output_dir), weights(usual.output_dir))


SLOW = """
import os, signal, time
calls = 0
def letters(prompts, completions, **columns):
    global calls
    calls += len(completions) > 2  # it is tried on two answers
    if calls == 2 and os.environ.get("STOP") == "yes":
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except Exception:
            pass
    return [len(text) / 10 for text in completions]
"""


def test_50_a_signal_in_a_slow_reward_function_is_not_caught_by_it(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP", "yes")
    config, usual = (tiny_run(tmp_path, output_dir=str(tmp_path / name)) for name in ("out", "usual"))
    (tmp_path / "rewards.py").write_text(SLOW)
    start = time.monotonic()
    assert train_policy(config).interrupted == "SIGTERM"
    assert time.monotonic() - start < 40
    monkeypatch.setenv("STOP", "no")
    assert [row["step"] for row in train_policy(config.model_copy(update={"resume": True})).updates] == [2]
    train_policy(usual)
    assert reproducible(config.output_dir) == reproducible(usual.output_dir)


def stop_once(local, calls):
    """Sends SIGTERM to this process when the service has been asked so often."""
    while len(local.seen) < calls:
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


JUDGED = {
    "an error with a body": (Reply({"error": {"message": "model overloaded"}}, 500), "status 500 .*model overloaded"),
    "no reply": (Reply({"choices": []}), r"wanted JSON \{\"choices\""),
    "a reply that is no text": (says(7), r"gave no number from 1 to 10 for answer"),
    "NaN": (says("NaN"), "gave no number from 1 to 10 for answer .*'NaN'"),
    "a list": (says("[7]"), "gave no number from 1 to 10 for answer"),
    "a number in a sentence": (says("I would say 7 or 8"), "the last reply: 'I would say 7 or 8'"),
    "a hang": (Hang(), "no complete answer within read_timeout"),
    "a closed socket": (Close(), "the connection failed"),
    "a gigabyte": (Flood(), "returned more than 16 MiB"),
}


@pytest.mark.parametrize(("failure", "told"), JUDGED.values(), ids=JUDGED)
def test_49_no_failure_of_a_judge_reaches_the_optimizer(tmp_path, failure, told):
    asked = []

    def judge(payload):
        asked.append(payload)
        return says(str(len(asked) % 10 + 1)) if len(asked) <= 9 else failure  # a first try, and one update

    quick = {"connect_timeout": 1.0, "read_timeout": 4.0, "retries": 0, "attempts": 2, "max_concurrency": 2}
    if isinstance(failure, Hang):
        quick |= {"connect_timeout": 0.3, "read_timeout": 0.3}
    with local_service(judge) as local:
        rewards = [{"type": "judge", "base_url": local.url, "model": "m", "rubric": "{prompt} {response}", **quick}]
        config = tiny_run(tmp_path, rewards=rewards, ppo__num_ppo_epochs=1)
        with pytest.raises(RewardError, match=told) as caught:
            train_policy(config)
    assert local.url in str(caught.value)
    assert caught.value.__notes__ == ["the state after 1 update is saved; --resume continues from there"]
    assert [row["step"] for row in read_jsonl(config.output_dir / "metrics.jsonl")] == [1]


def test_50_a_failure_that_passes_changes_nothing(tmp_path, straight):
    behaviour = Failing(lambda n: Reply(b"", 503))
    behaviour.fails = lambda call: call % 2 == 0
    with local_service(behaviour) as local:
        config = service_run(tmp_path, local.url)
        train_policy(config)
    assert reproducible(config.output_dir) == reproducible(straight)


def test_49_a_failure_in_an_evaluation_saves_the_update_before_it(tmp_path):
    behaviour = Failing(lambda n: Reply({"scores": []}))
    behaviour.fails = lambda call: call == 4  # a first try, an evaluation, an update, and the evaluation after it
    changes = {"data__eval_prompts": str(tmp_path / "prompts.jsonl"), "train__eval_steps": 1, "train__max_steps": 2}
    with local_service(behaviour) as local:
        config = service_run(tmp_path, local.url, **changes)
        with pytest.raises(RewardResponseError):
            train_policy(config)
        train_policy(service_run(tmp_path, local.url, resume=True, **changes))
    rows = read_jsonl(config.output_dir / "metrics.jsonl")
    written = [f"evaluation {row['step']}" if "eval_scores" in row else f"update {row['step']}" for row in rows]
    assert written == ["evaluation 0", "update 1", "evaluation 1", "update 2", "evaluation 2"]


def test_one_answer_that_a_judge_refuses_ends_the_run_unless_it_counts_what_is_missing(tmp_path):
    """Sampling is keyed, so that the answer would be refused again however often the run goes on."""
    train_policy(tiny_run(tmp_path, train__max_steps=1))
    refused = max({row["response"] for row in read_jsonl(tmp_path / "out" / "samples.jsonl")}, key=len)

    def grade(payload):
        is_refused = payload["messages"][0]["content"] == refused
        return Reply({"error": {"code": "content_filter"}}, 400) if is_refused else says("5")

    with local_service(grade) as local:
        judge = {"type": "judge", "base_url": local.url, "model": "grader", "rubric": "{response}", "name": "grade"}
        changes = {"train__max_steps": 1, "overwrite_output_dir": True}
        with pytest.raises(RewardResponseError, match=r"status 400 and .*content_filter"):
            train_policy(tiny_run(tmp_path, rewards=[judge], **changes))
        result = train_policy(tiny_run(tmp_path, rewards=[judge | {"missing": 1.0}], **changes))
    (update,) = result.updates
    assert update["rewards/grade/missing"] * 8 == 1
    assert update["rewards/grade"] * 8 == 7 * 5 + 1


def test_a_service_that_does_not_work_is_told_before_a_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.train.build.build_parts", None)  # what would load models
    with local_service(lambda payload: Reply({"error": "columns: no answer"}, 400)) as local:
        config = service_run(tmp_path, local.url)
        with pytest.raises(ConfigError, match=r"rewards\.0: the service failed to score a test answer: .*no answer"):
            train_policy(config)
    assert not config.output_dir.exists()
    assert local.seen == [{"prompts": ["the cat sees"], "responses": ["Hello."], "columns": {}}]


def test_a_failure_before_the_first_update_leaves_nothing_to_go_on_from(tmp_path):
    behaviour = Failing(lambda n: Reply(b"", 422))
    behaviour.fails = lambda call: call > 1
    with local_service(behaviour) as local:
        config = service_run(tmp_path, local.url)
        with pytest.raises(RewardResponseError) as caught:
            train_policy(config)
        assert not hasattr(caught.value, "__notes__")
        assert list(config.output_dir.glob("checkpoint-*")) == []
    train_policy(tiny_run(tmp_path, train__max_steps=1, overwrite_output_dir=True))


def test_a_saved_policy_is_evaluated_by_the_service_too(tmp_path):
    with local_service(lengths) as local:
        config = service_run(tmp_path, local.url, train__max_steps=1)
        train_policy(config)
        result = evaluate_path(config.output_dir, str(tmp_path / "prompts.jsonl"))
        assert [row["rewards"]["http"] for row in result.samples] == [len(row["response"]) for row in result.samples]
    with pytest.raises(ConfigError, match=r"rewards\.0: .*the connection failed"):
        evaluate_path(config.output_dir, str(tmp_path / "prompts.jsonl"))
