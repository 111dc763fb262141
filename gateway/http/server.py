"""The HTTP server: uvicorn in an existing event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from outrider.config import ServerConfig
from outrider.gateway.auth.tls import TlsFiles
from outrider.gateway.connection_slots import ConnectionSlot, ConnectionSlots
from outrider.gateway.http.accepting import Acceptor
from outrider.gateway.http.connections import BoundedProtocol, ConnectionBounds
from outrider.gateway.http.pieces import SendInPieces
from outrider.gateway.ports import HTTP_OPTION, listener, place_of, shown


class _Uvicorn(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        tls: ssl.SSLContext | None,
        bounds: ConnectionBounds,
        slots: ConnectionSlots,
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._bounds = bounds
        self._slots = slots

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles signals itself."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's, which has no handshake timeout and makes its own TLS context."""
        self._acceptors = [
            Acceptor(
                each,
                self._protocol,
                self._slots,
                tls=self._tls,
                handshake_timeout_s=self._bounds.header_timeout_s,
                shutdown_timeout_s=self._bounds.write_timeout_s,
            )
            for each in sockets or ()
        ]
        for acceptor in self._acceptors:
            acceptor.start(self.config.backlog)
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    def _protocol(self, slot: ConnectionSlot) -> asyncio.Protocol:
        return BoundedProtocol(self.config, self.server_state, bounds=self._bounds, slot=slot)


class HttpServer:
    """Serves an application until it is stopped. `address` is where it listens once it has started:
    on `bound` if given, else where the configuration says, on a port that may be shared."""

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        *,
        tls: TlsFiles | None = None,
        bound: socket.socket | None = None,
        shares_port: bool = False,
    ) -> None:
        self._config = config
        self._app = app
        self._tls = tls
        self._bound = bound
        self._shares_port = shares_port
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = shown(config.host, config.port)

    async def start(self) -> None:
        host, port = self._config.host, self._config.port
        sock = self._bound or listener(host, port, HTTP_OPTION, is_shared=self._shares_port)
        self.address = shown(host, place_of(sock)[1])
        config = uvicorn.Config(
            SendInPieces(self._app),
            loop="none",  # use the running loop
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
        )
        # Malformed requests are answered, not logged: clients could fill the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        tls = None if self._tls is None else self._tls.http_context()
        self._server = _Uvicorn(
            config, tls, ConnectionBounds.of(self._config), ConnectionSlots.of(self._config)
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    async def stop(self, drain_s: float) -> None:
        """Accept no more connections and let active requests finish within `drain_s`."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._serving}, timeout=drain_s)
        if not done:
            self._server.force_exit = True
            await asyncio.wait({self._serving}, timeout=2.0)
            self._serving.cancel()
