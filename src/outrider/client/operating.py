"""What an operator asks of a server, by key of scope `admin` where there are keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc

from outrider.gateway.errors import error_of
from outrider.proto import control_pb2

ORDER_TIMEOUT_S = 10.0


def roll_out_request(settings: Mapping[str, Any] | None) -> control_pb2.RollOutRequest:
    return control_pb2.RollOutRequest(settings_json=json.dumps(dict(settings or {})))


class Operating:
    """Methods of `Client`."""

    address: str
    _control: Any

    def scale(self, num_replicas: int, timeout_s: float = ORDER_TIMEOUT_S) -> None:
        """Have so many replicas; returns while the change is under way, which
        `status().cluster.order` tells."""
        self._order("Scale", control_pb2.ScaleRequest(replicas=num_replicas), timeout_s)

    def roll_out(
        self, settings: Mapping[str, Any] | None = None, timeout_s: float = ORDER_TIMEOUT_S
    ) -> None:
        """Replace every replica in turn, or only its draft, with these settings (by path) changed;
        returns likewise. No request is lost."""
        self._order("RollOut", roll_out_request(settings), timeout_s)

    def drain(self, timeout_s: float = ORDER_TIMEOUT_S) -> int:
        """Have every gateway refuse new requests; how many this one has in hand."""
        answer = self._order("Drain", control_pb2.DrainRequest(), timeout_s)
        return int(answer.active_requests)

    def abort(self, request_id: str, timeout_s: float = ORDER_TIMEOUT_S) -> int:
        """End a request wherever it is; how often it was found."""
        answer = self._order("Abort", control_pb2.AbortRequest(request_id=request_id), timeout_s)
        return int(answer.num_ended)

    def _order(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return getattr(self._control, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None


class AsyncOperating:
    """The same methods of `AsyncClient`."""

    address: str
    _control: Any

    async def scale(self, num_replicas: int, timeout_s: float = ORDER_TIMEOUT_S) -> None:
        await self._order("Scale", control_pb2.ScaleRequest(replicas=num_replicas), timeout_s)

    async def roll_out(
        self, settings: Mapping[str, Any] | None = None, timeout_s: float = ORDER_TIMEOUT_S
    ) -> None:
        await self._order("RollOut", roll_out_request(settings), timeout_s)

    async def drain(self, timeout_s: float = ORDER_TIMEOUT_S) -> int:
        answer = await self._order("Drain", control_pb2.DrainRequest(), timeout_s)
        return int(answer.active_requests)

    async def abort(self, request_id: str, timeout_s: float = ORDER_TIMEOUT_S) -> int:
        request = control_pb2.AbortRequest(request_id=request_id)
        answer = await self._order("Abort", request, timeout_s)
        return int(answer.num_ended)

    async def _order(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return await getattr(self._control, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
