"""Who may do what over HTTP, by the application itself without a socket."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from outrider.config import ServerConfig
from outrider.gateway.auth.callers import Callers
from outrider.gateway.http.access import AccessGuard, AdminOf, CallerOf
from outrider.gateway.http.app import ROUTERS
from outrider.gateway.http.errors import answer_errors
from outrider.gateway.metrics.requests import GatewayMetrics

HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"


def _app(**options: Any) -> FastAPI:
    """With an open route, an admin route, and one without any check."""
    app = FastAPI()
    config = ServerConfig(**options)
    app.state.gateway = SimpleNamespace(
        config=config, callers=Callers(config), metrics=GatewayMetrics(), model="any"
    )

    @app.get("/ask")
    async def ask(caller: CallerOf) -> str:
        return caller.name

    @app.get("/change")
    async def change(caller: AdminOf) -> str:
        return caller.name

    @app.get("/forgotten")
    async def forgotten() -> str:
        return "for all"

    answer_errors(app)
    app.add_middleware(AccessGuard, gateway=app.state.gateway)
    return app


def _answer(app: FastAPI, path: str, peer: str = HERE, **headers: str) -> tuple[int, Any]:
    sent: list[Any] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": (peer, 1234),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def _status(app: FastAPI, path: str, peer: str = HERE, **headers: str) -> int:
    return _answer(app, path, peer, **headers)[0]


def test_without_keys_others_may_ask_but_change_nothing() -> None:
    app = _app()
    assert _status(app, "/ask", ELSEWHERE) == 200
    assert _status(app, "/change", ELSEWHERE) == 403
    assert _status(app, "/change", HERE) == 200
    assert _status(app, "/change", "::1") == 200
    assert _status(app, "/change", "::ffff:127.0.0.1") == 200


@pytest.mark.parametrize("origin", ["https://example.com", "null", "http://[", "http://10.0.0.1"])
def test_pages_from_elsewhere_do_not_act_for_this_host(origin: str) -> None:
    app = _app()
    assert _status(app, "/change", origin=origin) == 403
    assert _status(app, "/ask", origin=origin) == 200
    allowed = _app(cors_origins=(origin,))
    assert _status(allowed, "/change", origin=origin) == 200


def test_our_own_page_does() -> None:
    for origin in ("http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"):
        assert _status(_app(), "/change", origin=origin) == 200


def test_with_keys_no_route_is_open_unless_it_is_named() -> None:
    app = _app(api_key="the-key")
    for path in ("/ask", "/change", "/forgotten", "/nowhere", "/livez/", "//livez", "/pages"):
        assert _status(app, path) == 401, path
        assert _status(app, path, authorization="Bearer wrong") == 401, path
    for path in ("/ask", "/change", "/forgotten"):
        assert _status(app, path, ELSEWHERE, authorization="Bearer the-key") == 200
    assert _status(app, "/livez") == 404  # of this application


def test_every_probe_of_the_real_application_is_open() -> None:
    app = _app(api_key="the-key")
    app.state.gateway.state = SimpleNamespace(value="serving")
    for router in ROUTERS:
        app.include_router(router)
    for path in ("/livez", "/readyz", "/health", "/healthz", "/ping", "/version"):
        assert _status(app, path) in (200, 503)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "use '/v1/chat/completions'."),
        ("/v1/v1/chat/completions", "use '/v1/chat/completions'."),
        ("/models/tiny", "use '/v1/models/tiny'."),
        ("/v1/health", "use '/health'."),
        ("/v1/chat", "/openapi.json lists what there is."),
        ("/page/none.js", "/openapi.json lists what there is."),
        ("/nowhere", "/openapi.json lists what there is."),
    ],
)
def test_a_path_with_v1_in_the_wrong_place_is_answered_with_the_right_one(
    path: str, remedy: str
) -> None:
    app = _app()
    for router in ROUTERS:
        app.include_router(router)
    status, body = _answer(app, path)
    assert status == 404
    assert body["error"]["message"] == f"there is no {path!r} here; {remedy}"


@pytest.mark.parametrize("host", ["example.com:8000", "127.0.0.1.example.com", "["])
def test_a_page_whose_name_leads_to_this_host_gets_nothing(host: str) -> None:
    """Its browser takes us for the page's own server, and sends no origin with what it reads."""
    assert _status(_app(), "/ask", host=host) == 403
    anonymous = _app(allow_anonymous=True)
    assert _status(anonymous, "/ask", host=host) == 200
    assert _status(anonymous, "/change", host=host) == 403
    assert _status(_app(api_key="k"), "/ask", host=host, authorization="Bearer k") == 200


def test_this_host_has_many_names() -> None:
    app = _app(cors_origins=("https://example.com",))
    for host in ("localhost:8000", "LOCALHOST", "a.localhost", "127.0.0.1", "[::1]:8000", ""):
        assert _status(app, "/change", host=host) == 200, host
    assert _status(app, "/change", host="example.com") == 200
