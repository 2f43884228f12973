"""Services and async functions are asked about answers while others are still being written."""

import threading

import pytest
from pydantic import TypeAdapter

from tests.rewards.batches import text_batch
from tests.rewards.services import Hang, Reply, lengths, local_service
from tests.tiny import EOS
from tests.train.runs import tiny_run
from tests.train.trainers import trainer_of
from tether.config.rewards import RewardConfig
from tether.errors import RewardError, RewardResponseError
from tether.metrics.reduce import Metrics
from tether.rewards.combine import Part, WeightedSum
from tether.rewards.early import joined
from tether.rewards.ensemble import Ensemble
from tether.rewards.function import FunctionSource
from tether.rewards.http import http_source
from tether.rewards.judge import judge_source
from tether.rewards.service import Session
from tether.train.interrupt import Stopped
from tether.train.rollout import raw_scores
from tether.types import Completion, RewardOutput

ORDER = (5, 0, 3, 7, 1, 2, 6, 4)
LENGTHS = [len(" ".join(["cat"] * (1 + i))) for i in range(8)]
QUICK = {"connect_timeout": 5, "read_timeout": 5, "retries": 0}


class Waits:
    """Finishes the answers in ``ORDER``, and after five of them waits for an event that only a scorer can set.

    Args:
        asked: the event.
    """

    batch_size = 16

    def __init__(self, asked):
        self.asked, self.finished = asked, 0

    def generate(self, requests, sampling):
        for self.finished, i in enumerate(ORDER, start=1):
            yield i, Completion([20] * (1 + i) + [EOS], "stop")
            if self.finished == 5:
                assert self.asked.wait(20), "no reward source was asked while answers were still being written"

    def sync_weights(self, policy):
        pass

    def close(self):
        pass


def http(url, **keys):
    config = TypeAdapter(RewardConfig).validate_python({"type": "http", "url": url, "batch_size": 2, **QUICK, **keys})
    return http_source(config, "judge", "rewards.0", None)


def grader(url):
    rubric = "{prompt}|{response}"
    section = {"type": "judge", "base_url": url, "model": "m", "rubric": rubric, "scale": [0, 99], **QUICK}
    return judge_source(TypeAdapter(RewardConfig).validate_python(section), "grade", "rewards.0")


def graded(payload):
    response = payload["messages"][0]["content"].split("|")[1]
    return Reply({"choices": [{"message": {"content": str(len(response))}}]})


def trainer(tmp_path, source, asked, **changes):
    return trainer_of(tiny_run(tmp_path, sampling__response_length=9, **changes), source, Waits(asked), stop_ids=[EOS])


@pytest.mark.parametrize("kind", ["http", "judge", "function", "sum of both", "ensemble"])
def test_sources_are_asked_while_answers_are_still_being_written(tmp_path, kind):
    asked, over = threading.Event(), threading.Event()

    def slow(payload):
        asked.set()
        assert over.wait(20), "the rollout waited for the service"
        return graded(payload) if "messages" in payload else lengths(payload)

    async def function(prompts, completions):
        asked.set()
        return [float(len(text)) for text in completions]

    with local_service(slow) as local:
        service = http(local.url)
        source = {
            "http": service,
            "judge": grader(local.url),
            "function": FunctionSource(function, "f"),
            "sum of both": WeightedSum([Part("a", 0.5, service), Part("b", 0.5, FunctionSource(function, "f"))]),
            "ensemble": Ensemble([Part("a", 1.0, service), Part("b", 1.0, grader(local.url))], min, "least"),
        }[kind]
        made = trainer(tmp_path, source, asked)
        if kind == "function":
            made.parts.generator.asked.set()  # eight answers are no group: it is called at their end
        answers = made.rollout(Metrics(), ask=True)
        over.set()
        assert raw_scores(made.parts, answers)[0].tolist() == LENGTHS
        assert source.score(answers.reward_batch(made.parts.tokenizer)).scores == LENGTHS


def test_an_async_function_is_called_for_groups_of_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("tether.rewards.function.GROUP", 3)
    asked, calls = threading.Event(), []

    async def function(prompts, completions):
        calls.append((made.parts.generator.finished, len(completions)))
        asked.set()
        return [float(len(text)) for text in completions]

    made = trainer(tmp_path, FunctionSource(function, "f"), asked)
    answers = made.rollout(Metrics(), ask=True)
    assert raw_scores(made.parts, answers)[0].tolist() == LENGTHS
    assert sorted(count for _, count in calls) == [2, 3, 3] and min(calls)[0] <= 5


def test_an_update_asks_early_and_a_rollout_by_hand_does_not(tmp_path):
    asked = threading.Event()

    def told(payload):
        asked.set()
        return lengths(payload)

    with local_service(told) as local:
        made = trainer(tmp_path, http(local.url), asked)
        metrics = made.step()
        assert metrics["objective/scores"] == sum(LENGTHS) / 8
        assert sorted(len(text) for payload in local.seen for text in payload["responses"]) == LENGTHS
        made.rollout(Metrics())
        assert len(local.seen) == 4


def test_a_failure_is_raised_when_scores_are_wanted_and_nothing_more_is_asked(tmp_path):
    asked = threading.Event()

    def broken(payload):
        threading.Timer(0.05, asked.set).start()
        return Reply({"scores": [1.0, "good"]})

    with local_service(broken) as local:
        made = trainer(tmp_path, WeightedSum([Part("judge", 1.0, http(local.url, max_concurrency=1))]), asked)
        answers = made.rollout(Metrics(), ask=True)
        with pytest.raises(RewardResponseError, match=r"asked for answers 0, 5, returned 'good' \(str\) for answer 1"):
            made.score(answers, Metrics())
        assert len(local.seen) < 4
    assert (made.config.output_dir / "bad_batches.jsonl").exists()


def test_a_function_that_fails_is_told_with_its_answer(tmp_path):
    asked = threading.Event()
    asked.set()

    async def function(prompts, completions):
        if any(len(text) == LENGTHS[3] for text in completions):
            raise KeyError("three")
        return [0.0] * len(completions)

    made = trainer(tmp_path, FunctionSource(function, "f"), asked)
    with pytest.raises(RewardError, match=r"raised KeyError: 'three' \(answer 3 of 8, counted from 0, also fails"):
        raw_scores(made.parts, made.rollout(Metrics(), ask=True))


def test_what_is_under_way_is_given_up_when_the_rollout_is_stopped(tmp_path, monkeypatch):
    asked = threading.Event()

    def hangs(payload):
        asked.set()
        return Hang()

    with local_service(hangs) as local:
        made = trainer(tmp_path, http(local.url), asked)
        closed, close = [], Session.close
        monkeypatch.setattr(Session, "close", lambda self: (close(self), closed.append(self)))

        def check():
            if made.parts.generator.finished == 7:
                raise Stopped("enough")

        monkeypatch.setattr(made.stop, "check", check)
        with pytest.raises(Stopped):
            made.rollout(Metrics(), ask=True)
        assert len(closed) == 1 and 0 < len(local.seen) < 4


def test_groups_of_answers_have_the_same_components():
    batch = text_batch("a", "b", "c")
    first, second = RewardOutput([1.0, 2.0], {"depth": [0.1, 0.2]}), RewardOutput([3.0], {"depth": [0.3]})
    whole = joined([([0, 2], first), ([1], second)], batch)
    assert whole.scores == [1.0, 3.0, 2.0] and whole.components == {"depth": [0.1, 0.3, 0.2]}
    for other, told in ({}, "none"), ({"depth": [0.3], "length": [1.0]}, "depth, length"):
        message = rf"^judge returned the components {told} for answers 1 to 1 and depth for answers 0, 2; wanted"
        with pytest.raises(RewardResponseError, match=message):
            joined([([0, 2], first), ([1], RewardOutput([3.0], other))], batch, "judge")
