"""Sources as a service: what a request must be, and that no request stops it."""

import http.client
import json
import socket
import threading
import time

import pytest

from tether.errors import ConfigError, DataError, RewardError, RewardTimeout
from tether.rewards import server
from tether.rewards.server import Asked, RewardServer, asked

PAIR = {"prompts": ["a", "b"], "responses": ["x", "yy"]}


def by_length(request):
    sizes = [float(len(text)) for text in request.responses]
    return {"scores": sizes, "components": {"half": [size / 2 for size in sizes]}}


class Running:
    """A server in a thread, and requests to it."""

    def __init__(self, score):
        self.server = RewardServer("127.0.0.1", 0)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.server.run, args=[score, self.over.is_set])
        self.thread.start()
        while not self.server.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            time.sleep(0.01)

    def stop(self):
        self.over.set()
        self.thread.join()

    def connection(self):
        host, port = self.server.server_address
        return http.client.HTTPConnection(host, port, timeout=5)

    def ask(self, payload, *, path="/score", method="POST", **headers):
        connection = self.connection()
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
        reply = connection.getresponse()
        content = json.loads(reply.read())
        connection.close()
        return reply.status, content


@pytest.fixture
def serve():
    started = []

    def start(score):
        started.append(Running(score))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def test_scores_and_components_come_back(serve):
    running = serve(by_length)
    assert running.ask(PAIR) == (200, {"scores": [1.0, 2.0], "components": {"half": [0.5, 1.0]}})
    assert running.ask({"prompts": [], "responses": []}) == (200, {"scores": [], "components": {}})


def test_numbers_come_back_exactly(serve):
    numbers = [0.1, 1 / 3, -2.5e-300, 123456789.123456789, -0.0]
    running = serve(lambda request: {"scores": numbers})
    scores = running.ask({"prompts": ["p"] * 5, "responses": ["r"] * 5})[1]["scores"]
    assert [score.hex() for score in scores] == [number.hex() for number in numbers]


def test_what_is_asked():
    messages = [{"role": "user", "content": "hi", "name": None}]
    body = {"prompts": ["p", messages, ""], "responses": ["", "r", "whole"], "columns": {"x": [1, None, {"a": []}]}}
    assert asked(json.dumps(body).encode()) == Asked(
        ["p", [{"role": "user", "content": "hi"}], None], ["", "r", "whole"], {"x": [1, None, {"a": []}]}
    )


NO_REQUESTS = {
    "no JSON": (b"prompts=a", r"the body is not JSON: Expecting value"),
    "deep JSON": (b"[" * 100_000, r"the body is not JSON: maximum recursion"),
    "no UTF-8": (b'{"prompts": ["\xff"]}', r"the body is not JSON: .*utf-8"),
    "a key twice": (
        b'{"prompts": ["a"], "responses": ["x"], "responses": ["y"]}',
        r"^the body has 'responses' several times in one object; wanted each name once$",
    ),
    "a list": ([PAIR], r"the body is a JSON list, wanted an object with prompts and responses"),
    "other keys": (PAIR | {"column": {}}, r"unknown key column; wanted prompts, responses and columns"),
    "no prompts": ({"responses": ["x"]}, r"prompts: got nothing, wanted a list"),
    "text for prompts": ({"prompts": "a", "responses": ["x"]}, r"prompts: got str, wanted a list"),
    "a number as prompt": ({"prompts": [7], "responses": ["x"]}, r"prompts, entry 0: the prompt is a int"),
    "no role": ({"prompts": [[{"content": "a"}]], "responses": ["x"]}, r"prompts, entry 0, message 0: role is None"),
    "an answered prompt": (
        {"prompts": [[{"role": "assistant", "content": "a"}]], "responses": ["x"]},
        r"prompts, entry 0: the prompt already ends its answer",
    ),
    "too few responses": ({"prompts": ["a", "b"], "responses": ["x"]}, r"responses: got 1 value for 2 prompts"),
    "a number as response": ({"prompts": ["a"], "responses": [7]}, r"responses, entry 0: an answer is a int"),
    "half a character": ({"prompts": ["a"], "responses": ["\ud800"]}, r"responses, entry 0: got '\\ud800'"),
    "columns": (PAIR | {"columns": [1, 2]}, r"columns is a list, wanted names with lists of values"),
    "a short column": (PAIR | {"columns": {"x": [1]}}, r"column x: got 1 value for 2 prompts"),
    "a column of text": (PAIR | {"columns": {"x": "ab"}}, r"column x: got a str for 2 prompts"),
}


@pytest.mark.parametrize(("payload", "message"), NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_a_body_that_is_no_request(payload, message):
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    with pytest.raises(DataError, match=message):
        asked(body)


def test_a_body_that_is_no_request_is_told_the_client_and_the_connection_goes_on(serve):
    connection = serve(by_length).connection()
    for body, status in ((b"{}", 400), (json.dumps(PAIR).encode(), 200)):
        connection.request("POST", "/score", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == status
        content = json.loads(reply.read())
    assert content["scores"] == [1.0, 2.0]
    connection.close()


def test_requests_that_are_refused_unread(serve, monkeypatch):
    monkeypatch.setattr(server, "LARGEST_REQUEST", 100)
    running = serve(by_length)
    assert running.ask(PAIR, path="/v1/score") == (404, {"error": "there is nothing at /v1/score; send POST to /score"})
    assert running.ask(PAIR, method="GET") == (405, {"error": "wanted POST /score"})
    assert running.ask(PAIR, method="OPTIONS") == (405, {"error": "wanted POST /score"})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status = running.ask(PAIR, **{"Content-Type": kind})[0]
        assert status == 415
    assert running.ask(b" " * 101) == (413, {"error": "the body has 101 bytes, but the limit is 100"})
    assert running.ask(PAIR, **{"Content-Length": "-1"})[0] == 411
    assert running.ask(PAIR, **{"Content-Length": "many"})[0] == 411
    assert running.ask(PAIR)[0] == 200


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (RewardError("no column answer"), 500, "no column answer"),
        (RewardTimeout("too late"), 504, "too late"),
        (DataError("entry 0: no chat template"), 400, "entry 0: no chat template"),
        (RuntimeError("a fault"), 500, "RuntimeError: a fault"),
    ],
)
def test_an_error_while_scoring_is_told_the_client_and_the_service_goes_on(serve, caplog, error, status, told):
    def score(request):
        if request.responses[0] == "odd":
            raise error
        return by_length(request)

    running = serve(score)
    assert running.ask({"prompts": ["p"], "responses": ["odd"]}) == (status, {"error": told})
    assert running.ask(PAIR)[0] == 200
    assert ("Traceback" in caplog.text) == isinstance(error, RuntimeError)


def test_a_client_that_goes_away_or_falls_asleep_stops_nobody(serve, monkeypatch, capsys):
    monkeypatch.setattr(server._Handler, "timeout", 0.1)
    running = serve(by_length)
    with socket.create_connection(running.server.server_address) as gone:
        gone.sendall(b"POST /score HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
    with socket.create_connection(running.server.server_address) as asleep:
        asleep.sendall(b"POST /score HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        assert running.ask(PAIR)[0] == 200
        assert asleep.recv(1) == b""
    assert capsys.readouterr().err == ""


def test_requests_are_scored_one_after_the_other_in_one_thread(serve):
    scored_in = []

    def score(request):
        scored_in.append(threading.current_thread())
        return by_length(request)

    running = serve(score)
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(running.ask(PAIR)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == [200] * 8
    assert scored_in == [running.thread] * 8


def test_the_request_at_work_is_answered_when_the_service_stops_and_others_are_told():
    begun, replies = threading.Event(), []

    def score(request):
        begun.set()
        running.over.set()
        while running.server.jobs.empty():
            time.sleep(0.01)
        return by_length(request)

    running = Running(score)
    clients = [threading.Thread(target=lambda: replies.append(running.ask(PAIR))) for _ in range(2)]
    clients[0].start()
    assert begun.wait(2)
    clients[1].start()
    for each in (*clients, running.thread):
        each.join()
    told = {status: content for status, content in replies}
    assert told[200]["scores"] == [1.0, 2.0]
    assert told[503] == {"error": "the service stops"}


def test_an_address_that_is_taken_is_told(serve):
    port = serve(by_length).server.server_address[1]
    with pytest.raises(ConfigError, match=rf"--host 127.0.0.1 --port {port}: cannot listen there: .*in use"):
        RewardServer("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen there"):
        RewardServer("203.0.113.1", 0)
