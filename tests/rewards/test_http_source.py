"""Scoring services: what they are sent, and that nothing but one finite number an answer is ever taken for scores."""

import logging
import math
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import date

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.rewards.batches import chat_batch, text_batch
from tests.rewards.services import Close, Hang, Reply, Trickle, in_turn, lengths, local_service
from tests.tiny import tiny_tokenizer
from tether.config.rewards import RewardConfig
from tether.errors import ConfigError, RewardError, RewardResponseError, RewardTimeout
from tether.rewards import service
from tether.rewards.build import check_reward_columns, check_rewards, try_sources
from tether.rewards.http import http_source

BATCH = text_batch("a", "bb", "ccc")
SCORES = Reply({"scores": [1, 2.5, -3]})


def config(url, **keys):
    quick = {"connect_timeout": 0.5, "read_timeout": 0.5, "retries": 2, "retry_delay": 0.01}
    return TypeAdapter(RewardConfig).validate_python({"type": "http", "url": url, **quick, **keys})


def source(url, **keys):
    return http_source(config(url, **keys), "judge", "rewards.0", tiny_tokenizer())


def test_a_request_holds_prompts_responses_and_columns_as_the_dataset_had_them():
    messages = [{"role": "user", "content": "hi"}]
    batch = text_batch("yes", "no", prompts=["is it?", messages], answer=["yes", None], weight=[1, {"a": [0.5]}])
    with local_service(lengths) as local:
        assert source(local.url).score(batch).scores == [3.0, 2.0]
    assert local.seen == [
        {
            "prompts": ["is it?", messages],
            "responses": ["yes", "no"],
            "columns": {"answer": ["yes", None], "weight": [1, {"a": [0.5]}]},
        }
    ]
    assert local.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in local.headers[0]


def test_a_request_of_llamafactorys_protocol_holds_whole_texts_with_special_tokens():
    batch = chat_batch(tiny_tokenizer(), [("the cat", "sees"), ("a dog", "runs")])
    with local_service(in_turn(Reply({"id": "score-1", "model": "rm", "scores": [0.5, -1]}))) as local:
        assert source(local.url, protocol="llamafactory").score(batch).scores == [0.5, -1.0]
    assert local.seen == [
        {
            "model": "model",
            "messages": ["<user> the cat <eos> <assistant> sees <eos>", "<user> a dog <eos> <assistant> runs <eos>"],
        }
    ]


def test_a_request_of_openrlhfs_protocol_holds_prompts_alone_and_with_their_answers_and_a_column():
    batch = chat_batch(tiny_tokenizer(), [("the cat", "sees"), ("a dog", "runs")])
    batch = replace(batch, columns={"gold": ["yes", 2], "other": [1, 2]})
    theirs = {"rewards": [0.5, -1], "scores": [1, 0], "extra_logs": {}}
    with local_service(in_turn(Reply(theirs), Reply(theirs), Reply({"scores": [1, 2]}))) as local:
        assert source(local.url, protocol="openrlhf", columns=["gold"]).score(batch).scores == [0.5, -1.0]
        assert source(local.url, protocol="openrlhf").score(batch).scores == [0.5, -1.0]
        with pytest.raises(RewardResponseError, match=r'the keys scores; wanted JSON \{"rewards": \[\.\.\.\]\}'):
            source(local.url, protocol="openrlhf").score(batch)
    prompts = ["<user> the cat <eos> <assistant>", "<user> a dog <eos> <assistant>"]
    asked = {"query": [f"{prompts[0]} sees <eos>", f"{prompts[1]} runs <eos>"], "prompts": batch.queries}
    assert local.seen[:2] == [asked | {"labels": ["yes", 2]}, asked | {"labels": ["", ""]}]
    assert [query.strip() for query in batch.queries] == prompts
    with pytest.raises(ValidationError, match="columns: got 2; protocol openrlhf sends one of them, as labels"):
        config(local.url, protocol="openrlhf", columns=["gold", "other"])


def test_only_the_columns_that_are_named_are_sent():
    batch = text_batch("yes", answer=["yes"], when=[date(2020, 1, 1)])
    with local_service(lengths) as local:
        source(local.url, columns=["answer"]).score(batch)
        with pytest.raises(RewardError, match=r"column when of answer 0 of 1 .* not JSON serializable.*`columns`"):
            source(local.url).score(batch)
        with pytest.raises(RewardError, match=r"column weight of answer 1 of 2 .* not JSON compliant"):
            source(local.url).score(text_batch("a", "b", weight=[1.0, math.nan]))
    assert [payload["columns"] for payload in local.seen] == [{"answer": ["yes"]}]


def test_text_that_is_no_unicode_is_sent_as_json_escapes():
    with local_service(lengths) as local:
        assert source(local.url).score(text_batch("\ud800\u2028")).scores == [2.0]


def test_batches_are_put_together_in_order_with_their_components_and_not_too_many_at_once():
    all_at_work = threading.Barrier(3)

    def slow(payload):
        if len(payload["responses"][0]) in (1, 4, 7):
            all_at_work.wait(10)
        time.sleep(0.05 if payload["responses"][0] == "a" else 0.0)  # the first batch comes back last
        sizes = [len(text) for text in payload["responses"]]
        return Reply({"scores": sizes, "components": {"half": [size / 2 for size in sizes]}})

    batch = text_batch(*("a" * n for n in range(1, 24)))
    with local_service(slow) as local:
        output = source(local.url, batch_size=3, max_concurrency=3).score(batch)
    assert output.scores == [float(n) for n in range(1, 24)]
    assert output.components == {"half": [n / 2 for n in range(1, 24)]}
    assert [len(payload["responses"]) for payload in local.seen].count(3) == 7
    assert len(local.seen) == 8
    assert local.most_at_work == 3


WRONG = {
    "too few": (Reply({"scores": [1, 2]}), r"returned 2 scores for 3 answers; wanted one per answer"),
    "too many": (Reply({"scores": [1, 2, 3, 4]}), r"returned 4 scores for 3 answers"),
    "NaN": (Reply(b'{"scores": [1, NaN, 3]}'), r"returned nan \(float\) for answer 1 of 3 .* wanted one finite"),
    "infinite": (Reply(b'{"scores": [1, 2, -Infinity]}'), r"returned -inf \(float\) for answer 2 of 3"),
    "null": (Reply({"scores": [1, None, 3]}), r"returned None for answer 1 of 3 .*, or set rewards\.0\.missing to"),
    "text": (Reply({"scores": ["1", "2", "3"]}), r"returned '1' \(str\) for answer 0 of 3"),
    "nested": (Reply({"scores": [[1], [2], [3]]}), r"returned \[1\] \(list\) for answer 0 of 3"),
    "one list too many": (Reply({"scores": [[1, 2, 3]]}), r"returned 1 score for 3 answers"),
    "a number": (Reply({"scores": 1.0}), r"returned 1.0 \(float\); wanted a list of 3 numbers"),
    "an object": (Reply({"scores": {"0": 1, "1": 2, "2": 3}}), r"returned \{.*\} \(dict\); wanted a list of 3 numbers"),
    "huge": (Reply({"scores": [1, 1e30, 3]}), r"returned 1e\+30 for answer 1 of 3"),
    "no scores": (Reply({"score": [1, 2, 3]}), r"returned JSON with the keys score; wanted JSON \{\"scores\""),
    "a list": (Reply([1, 2, 3]), r"returned JSON with list; wanted JSON \{\"scores\""),
    "components": (Reply({"scores": [1, 2, 3], "components": [1]}), r"returned components of type list"),
    "a component": (
        Reply({"scores": [1, 2, 3], "components": {"a": [1]}}),
        r"component a, returned 1 score for 3 answers",
    ),
    "no JSON": (Reply(b"<html>Bad gateway</html>"), r"not return JSON \(JSONDecodeError.*'<html>Bad gateway</html>'"),
    "scores twice": (
        Reply(b'{"scores": [1, 2, 3], "scores": [4, 5, 6]}'),
        r"\(status 200\) returned JSON that has 'scores' several times in one object; wanted each name once$",
    ),
    "a component twice": (
        Reply(b'{"scores": [1, 2, 3], "components": {"a": [1, 2, 3], "a": [1, 2, 3]}}'),
        r"returned JSON that has 'a' several times in one object",
    ),
    "half JSON": (Reply(b'{"scores": [1, 2'), r"did not return JSON .*'\{\"scores\": \[1, 2'"),
    "nothing": (Reply(b""), r"did not return JSON .* an empty body"),
    "deep JSON": (Reply(b"[" * 100_000), r"did not return JSON \(RecursionError"),
    "a number of many digits": (Reply(b'{"scores": [' + b"9" * 10_000 + b"]}"), r"did not return JSON \(ValueError"),
    "no UTF-8": (Reply(b'{"scores": [1, 2, 3], "note": "\xff"}'), r"did not return JSON \(UnicodeDecodeError"),
    "false gzip": (Reply(b"no gzip", headers={"Content-Encoding": "gzip"}), "compressed its reply as gzip"),
}


@pytest.mark.parametrize(("reply", "message"), WRONG.values(), ids=WRONG)
def test_an_answer_that_is_not_one_finite_number_an_answer_is_an_error_at_once(reply, message):
    with local_service(in_turn(reply, SCORES)) as local, pytest.raises(RewardError, match=message) as caught:
        source(local.url).score(BATCH)
    assert len(local.seen) == 1
    assert str(caught.value).startswith("reward judge: ")
    assert local.url in str(caught.value)


def test_an_answer_that_is_too_long_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(service, "LARGEST_BODY", 2**20)
    with (
        local_service(in_turn(Reply(b" " * 2**23), SCORES)) as local,
        pytest.raises(RewardResponseError, match=r"returned more than 1 MiB; wanted JSON"),
    ):
        source(local.url).score(BATCH)


@pytest.mark.parametrize("status", [201, 204, 301, 307, 400, 401, 403, 404, 408, 422])
def test_a_status_that_is_neither_success_nor_for_another_try_is_an_error_at_once(status):
    headers = {"Location": "http://127.0.0.1:1/elsewhere"} if status // 100 == 3 else {}
    reply = Reply(b"" if status == 204 else {"scores": [1, 2, 3]}, status, headers)
    with (
        local_service(in_turn(reply, SCORES)) as local,
        pytest.raises(RewardResponseError, match=rf"POST {local.url}: got status {status}.*wanted status 200 and"),
    ):
        source(local.url).score(BATCH)
    assert len(local.seen) == 1


def test_a_redirect_is_not_followed():
    with local_service(lengths) as there:
        redirect = Reply(b"", 308, {"Location": there.url})
        message = rf"got status 308, a redirect to {there.url}, and an empty"
        with local_service(in_turn(redirect)) as local, pytest.raises(RewardResponseError, match=message):
            source(local.url).score(BATCH)
    assert there.seen == []


PASSING = {
    "500 with scores": (Reply({"scores": [9, 9, 9]}, 500), RewardResponseError, r"got status 500 and '\{\"scores\""),
    "503": (Reply(b"busy", 503), RewardResponseError, r"got status 503 and 'busy'; wanted status 200"),
    "429": (Reply({"error": "slow down"}, 429), RewardResponseError, r"got status 429 and"),
    "a closed socket": (Close(), RewardError, r"the connection failed: RemoteProtocolError"),
    "a hang": (Hang(), RewardTimeout, r"no complete answer within read_timeout, 0.1 s"),
    "an endless answer": (Trickle(), RewardTimeout, r"no complete answer within read_timeout, 0.1 s"),
}


@pytest.mark.parametrize(("reply", "error", "message"), PASSING.values(), ids=PASSING)
def test_what_may_pass_is_tried_again_and_for_good_it_is_an_error(reply, error, message):
    # only what takes too long needs a short time, and only where nothing has to come within it a very short one
    short, shortest = (0.5, 0.1) if error is RewardTimeout else (5, 5)
    with local_service(in_turn(reply, reply, SCORES)) as local:
        assert source(local.url, read_timeout=short, connect_timeout=short).score(BATCH).scores == [1.0, 2.5, -3.0]
        assert local.num_seen(3) == 3
    with local_service(in_turn(reply)) as local:
        with pytest.raises(error, match=rf"reward judge: POST {local.url}, tried 3 times: .*{message}"):
            source(local.url, read_timeout=shortest, connect_timeout=short).score(BATCH)
        assert local.num_seen(3) == 3


def test_without_retries_there_is_one_try():
    with (
        local_service(in_turn(Close(), SCORES)) as local,
        pytest.raises(RewardError, match=rf"reward judge: POST {local.url}: the connection failed: Remote"),
    ):
        source(local.url, retries=0).score(BATCH)
    assert len(local.seen) == 1


def test_a_service_that_is_not_there_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
        with pytest.raises(RewardError, match=rf"POST {url}, tried 3 times: the connection failed: ConnectError"):
            source(url).score(BATCH)


def test_a_host_that_takes_no_connection_is_an_error_within_connect_timeout():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]  # nobody accepts: the queue is full, further ones get no answer
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        start = time.monotonic()
        with pytest.raises(RewardTimeout, match=r"no connection within connect_timeout, 0.1 s"):
            source(f"http://127.0.0.1:{address[1]}/", connect_timeout=0.1, retries=1).score(BATCH)
        assert time.monotonic() - start < 1.5
        for each in waiting:
            each.close()


def test_a_source_ends_in_bounded_time_and_gives_its_other_requests_up():
    start = time.monotonic()
    with local_service(lambda payload: Hang()) as local, pytest.raises(RewardTimeout):
        source(local.url, batch_size=1, max_concurrency=2, read_timeout=0.1, retries=1).score(
            text_batch(*("a" * n for n in range(1, 200)))
        )
    assert time.monotonic() - start < 1.5
    assert len(local.seen) <= 4


def test_delays_between_tries_double_up_to_a_limit_and_follow_the_service(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(service.asyncio, "sleep", sleep)
    later = Reply(b"", 503, {"Retry-After": "7"})
    never = Reply(b"", 429, {"Retry-After": "100000"})
    dated = Reply(b"", 429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
    replies = [Reply(b"", 500), Reply(b"", 500), later, Reply(b"", 500), never, dated, Reply(b"", 500), SCORES]
    with local_service(in_turn(*replies)) as local:
        source(local.url, retries=7, retry_delay=1.0).score(BATCH)
    assert slept == [1.0, 2.0, 7.0, 8.0, 30.0, 30.0, 30.0]


def test_answers_in_a_message_are_those_of_the_whole_batch():
    with (
        local_service(in_turn(Reply({"scores": [1, 2]}), Reply({"scores": [1]}))) as local,
        pytest.raises(RewardResponseError, match=r"\(status 200\), asked for answers 2 to 3, returned 1 score for"),
    ):
        source(local.url, batch_size=2, max_concurrency=1).score(text_batch("a", "b", "c", "d"))
    reply = Reply({"scores": [1, 2], "components": {"half": [1]}})
    with (
        local_service(in_turn(reply)) as local,
        pytest.raises(
            RewardResponseError, match=r"\(status 200\), component half, asked for answers 0 to 1, returned 1 score for"
        ),
    ):
        source(local.url, batch_size=2, max_concurrency=1).score(text_batch("a", "b", "c", "d"))


def test_components_that_change_between_requests_are_an_error():
    replies = Reply({"scores": [1], "components": {"a": [1]}}), Reply({"scores": [1]})
    with (
        local_service(in_turn(*replies)) as local,
        pytest.raises(RewardResponseError, match=r"the components none for answers 1 to 1 and a for answers 0"),
    ):
        source(local.url, batch_size=1, max_concurrency=1).score(text_batch("a", "b"))


def test_null_counts_what_is_missing_where_that_is_set(caplog):
    reply = Reply({"scores": [1, None, [[1, 2.0]]], "components": {"half": [0.5, None, 1]}})
    with local_service(in_turn(reply)) as local:
        output = source(local.url, missing=-1).score(text_batch("a", "b", "c"))
    assert output.scores == [1.0, -1.0, 2.0]
    assert output.components == {"half": [0.5, -1.0, 1.0], "missing": [0.0, 1.0, 0.0]}
    assert len(caplog.messages) == 1 and "returned None for answer 1 of 3" in caplog.text
    taken = Reply({"scores": [1], "components": {"missing": [0]}})
    for reply in (Reply({"scores": [None]}, 400), Reply({"scores": ["x"]}), taken):
        with local_service(in_turn(reply)) as local, pytest.raises(RewardResponseError):
            source(local.url, missing=-1).score(text_batch("a"))


def test_components_are_known_by_their_names_in_any_order():
    replies = [{"scores": [1], "components": {"a": [2], "b": [3]}}, {"scores": [4], "components": {"b": [6], "a": [5]}}]
    with local_service(in_turn(*map(Reply, replies))) as local:
        output = source(local.url, batch_size=1, max_concurrency=1).score(text_batch("a", "b"))
    assert (output.scores, output.components) == ([1.0, 4.0], {"a": [2.0, 5.0], "b": [3.0, 6.0]})


class TestProxy:
    """Of the environment."""

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    @pytest.fixture
    def nobody(self):
        with socket.socket() as taken:  # bound, and nobody listens
            taken.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{taken.getsockname()[1]}"

    def test_is_not_asked_for_this_machine(self, monkeypatch, nobody):
        monkeypatch.setenv("http_proxy", f"http://{nobody}")
        with local_service(lengths) as local:
            for host in ("127.0.0.1", "localhost"):
                assert source(local.url.replace("127.0.0.1", host)).score(BATCH).scores == [1.0, 2.0, 3.0]
        monkeypatch.setenv("ALL_PROXY", "socks5://it")
        with local_service(lengths) as local:
            assert source(local.url).score(BATCH).scores == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
    def test_that_fails_is_named(self, monkeypatch, nobody, name):
        monkeypatch.setenv(name, f"http://me:s3cret@{nobody}")
        told = rf"POST http://judge\.invalid/ through the proxy of {name}: the connection failed"
        with pytest.raises(RewardError, match=told) as caught:
            source("http://judge.invalid/", retries=0).score(BATCH)
        assert "s3cret" not in str(caught.value)

    def test_that_does_not_apply_is_not_named(self, monkeypatch, nobody):
        monkeypatch.setenv("http_proxy", f"http://{nobody}")
        monkeypatch.setenv("no_proxy", "judge.invalid")
        with pytest.raises(RewardError, match=r"POST http://judge\.invalid/: the connection failed"):
            source("http://judge.invalid/", retries=0, connect_timeout=5).score(BATCH)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("socks5://me:s3cret@host:1", r"the proxy of ALL_PROXY cannot be used: a SOCKS proxy needs .*socksio"),
            ("ftp://me:s3cret@host:1", r"the proxy of ALL_PROXY cannot be used: its address is invalid"),
            ("http://me:s3cret@host:x", r"the proxy of ALL_PROXY cannot be used: its address is invalid"),
        ],
    )
    def test_that_cannot_be_used_is_told(self, monkeypatch, value, message):
        monkeypatch.setenv("ALL_PROXY", value)
        monkeypatch.setitem(sys.modules, "socksio", None)
        with pytest.raises(RewardError, match=message) as caught:
            source("http://judge.invalid/").score(BATCH)
        assert "s3cret" not in str(caught.value) and caught.value.__cause__ is caught.value.__context__ is None


def test_what_an_address_holds_beside_host_and_path_is_in_no_message():
    replies = [Reply({}), Reply(b"?"), Reply({"scores": [math.nan] * 3}), Reply({}, 404), Reply({"scores": []})]
    replies.append(Reply({}, 308, {"Location": "https://me:s3cret@host/there?key=s3cret"}))
    replies.append(Reply({}, headers={"Content-Encoding": "br"}))
    with local_service(in_turn(*replies)) as local:
        judge = source(f"{local.url}?key=s3cret")
        for _ in replies:
            with pytest.raises(RewardError, match=r"http://127\.0\.0\.1:\d+/score\?…") as caught:
                judge.score(BATCH)
            assert "s3cret" not in str(caught.value)
    assert all(path.endswith("?key=s3cret") for path in local.paths) and len(local.paths) == len(replies)


class TestKey:
    @pytest.fixture(autouse=True)
    def key(self, monkeypatch):
        monkeypatch.setenv("JUDGE_KEY", "s3cret-key")

    def test_is_sent_as_a_bearer_token(self):
        with local_service(lengths) as local:
            source(local.url, api_key_env="JUDGE_KEY").score(BATCH)
        assert local.headers[0]["Authorization"] == "Bearer s3cret-key"

    def test_is_in_no_message_log_or_representation(self, caplog):
        caplog.set_level(logging.DEBUG)
        reply = Reply({"error": "no such key: s3cret-key"}, 401)
        with local_service(in_turn(reply, Reply(b"s3cret-key"))) as local:
            judge = source(local.url, api_key_env="JUDGE_KEY")
            for _ in range(2):
                with pytest.raises(RewardResponseError, match="…") as caught:
                    judge.score(BATCH)
                assert "s3cret" not in str(caught.value)
        assert "s3cret" not in caplog.text + repr(judge.service) + config(local.url, api_key_env="JUDGE_KEY").__repr__()

    @pytest.mark.parametrize(
        "reply",
        [
            {"scores": [1, "no access with s3cret-key, or with any other"]},
            {"scores": "s3cret-key"},
            {"scores": [1, [["s3cret-key", 1]]]},
            {"s3cret-key": 1},
            {"scores": [1, 2], "components": {"s3cret-key": [1, "s3cret-key"]}},
        ],
    )
    def test_is_in_no_message_about_scores(self, reply):
        with local_service(lambda payload: Reply(reply)) as local, pytest.raises(RewardResponseError) as caught:
            source(local.url, api_key_env="JUDGE_KEY").score(text_batch("a", "bb"))
        assert "…" in str(caught.value) and "s3cret" not in str(caught.value)

    def test_is_in_no_name_of_a_component(self):
        reply = {"scores": [1, 2], "components": {"of s3cret-key": [3, 4]}}
        with local_service(lambda payload: Reply(reply)) as local:
            output = source(local.url, api_key_env="JUDGE_KEY").score(text_batch("a", "bb"))
        assert output.components == {"of …": [3.0, 4.0]}

    @pytest.mark.parametrize("value", ["", "two words", "s3cret\n", "schlüssel"])
    def test_that_is_missing_or_no_key_is_told_before_a_model_loads(self, monkeypatch, value):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(ConfigError, match=r"rewards\.0\.api_key_env: .*JUDGE_KEY") as caught:
            check_rewards([config("http://127.0.0.1:1/", api_key_env="JUDGE_KEY")])
        assert not value or value.strip() not in str(caught.value)


def test_columns_to_send_must_be_there():
    wanted = config("http://127.0.0.1:1/", columns=["answer", "source"])
    check_rewards([wanted])
    check_reward_columns([wanted], ["source", "answer", "more"])
    with pytest.raises(ConfigError, match=r"rewards\.0\.columns: the dataset has no column answer; .* are source"):
        check_reward_columns([wanted], ["source"])


def test_a_first_request_tells_whether_a_service_works():
    with local_service(in_turn(SCORES, Reply(b"no such page", 404))) as local:
        configs = [config(local.url, name="one"), config(local.url, name="other")]
        with pytest.raises(ConfigError, match=r"rewards\.1: the service failed to score .*: reward other: .*404"):
            try_sources(configs, ["one", "other"], BATCH, tiny_tokenizer())
    assert len(local.seen) == 2
