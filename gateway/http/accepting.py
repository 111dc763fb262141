"""Accepts connections in place of asyncio's server, which sees a connection only after its TLS
handshake."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from outrider.gateway.connection_slots import ConnectionSlot, ConnectionSlots
from outrider.links.pending_connections import ACCEPT_PAUSE_S, shut_down
from outrider.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

Connect = Callable[[ConnectionSlot], asyncio.Protocol]


class Acceptor:
    """Assigns every connection a slot before anything is read from it."""

    def __init__(
        self,
        sock: socket.socket,
        connect: Connect,
        slots: ConnectionSlots,
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        shutdown_timeout_s: float,
    ) -> None:
        self._sock = sock
        self._connect = connect
        self._slots = slots
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._limited_log = RateLimitedLog(logger)
        self._admitting: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self, backlog: int) -> None:
        self._sock.setblocking(False)
        self._sock.listen(backlog)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        for task in (self._accepting, *self._admitting):
            if task is not None:
                task.cancel()
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:
                self._limited_log.warning("cannot accept connections: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = loop.create_task(self._admit(sock, address))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)
            await asyncio.sleep(0)  # a burst of connections must not starve other tasks

    async def _admit(self, sock: socket.socket, address: tuple[str, int]) -> None:
        slot = self._slots.take(address[0], lambda: shut_down(sock))
        if len(self._slots) > self._slots.hard_limit:  # too many even for an error response
            slot.release()
            sock.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connect(slot),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._handshake_timeout_s,
                ssl_shutdown_timeout=None if self._tls is None else self._shutdown_timeout_s,
            )
        except (OSError, asyncio.CancelledError) as error:
            slot.release()
            sock.close()
            if isinstance(error, asyncio.CancelledError):
                raise
