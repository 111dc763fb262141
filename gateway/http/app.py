"""The HTTP application and its routes."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from outrider import __version__
from outrider.api_types.cluster_view import AskCluster, no_cluster_view
from outrider.gateway.gateway import Gateway
from outrider.gateway.http import (
    generation,
    health,
    metrics,
    models,
    page,
    status,
    tokens,
    unsupported_routes,
)
from outrider.gateway.http.access import AccessGuard
from outrider.gateway.http.errors import FailureGuard, answer_errors
from outrider.gateway.http.fields import WARNING
from outrider.gateway.http.generation import Fingerprints
from outrider.gateway.http.labels import EchoLabels

ROUTERS = (
    health.router,
    metrics.router,
    generation.router,
    models.router,
    tokens.router,
    unsupported_routes.router,
    status.router,
    page.router,
)


def build_app(gateway: Gateway, ask_cluster: AskCluster = no_cluster_view) -> FastAPI:
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    app.state.ask_cluster = ask_cluster
    app.state.fingerprints = Fingerprints()
    for router in ROUTERS:
        app.include_router(router)
    answer_errors(app)
    app.add_middleware(AccessGuard, gateway=gateway)
    app.add_middleware(FailureGuard, gateway=gateway)
    app.add_middleware(EchoLabels)
    if gateway.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(gateway.config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", WARNING],
        )
    return app
