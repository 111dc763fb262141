"""Liveness, readiness and version."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from outrider import __version__
from outrider.gateway.gateway import GatewayState
from outrider.gateway.http.access import GatewayOf

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """This process is alive, whether or not an engine is connected."""
    return {"status": "alive"}


@router.get("/readyz")
@router.get("/health")
@router.get("/healthz")
@router.get("/ping")
async def readyz(gateway: GatewayOf) -> JSONResponse:
    """Whether requests are served now."""
    is_ready = gateway.state is GatewayState.SERVING
    return JSONResponse({"status": gateway.state.value}, 200 if is_ready else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}
