"""Operator commands that reach every process of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from outrider.errors import RequestError
from outrider.gateway.gateway import Gateway

_NO_CONTROLLER = (
    "this gateway serves one fixed engine and has no controller; send this to a "
    "server of `outrider serve` or `outrider controller`."
)


class Broadcast(Protocol):
    """Reaches this process and all that share its ports."""

    async def drain(self) -> None:
        """Refuse new requests everywhere."""

    async def abort(self, request_id: str) -> int:
        """End the request; returns how many had this id."""

    async def scale(self, num_replicas: int) -> None:
        """Scale to this many replicas; returns once the change is accepted, raises if refused."""

    async def roll_out(self, settings: Mapping[str, Any]) -> None:
        """Replace every replica with these settings changed; likewise."""


class StandaloneFleet:
    """One gateway process without a controller."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def drain(self) -> None:
        await self._gateway.drain()

    async def abort(self, request_id: str) -> int:
        return self._gateway.active_requests.abort(request_id)

    async def scale(self, num_replicas: int) -> None:
        raise RequestError(_NO_CONTROLLER)

    async def roll_out(self, settings: Mapping[str, Any]) -> None:
        raise RequestError(_NO_CONTROLLER)
