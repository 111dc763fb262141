"""The admin port: whether a server, or a gateway of its own, lives and is ready, and what it has
counted, for probes and scrapers. No keys and no TLS: it belongs on a network of its own."""

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
from outrider.gateway.metrics_page import CONTENT_TYPE

Metrics: TypeAlias = Callable[[], Awaitable[bytes]]
"""What the whole server has counted, in the text format of Prometheus."""


def build_admin_app(state: Callable[[], str], metrics: Metrics) -> FastAPI:
    """`state` is "serving" while requests are answered, else why they are not."""
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
        trusted_proxies=("0.0.0.0/0", "::/0"),  # there are no keys, so none is unknown
    )
    return HttpServer(app, plain, bound=bound)
