"""Clients' labels of their requests (X-Request-Id): echoed and logged, nothing more."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.logs import request_context

REQUEST_ID = b"x-request-id"
MAX_LABEL_CHARS = 128
_UNPRINTABLE = re.compile(r"[^!-~]+")


def clean_label(given: str) -> str:
    """The label, safe for a header and a log line."""
    return _UNPRINTABLE.sub("_", given[:MAX_LABEL_CHARS].strip())


def label_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    found = next((value for name, value in headers if name == REQUEST_ID), b"")
    return clean_label(found.decode("latin-1"))


class EchoLabels:
    """Repeats a request's X-Request-Id in its response, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = label_in(scope["headers"]) if scope["type"] == "http" else ""
        if not label:
            await self._app(scope, receive, send)
            return

        async def send_with_label(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [pair for pair in message.get("headers", ()) if pair[0] != REQUEST_ID]
                message = {**message, "headers": [*others, (REQUEST_ID, label.encode())]}
            await send(message)

        with request_context(label):
            await self._app(scope, receive, send_with_label)
