"""Whether the server lives, and whether it answers requests."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from outrider import __version__
from outrider.gateway.gateway import State
from outrider.gateway.http.access import GatewayOf

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """That this process answers; engines come and go without it."""
    return {"status": "alive"}


@router.get("/readyz")
@router.get("/health")
@router.get("/healthz")
@router.get("/ping")
async def readyz(gateway: GatewayOf) -> JSONResponse:
    """Whether a request would be answered now."""
    is_ready = gateway.state is State.SERVING
    return JSONResponse({"status": gateway.state.value}, 200 if is_ready else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}
