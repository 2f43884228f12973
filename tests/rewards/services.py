"""Scoring services on this machine that behave as a test tells them to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """One answer: JSON, or bytes as they are."""

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class Hang:
    """Says nothing until the test is over."""


class Close:
    """Closes the connection without a word."""


class Trickle:
    """Sends one byte of an endless answer every few milliseconds."""


class Flood:
    """Begins an answer of a gigabyte."""


Behaviour = Callable[[Any], Any]


class Local:
    """A service at ``url`` that answers each payload by ``behaviour`` and keeps what it was sent."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.seen: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.paths: list[str] = []
        self.over = threading.Event()
        self.lock = threading.Condition()
        self.at_work = self.most_at_work = self.flooded = 0
        local = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                local.handle(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/score"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        payload = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.seen.append(payload)
            self.headers.append(dict(handler.headers))
            self.paths.append(handler.path)
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
            self.lock.notify_all()
        try:
            self.answer(handler, self.behaviour(payload))
        except OSError:
            handler.close_connection = True  # the client has gone
        finally:
            with self.lock:
                self.at_work -= 1

    def num_seen(self, wanted: int) -> int:
        """Number of requests so far, once ``wanted`` have come; a client may give up before the last has been read."""
        with self.lock:
            self.lock.wait_for(lambda: len(self.seen) >= wanted, timeout=60)
            return len(self.seen)

    def answer(self, handler: BaseHTTPRequestHandler, reply: Any) -> None:
        match reply:
            case Hang():
                self.over.wait()
            case Close():
                pass
            case Trickle():
                handler.send_response(200)
                handler.send_header("Content-Length", "1000000")
                handler.end_headers()
                while not self.over.wait(0.02):
                    handler.wfile.write(b" ")
            case Flood():
                handler.send_response(200)
                handler.send_header("Content-Length", str(2**30))
                handler.end_headers()
                handler.wfile.write(b'{"scores": [')
                while self.flooded < 2**30 and not self.over.is_set():
                    handler.wfile.write(b" " * 2**16)
                    self.flooded += 2**16
            case Reply():
                handler.send_response(reply.status)
                for name, value in reply.headers.items():
                    handler.send_header(name, value)
                handler.send_header("Content-Length", str(len(reply.content)))
                handler.end_headers()
                handler.wfile.write(reply.content)
                return
        handler.close_connection = True


@contextmanager
def local_service(behaviour: Behaviour) -> Iterator[Local]:
    """A running service; whatever it still holds back is let go at the end."""
    local = Local(behaviour)
    thread = threading.Thread(target=lambda: local.server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield local
    finally:
        local.over.set()
        local.server.shutdown()
        local.server.server_close()
        thread.join()


def in_turn(*replies: Any) -> Behaviour:
    """Each of the replies once, then the last one for good."""
    left = iter(replies)
    return lambda payload: next(left, replies[-1])


def lengths(payload: Any) -> Reply:
    """Tether's protocol: the score is the response's length."""
    return Reply({"scores": [len(text) for text in payload["responses"]]})
