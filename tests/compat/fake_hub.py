"""A hub on this machine that takes models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class FakeHub:
    """What was sent, commit by commit."""

    url: str = ""
    repositories: list[dict[str, Any]] = field(default_factory=list)
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    """Message and files of each."""
    tokens: set[str] = field(default_factory=set)
    status: int = 200
    """What every request is answered with."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Runs one as long as the block lasts."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.tokens.add(self.headers.get("Authorization", ""))
            if hub.status != 200:
                return self.answer({"error": "no"}, hub.status)
            if self.path == "/api/repos/create":
                hub.repositories.append(json.loads(body))
                self.answer({"url": f"{hub.url}/someone/{hub.repositories[-1]['name']}"})
            elif self.path.endswith("/preupload/main"):
                files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
                self.answer({"files": [file | {"shouldIgnore": False} for file in files]})
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines()]
                files = [line["value"] for line in lines if line["key"] == "file"]
                sent = {file["path"]: base64.b64decode(file["content"]) for file in files}
                hub.commits.append((lines[0]["value"]["summary"], sent))
                self.answer({"commitUrl": f"{hub.url}/someone/model/commit/1", "commitOid": "1" * 40, "success": True})
            else:
                self.answer({"errors": [], "warnings": []})  # the check of a card's header

        def answer(self, data: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
