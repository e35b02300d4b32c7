"""A Hugging Face hub on loopback: repositories of files, each at one commit. Says what it is asked, and can be away."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40


class FakeHub:
    """Serves `repos`: by `owner/name` their files.

    Attributes:
        away: answers 503 to so many requests.
        refuses: by `owner/name` a status without any word about why.
        asked: paths of all requests.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.away = 0
        self.refuses: dict[str, int] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: Any, *, body: bool) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(request.path)
        if self.away > 0:
            self.away -= 1
            return self._send(request, 503, b"", {}, body)
        if path.startswith("/api/models/"):
            repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            return self._info(request, repo, revision, body)
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        file = rest.partition("/")[2]
        data = self.repos.get(repo, {}).get(file)
        if data is None:
            return self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        etag = hashlib.sha256(data).hexdigest()
        return self._send(request, 200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def _info(self, request: Any, repo: str, revision: str, body: bool) -> None:
        if repo in self.refuses:
            return self._send(request, self.refuses[repo], b"", {}, body)
        if repo not in self.repos:
            return self._send(request, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)
        if revision not in ("", "main", "v1", COMMIT):
            return self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        files = [{"rfilename": name, "size": len(data)} for name, data in self.repos[repo].items()]
        info = {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "siblings": files,
            "private": False,
            "tags": [],
            "downloads": 0,
        }
        return self._send(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, request: Any, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub for the length of a block."""
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.close()
