"""A model hub on loopback, as far as `huggingface_hub` asks one: commits, lists of files, files."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from c_kernels import with_kernels

MAIN = "main"


class FakeHub:
    """Serves one model. `asked` holds the method and path of every request, in their order."""

    def __init__(self, model_id: str, files: Mapping[str, bytes]) -> None:
        self.model_id = model_id
        self.files = dict(files)
        self.commits = {MAIN: "a" * 40}  # by branch
        self.refused: tuple[int, str] | None = None  # status and code for those without the token
        self.token = ""  # that is let in all the same
        self.seconds_per_file = 0.0
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, cache: Path) -> dict[str, str]:
        """For a process that asks this hub, with nothing in its caches but what is in `cache`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OUTRIDER_CACHE": with_kernels(cache / "outrider"),
        }

    def downloads(self, suffix: str) -> list[str]:
        """Files that were sent, as often as they were."""
        return [each for each in self.asked if each.startswith("GET ") and each.endswith(suffix)]

    def resolutions(self) -> list[str]:
        """Questions about which commit a branch is."""
        endings = (f"/revision/{MAIN}", f"/models/{self.model_id}")
        return [each for each in self.asked if each.endswith(endings)]

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            def do_HEAD(self) -> None:
                hub._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Tests look at `asked`."""

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append(f"{request.command} {path}")
        is_known = request.headers.get("Authorization") == f"Bearer {self.token}"
        if self.refused is not None and not is_known:
            status, code = self.refused
            return _send(request, status, b"{}", {"X-Error-Code": code})
        api, web = f"/api/models/{self.model_id}", f"/{self.model_id}/resolve/"
        if path == api:  # no revision was named
            return self._tell(request, "revision", MAIN)
        if path.startswith((f"{api}/revision/", f"{api}/tree/")):
            kind, revision = path.removeprefix(f"{api}/").split("/")[:2]
            return self._tell(request, kind, revision)
        if path.startswith(web):
            revision, name = path.removeprefix(web).split("/", 1)
            return self._give(request, revision, name)
        _send(request, HTTPStatus.NOT_FOUND, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _tell(self, request: BaseHTTPRequestHandler, kind: str, revision: str) -> None:
        commit = self.commits.get(revision, revision)
        if commit not in self.commits.values():
            return _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        listed = [
            {"type": "file", "path": name, "size": len(data), "oid": _hash(data)}
            for name, data in self.files.items()
        ]
        siblings = [{"rfilename": name} for name in self.files]
        about = {"id": self.model_id, "modelId": self.model_id, "sha": commit, "siblings": siblings}
        answer = about if kind == "revision" else listed
        _send(request, 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _give(self, request: BaseHTTPRequestHandler, revision: str, name: str) -> None:
        data = self.files.get(name)
        commit = self.commits.get(revision, revision)
        if data is None:
            return _send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        if request.command == "GET":
            time.sleep(self.seconds_per_file)
        _send(request, 200, data, {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": commit})


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str]
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body)
