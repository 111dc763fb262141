"""The service `Control`: status, speculation control and operators' commands."""

from __future__ import annotations

import json
from typing import Any

from outrider.api_types.cluster_view import AskCluster
from outrider.api_types.speculation import account_to_proto, change_from_proto, settings_to_proto
from outrider.errors import RequestError
from outrider.gateway.fleet_control import Broadcast
from outrider.gateway.gateway import Gateway
from outrider.gateway.info import model_info, server_info
from outrider.gateway.status import status_of
from outrider.proto import control_pb2


class ControlServicer:
    """The methods of the service; errors they raise become the call's status."""

    def __init__(self, gateway: Gateway, ask_cluster: AskCluster, broadcast: Broadcast) -> None:
        self._gateway = gateway
        self._ask_cluster = ask_cluster
        self._broadcast = broadcast

    async def GetStatus(  # noqa: N802 - gRPC's name
        self, request: control_pb2.GetStatusRequest, context: Any
    ) -> control_pb2.GetStatusResponse:
        return await status_of(self._gateway, self._ask_cluster)

    async def SetSpeculation(  # noqa: N802 - gRPC's name
        self, request: control_pb2.SetSpeculationRequest, context: Any
    ) -> control_pb2.SpeculationSettings:
        change = change_from_proto(request)
        return settings_to_proto(await self._gateway.replicas.set_speculation(change))

    async def ExplainSpeculation(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ExplainSpeculationRequest, context: Any
    ) -> control_pb2.ExplainSpeculationResponse:
        step = request.step if request.HasField("step") else None
        return account_to_proto(
            await self._gateway.replicas.explain_speculation(step, request.last or 1)
        )

    async def GetModelInfo(  # noqa: N802 - gRPC's name
        self, request: control_pb2.GetModelInfoRequest, context: Any
    ) -> control_pb2.GetModelInfoResponse:
        return model_info(self._gateway)

    async def GetServerInfo(  # noqa: N802 - gRPC's name
        self, request: control_pb2.GetServerInfoRequest, context: Any
    ) -> control_pb2.GetServerInfoResponse:
        return server_info(self._gateway)

    async def Drain(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainRequest, context: Any
    ) -> control_pb2.DrainResponse:
        await self._broadcast.drain()
        return control_pb2.DrainResponse(active_requests=len(self._gateway.active_requests))

    async def Abort(  # noqa: N802 - gRPC's name
        self, request: control_pb2.AbortRequest, context: Any
    ) -> control_pb2.AbortResponse:
        if not request.request_id:
            raise RequestError("request_id is empty; give that of the request to end.")
        num_ended = await self._broadcast.abort(request.request_id)
        return control_pb2.AbortResponse(num_ended=num_ended)

    async def Scale(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ScaleRequest, context: Any
    ) -> control_pb2.ScaleResponse:
        await self._broadcast.scale(request.replicas)
        return control_pb2.ScaleResponse()

    async def RollOut(  # noqa: N802 - gRPC's name
        self, request: control_pb2.RollOutRequest, context: Any
    ) -> control_pb2.RollOutResponse:
        await self._broadcast.roll_out(_settings(request.settings_json))
        return control_pb2.RollOutResponse()


def _settings(text: str) -> dict[str, Any]:
    """Settings by path; empty text is none."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"settings_json cannot be read as JSON: {error}.") from None
    if not isinstance(found, dict):
        raise RequestError(
            'settings_json is no object; write it as {"draft.model": "..."}, settings by path.'
        )
    return found
