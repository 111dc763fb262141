"""/v1/models: the served model and its sampling defaults."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from outrider.api_types.errors import UnavailableError, UnknownModelError
from outrider.errors import shown
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.access import CallerOf, GatewayOf
from outrider.gateway.http.errors import with_field

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(gateway: GatewayOf, caller: CallerOf) -> dict[str, Any]:
    """Every name the model is served under."""
    return {"object": "list", "data": [_model_card(gateway, name) for name in gateway.models]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, gateway: GatewayOf, caller: CallerOf) -> dict[str, Any]:
    """The model under one of its names."""
    if name not in gateway.models:
        names = " or ".join(map(repr, gateway.models)) or "none yet"
        error = UnknownModelError(f"model is {shown(name)}, which is not served here; {names} is.")
        raise with_field(error, {"model"})
    return _model_card(gateway, name)


def _model_card(gateway: Gateway, name: str) -> dict[str, Any]:
    facts = gateway.facts
    if facts is None:
        raise UnavailableError("the engine is starting; try again in a moment.")
    return {
        "id": name,
        "object": "model",
        "created": int(time.time() - gateway.uptime_s),
        "owned_by": "outrider",
        "root": str(facts.settings["target.model"]),
        "parent": None,
        "max_model_len": facts.max_model_len,
        "sampling_defaults": gateway.sampling_defaults,
    }
