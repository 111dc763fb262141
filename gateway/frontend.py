"""The front end of a server: HTTP and gRPC over one gateway, in one event loop."""

from __future__ import annotations

import asyncio
import logging

from outrider.api_types.cluster_view import AskCluster, no_cluster_view
from outrider.config import ServerConfig
from outrider.gateway.bounds import allow_open_files
from outrider.gateway.exposure import check_exposure
from outrider.gateway.fleet_control import Broadcast
from outrider.gateway.gateway import Gateway
from outrider.gateway.grpc.server import GrpcServer
from outrider.gateway.http.app import build_app
from outrider.gateway.http.server import HttpServer

logger = logging.getLogger(__name__)

CLOSE_S = 1.0  # for the last errors to reach clients


class Frontend:
    """Serves until it is stopped, with the engines published to `gateway.replicas`. Ports may be
    shared with other processes, which `broadcast` reaches; all share `secret`.

    Streams wait `resubmit_timeout_s` for a lost engine; by default, the engine's restart timeout.
    """

    def __init__(
        self,
        secret: str,
        config: ServerConfig | None = None,
        ask_cluster: AskCluster = no_cluster_view,
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
        """Listen at once; requests are served as soon as an engine is connected."""
        allow_open_files()
        await self._grpc.start()
        await self._http.start()
        self.gateway.start()

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuse new requests, drain running ones for `drain_s`, end the rest with an error, then
        close."""
        await self.gateway.drain()
        await self.gateway.active_requests.wait_until_none(
            self.config.drain_s if drain_s is None else drain_s
        )
        self.gateway.active_requests.stop()
        await asyncio.gather(self._grpc.stop(CLOSE_S), self._http.stop(CLOSE_S))
        await self.gateway.stop()
