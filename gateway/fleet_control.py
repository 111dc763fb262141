"""What an operator has every process of a server do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from outrider.errors import RequestError
from outrider.gateway.gateway import Gateway

_NO_CONTROLLER = (
    "this gateway was started for one engine by hand and knows nobody who starts others; ask a "
    "server of `outrider serve` or `outrider controller`."
)


class Broadcast(Protocol):
    """Reaches the processes that share this one's ports, and this one."""

    async def drain(self) -> None:
        """Have all of them refuse new requests."""

    async def abort(self, request_id: str) -> int:
        """Have the request ended; how often it was found."""

    async def scale(self, num_replicas: int) -> None:
        """Have so many replicas; returns while the change is under way, raises if it is refused."""

    async def roll_out(self, settings: Mapping[str, Any]) -> None:
        """Have every replica replaced, with these settings changed; likewise."""


class Alone:
    """There are no others."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def drain(self) -> None:
        await self._gateway.drain()

    async def abort(self, request_id: str) -> int:
        return self._gateway.in_hand.abort(request_id)

    async def scale(self, num_replicas: int) -> None:
        raise RequestError(_NO_CONTROLLER)

    async def roll_out(self, settings: Mapping[str, Any]) -> None:
        raise RequestError(_NO_CONTROLLER)
