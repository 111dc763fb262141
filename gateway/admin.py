"""The admin port of a server or a remote gateway: liveness, readiness and metrics, for probes and
scrapers. It has no keys and no TLS: keep it on a private network."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from outrider import __version__
from outrider.config import ServerConfig
from outrider.gateway.http.server import HttpServer
from outrider.gateway.metrics.page import CONTENT_TYPE

Metrics: TypeAlias = Callable[[], Awaitable[bytes]]
"""The metrics of the whole server, in Prometheus's text format."""


def build_admin_app(state: Callable[[], str], metrics: Metrics) -> FastAPI:
    """`state` returns "serving" while requests are served, else why they are not."""
    app = FastAPI(title="Outrider admin", version=__version__, docs_url=None, redoc_url=None)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        found = state()
        return JSONResponse({"status": found}, 200 if found == "serving" else 503)

    @app.get("/metrics")
    async def counted() -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE)

    return app


def admin_server(app: FastAPI, config: ServerConfig, bound: socket.socket) -> HttpServer:
    plain = dataclasses.replace(
        config,
        tls_cert=None,
        tls_key=None,
        tls_client_ca=None,
        trusted_proxies=("0.0.0.0/0", "::/0"),  # without keys, every connection counts as known
    )
    return HttpServer(app, plain, bound=bound)
