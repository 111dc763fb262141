"""Status and speculation control of a running server, as JSON for the page and for operators."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from outrider.api_types.cluster_view import AskCluster
from outrider.api_types.convert import STATE_NAMES
from outrider.catalog.proposers import traits
from outrider.gateway.http.access import AdminOf, CallerOf, GatewayOf
from outrider.gateway.http.body import described, read_json
from outrider.gateway.status import status_of
from outrider.links.gateway_messages import ExplainSpeculationResult
from outrider.links.speculation import MAX_STEP_ACCOUNTS, SpeculationChange

router = APIRouter(prefix="/outrider", tags=["operating"])

Policy = Annotated[str, Field(pattern=r"^[a-z-]{1,32}$")]  # the engine checks the name
Depth = Annotated[int, Field(strict=True, ge=0, le=32)]
Steps = Annotated[int, Query(ge=1, le=MAX_STEP_ACCOUNTS)]
StepNumber = Annotated[int | None, Query(ge=0, lt=2**63)]


class SpeculationUpdate(BaseModel):
    """Fields that are left out stay unchanged; a `max_depth` of null lifts the bound."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy | None = None
    max_depth: Depth | None = None

    def change(self) -> SpeculationChange:
        return SpeculationChange(self.policy, "max_depth" in self.model_fields_set, self.max_depth)


@router.get("/status")
async def status(request: Request, gateway: GatewayOf, caller: CallerOf) -> dict[str, Any]:
    """The server, its engine, their processes and their load: the fields of `GetStatusResponse`,
    null where something is not known, and `methods`, the proposers a request can choose."""
    ask_cluster: AskCluster = request.app.state.ask_cluster
    found = await status_of(gateway, ask_cluster)
    facts = gateway.facts
    methods = () if facts is None else traits(has_draft_model=facts.has_draft, head=facts.head)
    return _plain(found) | {
        "state": STATE_NAMES[found.state],
        "methods": [each.name for each in methods],
    }


@router.post("/speculation", openapi_extra=described(SpeculationUpdate))
async def set_speculation(request: Request, gateway: GatewayOf, caller: AdminOf) -> dict[str, Any]:
    """Change speculation from the next step on; returns the settings then in effect."""
    with gateway.uploads.upload(caller.name) as upload:
        update = await read_json(request, gateway, upload, SpeculationUpdate)
    return dataclasses.asdict(await gateway.replicas.set_speculation(update.change()))


@router.get("/explain")
async def explain(
    gateway: GatewayOf, caller: CallerOf, last: Steps = 1, step: StepNumber = None
) -> Response:
    """The candidates weighed in the last steps or in one step, the oldest first."""
    found = await gateway.replicas.explain_speculation(step, last)
    # Serialized in a thread: hundreds of steps would block the event loop.
    account = await gateway.preparation.pool.run(caller.name, None, _account, found)
    return Response(account, media_type="application/json")


def _account(found: ExplainSpeculationResult) -> str:
    steps = ", ".join(json.dumps(dataclasses.asdict(each)) for each in found.steps)
    return (
        f'{{"steps": [{steps}], "num_remembered": {found.num_remembered}, '
        f'"calibration": {json.dumps(found.calibration)}}}'
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message as JSON values; protobuf's own JSON writes 64-bit integers as strings."""
    return {
        field.name: (
            None
            if field.has_presence and not message.HasField(field.name)
            else _plain_value(getattr(message, field.name))
        )
        for field in message.DESCRIPTOR.fields
    }


def _plain_value(value: Any) -> Any:
    if hasattr(value, "DESCRIPTOR"):
        return _plain(value)
    if isinstance(value, str | int | float):
        return value
    return [_plain_value(each) for each in value]
