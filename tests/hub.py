"""A Hugging Face hub on this machine that takes repositories and commits and keeps what it was sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_test"


class FakeHub:
    """The hub's answers to ``create_repo`` and ``upload_folder``, for the owner ``me``."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        """Names with whether each is private."""
        self.files: dict[str, bytes] = {}
        """What was committed last, by path."""
        self.messages: list[str] = []
        """Of each commit."""
        self.requests: list[tuple[str, str | None]] = []
        """Method and path of each about an account or a repository, with what it was authorised by."""
        self.refuses = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.note()
                status, answer = hub.post(self.path, body)
                self.reply(status, answer)

            def do_GET(self) -> None:
                self.note()
                self.reply(200, {"sha": "0" * 40, "siblings": [], "id": "x", "name": "me", "type": "user"})

            def note(self) -> None:
                if self.path != "/api/agent-harnesses":  # a public list that huggingface_hub reads once a day
                    hub.requests.append((f"{self.command} {self.path}", self.headers.get("Authorization")))

            def reply(self, status: int, answer: Any) -> None:
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        if self.refuses:
            return 403, {"error": "not allowed"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            name = f"{owner}/{asked['name']}"
            private = asked.get("private") or asked.get("visibility") == "private"  # later and earlier releases
            self.repositories.setdefault(name, bool(private))
            return 200, {"url": f"{self.url}/{name}", "id": "1", "name": name}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                                   for each in files]}  # fmt: skip
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}
        return 200, {}


@contextmanager
def fake_hub(monkeypatch: Any) -> Iterator[FakeHub]:
    """A running hub that huggingface_hub talks to, logged in."""
    hub = FakeHub()
    thread = threading.Thread(target=lambda: hub.server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
