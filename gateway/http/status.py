"""What the page and operators ask of a server and set while it runs, as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from outrider.gateway.cluster_view import AskCluster
from outrider.gateway.convert import STATE_NAMES
from outrider.gateway.http.access import AdminOf, CallerOf, GatewayOf
from outrider.gateway.http.body import described, read_json
from outrider.gateway.status import status_of
from outrider.links.gateway_messages import SpeculationExplained
from outrider.links.speculation import MOST_STEPS, SpeculationChange
from outrider.workers.proposers.registry import traits

router = APIRouter(prefix="/outrider", tags=["operating"])

Policy = Annotated[str, Field(pattern=r"^[a-z-]{1,32}$")]  # which of them, the engine says
Depth = Annotated[int, Field(strict=True, ge=0, le=32)]
Steps = Annotated[int, Query(ge=1, le=MOST_STEPS)]
StepNumber = Annotated[int | None, Query(ge=0, lt=2**63)]


class SpeculationWish(BaseModel):
    """What to change; what is left out stays, and a `max_depth` of null lifts the bound."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy | None = None
    max_depth: Depth | None = None

    def change(self) -> SpeculationChange:
        return SpeculationChange(self.policy, "max_depth" in self.model_fields_set, self.max_depth)


@router.get("/status")
async def status(request: Request, gateway: GatewayOf, caller: CallerOf) -> dict[str, Any]:
    """The server, its engine, their processes and their load: the fields of `GetStatusResponse`,
    null where something is not known, and `methods`, those who can draft for a request."""
    ask_cluster: AskCluster = request.app.state.ask_cluster
    found = await status_of(gateway, ask_cluster)
    facts = gateway.facts
    methods = () if facts is None else traits(has_draft_model=facts.has_draft, head=facts.head)
    return _plain(found) | {
        "state": STATE_NAMES[found.state],
        "methods": [each.name for each in methods],
    }


@router.post("/speculation", openapi_extra=described(SpeculationWish))
async def set_speculation(request: Request, gateway: GatewayOf, caller: AdminOf) -> dict[str, Any]:
    """Change how speculation is decided, from the next step on; answers with what holds then."""
    with gateway.reading.upload(caller.name) as upload:
        wish = await read_json(request, gateway, upload, SpeculationWish)
    return dataclasses.asdict(await gateway.replicas.set_speculation(wish.change()))


@router.get("/explain")
async def explain(
    gateway: GatewayOf, caller: CallerOf, last: Steps = 1, step: StepNumber = None
) -> Response:
    """What was weighed in the last steps or in a certain one, the oldest first."""
    found = await gateway.replicas.explain_speculation(step, last)
    # Hundreds of steps take a while to write, and streams go on meanwhile.
    account = await gateway.preparing.run(caller.name, None, _account, found)
    return Response(account, media_type="application/json")


def _account(found: SpeculationExplained) -> str:
    steps = ", ".join(json.dumps(dataclasses.asdict(each)) for each in found.steps)
    return (
        f'{{"steps": [{steps}], "num_remembered": {found.num_remembered}, '
        f'"calibration": {json.dumps(found.calibration)}}}'
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message as JSON has it, with numbers as numbers, which protobuf's own JSON has as text."""
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
