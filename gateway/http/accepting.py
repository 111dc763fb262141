"""Accepts connections in place of asyncio's server, which knows nothing of one until its TLS
handshake is done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from outrider.gateway.seats import Seat, Seats
from outrider.quiet_log import QuietLog

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1  # after a failure, most likely for want of descriptors

Connect = Callable[[Seat], asyncio.Protocol]


class Acceptor:
    """Gives every connection a seat before anything is read from it."""

    def __init__(
        self,
        sock: socket.socket,
        connect: Connect,
        seats: Seats,
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        shutdown_timeout_s: float,
    ) -> None:
        self._sock = sock
        self._connect = connect
        self._seats = seats
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._quiet_log = QuietLog(logger)
        self._admitting: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self, backlog: int) -> None:
        self._sock.setblocking(False)
        self._sock.listen(backlog)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Take no more connections; those that are made stay."""
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
                self._quiet_log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = loop.create_task(self._admit(sock, address))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)
            await asyncio.sleep(0)  # however fast they come, others get their turns

    async def _admit(self, sock: socket.socket, address: tuple[str, int]) -> None:
        seat = self._seats.take(address[0], lambda: _hang_up(sock))
        if len(self._seats) > self._seats.most_at_all:  # too many even to be answered
            seat.leave()
            sock.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connect(seat),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._handshake_timeout_s,
                ssl_shutdown_timeout=None if self._tls is None else self._shutdown_timeout_s,
            )
        except (OSError, asyncio.CancelledError) as error:
            seat.leave()
            sock.close()
            if isinstance(error, asyncio.CancelledError):
                raise


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
