"""Clients of the HTTP API for tests: the real one, and one that sends whatever it is told."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

import openai
from fake_engine import FakeService

JSON = {"Content-Type": "application/json"}
TIMEOUT_S = 60.0


def openai_client(service: FakeService) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://{service.server.http_address}/v1",
        api_key="unused",
        max_retries=0,
        timeout=TIMEOUT_S,
    )


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Of a refusal, which has nothing else."""
        assert set(self.json) == {"error"}, self.body
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert found["code"] in (self.status, "context_length_exceeded")
        return found

    @property
    def events(self) -> list[Any]:
        """Of a stream that is done, but for its last line."""
        *events, done = [e for e in self.body.decode().split("\n\n") if e.startswith("data: ")]
        assert done == "data: [DONE]", self.body
        return [json.loads(event.removeprefix("data: ")) for event in events]


def send(
    service: FakeService, path: str, body: Any = None, *, method: str = "POST", **headers: str
) -> Reply:
    """`body` is bytes as they are, or anything to send as JSON."""
    connection = http.client.HTTPConnection(service.server.http_address, timeout=TIMEOUT_S)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, JSON | named)
        reply = connection.getresponse()
        return Reply(reply.status, reply.headers, reply.read())
    finally:
        connection.close()
