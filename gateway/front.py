"""The front of a server: both protocols over one gateway, in one event loop."""

from __future__ import annotations

import asyncio
import logging

from outrider.config import ServerConfig
from outrider.gateway.bounds import allow_open_files
from outrider.gateway.cluster_view import AskCluster, nobody_knows
from outrider.gateway.exposure import check_exposure
from outrider.gateway.fleet_control import Broadcast
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.app import build_app
from outrider.gateway.http.server import HttpServer
from outrider.gateway.server import GrpcServer

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # for what was said in the end to reach clients


class Front:
    """Serves until it is stopped, with the engines that `gateway.replicas` is told of. Ports may be
    shared with other processes, which `broadcast` reaches; all share `secret`.

    Streams wait `resubmit_timeout_s` for a lost engine; not given, as long as its restart may take.
    """

    def __init__(
        self,
        secret: str,
        config: ServerConfig | None = None,
        ask_cluster: AskCluster = nobody_knows,
        *,
        resubmit_timeout_s: float | None = None,
        broadcast: Broadcast | None = None,
        shares_ports: bool = False,
    ) -> None:
        self.config = config or ServerConfig()
        if (warning := check_exposure(self.config)) is not None:
            logger.warning("%s", warning)
        self.gateway = Gateway(secret, self.config, resubmit_timeout_s=resubmit_timeout_s)
        self._grpc = GrpcServer(self.gateway, ask_cluster, broadcast, shares_port=shares_ports)
        app = build_app(self.gateway, ask_cluster)
        self._http = HttpServer(app, self.config, tls=self.gateway.tls, shares_port=shares_ports)

    @property
    def http_address(self) -> str:
        """Where HTTP listens, once it has started."""
        return self._http.address

    @property
    def grpc_address(self) -> str:
        """Where gRPC listens, once it has started."""
        return self._grpc.address

    async def start(self) -> None:
        """Listen at once, and answer as soon as there is an engine."""
        allow_open_files()
        await self._grpc.start()
        await self._http.start()
        self.gateway.start()

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish for a while, tell the others that the server
        was stopped, then end."""
        await self.gateway.drain()
        await self.gateway.in_hand.wait_until_none(
            self.config.drain_s if drain_s is None else drain_s
        )
        self.gateway.in_hand.stop()
        await asyncio.gather(self._grpc.stop(LAST_WORDS_S), self._http.stop(LAST_WORDS_S))
        await self.gateway.stop()
