"""What an operator has every process of a server do."""

from __future__ import annotations

from typing import Protocol

from outrider.gateway.gateway import Gateway


class Broadcast(Protocol):
    """Reaches the processes that share this one's ports, and this one."""

    async def drain(self) -> None:
        """Have all of them refuse new requests."""

    async def abort(self, request_id: str) -> int:
        """Have the request ended; how often it was found."""


class Alone:
    """There are no others."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def drain(self) -> None:
        await self._gateway.drain()

    async def abort(self, request_id: str) -> int:
        return self._gateway.in_hand.abort(request_id)
