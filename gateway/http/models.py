"""/v1/models: what is served, and what a request gets that says nothing else."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from outrider.errors import shown
from outrider.gateway.errors import UnavailableError, UnknownModelError
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.access import CallerOf, GatewayOf
from outrider.gateway.http.errors import with_field
from outrider.text.tokenizer import tokenizer_for_clients

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(gateway: GatewayOf, caller: CallerOf) -> dict[str, Any]:
    """Every name the model is served under."""
    return {"object": "list", "data": [_described(gateway, name) for name in gateway.models]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, gateway: GatewayOf, caller: CallerOf) -> dict[str, Any]:
    """One of them."""
    if name not in gateway.models:
        names = " or ".join(map(repr, gateway.models)) or "none yet"
        error = UnknownModelError(f"model is {shown(name)}, which is not served here; {names} is.")
        raise with_field(error, {"model"})
    return _described(gateway, name)


def _described(gateway: Gateway, name: str) -> dict[str, Any]:
    facts = gateway.facts
    if facts is None:
        raise UnavailableError("the engine is starting; try again in a moment.")
    settings = facts.settings
    model = str(settings["target.model"])
    is_auto = gateway.config.generation_config == "auto"
    return {
        "id": name,
        "object": "model",
        "created": int(time.time() - gateway.uptime_s),
        "owned_by": "outrider",
        "root": model,
        "tokenizer": tokenizer_for_clients(str(settings.get("target.tokenizer") or model)),
        "parent": None,
        "max_model_len": facts.max_model_len,
        "sampling_defaults": dict(facts.sampling_defaults) if is_auto else {},
    }
