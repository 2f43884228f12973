"""Reward sources as a service: Tether's protocol over HTTP. docs/rewards.md describes it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from tether.config.keys import counted
from tether.data.judged import checked_answer
from tether.data.queries import checked_prompt
from tether.data.sources import RepeatedKey, object_of
from tether.errors import USER_ERRORS, ConfigError, DataError, RewardTimeout, TetherError
from tether.types import Message

logger = logging.getLogger(__name__)

PATH = "/score"
LARGEST_REQUEST = 64 * 2**20
"""Maximum number of bytes in a request; larger ones are refused unread."""
PATIENCE = 60.0
"""Seconds within which a client must continue a request that it began."""
FAREWELL = 2.0
"""Seconds within which the last answer must be sent when the service stops."""
POLL = 0.05
"""Seconds between checks whether to stop."""

Content = tuple[HTTPStatus, Mapping[str, Any]]
"""Status of an answer, and what it holds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks to score."""

    prompts: Sequence[str | list[Message] | None]
    """Prompts as in the client's dataset; None where a response is a whole text."""
    responses: Sequence[str]
    """One for each prompt."""
    columns: Mapping[str, list[Any]]
    """Further columns, one entry per response."""


@dataclass(slots=True)
class _Job:
    """A request on its way through the service."""

    request: Asked
    answer: Content = (HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the service stops"})
    answered: Event = field(default_factory=Event)
    sent: Event = field(default_factory=Event)


class RewardServer(ThreadingHTTPServer):
    """Answers requests for scores. Each connection has its own thread; scores come from a single thread.

    The address is taken from the start; connections are accepted once ``run`` is called.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigError: it cannot listen there.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except (OSError, OverflowError) as error:
            self.server_close()
            raise _not_there(host, port, error) from error

    @property
    def url(self) -> str:
        """Where requests are posted to."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}{PATH}"

    def run(self, score: Callable[[Asked], Mapping[str, Any]], is_over: Callable[[], bool]) -> None:
        """Scores requests in the calling thread, one after the other, until ``is_over``; then closes.

        The current request is still answered; waiting ones are told that the service stops.

        Args:
            score: returns the answer, scores and components.

        Raises:
            ConfigError: another process now listens at the address.
        """
        try:
            self.server_activate()
        except OSError as error:
            raise _not_there(*self.server_address[:2], error) from error
        Thread(target=self.serve_forever, kwargs={"poll_interval": POLL}, daemon=True).start()
        job = None
        while not is_over():
            try:
                job = self.jobs.get(timeout=POLL)
            except Empty:
                continue
            job.answer = _scored(score, job.request)
            job.answered.set()
        self.shutdown()
        while not self.jobs.empty():
            job = self.jobs.get()
            job.answered.set()
        if job is not None:
            job.sent.wait(FAREWELL)
        self.server_close()

    def answer(self, job: _Job) -> Content:
        """Waits until a job is done; called in the thread of its connection."""
        self.jobs.put(job)
        job.answered.wait()
        return job.answer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a broken connection, as a client may go away at any time."""
        logger.debug("the connection to %s was lost", client_address, exc_info=True)


def _not_there(host: Any, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"--host {host} --port {port}: cannot listen there: {error}; choose another")


def asked(body: bytes) -> Asked:
    """The request that a body holds.

    Raises:
        DataError: it is malformed; says what was got and what is expected.
    """
    try:
        payload = json.loads(body, object_pairs_hook=object_of)
    except RepeatedKey as error:
        raise DataError(f"the body {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise DataError(f"the body is a JSON {type(payload).__name__}, wanted an object with prompts and responses")
    unknown = [key for key in payload if key not in ("prompts", "responses", "columns")]
    if unknown:
        raise DataError(f"unknown key {', '.join(unknown)}; wanted prompts, responses and columns")
    prompts, responses = (_list(payload, name) for name in ("prompts", "responses"))
    columns = payload.get("columns")
    columns = {} if columns is None else columns
    if not isinstance(columns, dict):
        raise DataError(f"columns is a {type(columns).__name__}, wanted names with lists of values")
    lists = {"responses": responses} | {f"column {name}": values for name, values in columns.items()}
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(prompts):
            got = counted(len(values), "value") if isinstance(values, list) else f"a {type(values).__name__}"
            raise DataError(f"{name}: got {got} for {counted(len(prompts), 'prompt')}, wanted a list of one for each")
    return Asked(
        [None if prompt == "" else checked_prompt(prompt, f"prompts, entry {i}") for i, prompt in enumerate(prompts)],
        [checked_answer(response, f"responses, entry {i}") for i, response in enumerate(responses)],
        columns,
    )


def _list(payload: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(payload.get(name), list):
        got = type(payload[name]).__name__ if name in payload else "nothing"
        raise DataError(f"{name}: got {got}, wanted a list")
    return payload[name]


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tether", ""
    timeout = PATIENCE

    def do_POST(self) -> None:
        if self.path != PATH:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path}; send POST to {PATH}")
        elif self.headers.get_content_type() != "application/json":  # which a web page cannot send unasked
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "wanted Content-Type: application/json")
        elif (length := _number(self.headers.get("Content-Length"))) is None:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "wanted a Content-Length header")
        elif length > LARGEST_REQUEST:
            error = f"the body has {length} bytes, but the limit is {LARGEST_REQUEST}"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error)
        else:
            self._answer(self.rfile.read(length))

    def do_GET(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, f"wanted POST {PATH}")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _answer(self, body: bytes) -> None:
        """Scores what a request asks to score."""
        try:
            request = asked(body)
        except DataError as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        job = _Job(request)
        try:
            self._send(*self.server.answer(job))
        finally:
            job.sent.set()

    def _refuse(self, status: HTTPStatus, error: str) -> None:
        """Answers a request whose body stays unread, so that the connection cannot continue."""
        self.close_connection = True
        self._send(status, {"error": error})

    def _send(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        body = json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _scored(score: Callable[[Asked], Mapping[str, Any]], request: Asked) -> Content:
    """Status and content of the answer. No request stops the service."""
    if not request.prompts:
        return HTTPStatus.OK, {"scores": [], "components": {}}
    try:
        return HTTPStatus.OK, score(request)
    except USER_ERRORS as error:
        return HTTPStatus.BAD_REQUEST, {"error": str(error)}
    except TetherError as error:
        logger.warning("%s", error)
        is_late = isinstance(error, RewardTimeout)
        return HTTPStatus.GATEWAY_TIMEOUT if is_late else HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}
    except Exception as error:  # a fault of a model or of ours: reported to both sides
        logger.exception("a request could not be scored")
        return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}


def _number(header: str | None) -> int | None:
    """A number of bytes, None if it is none."""
    return int(header) if header is not None and header.isascii() and header.isdecimal() else None
