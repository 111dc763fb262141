"""The gRPC server: generation, control, health and reflection over one gateway."""

from __future__ import annotations

from functools import partial
from typing import Any

from grpc_health.v1 import health, health_pb2

import grpc
from outrider.api_types.cluster_view import AskCluster, no_cluster_view
from outrider.config import ServerConfig
from outrider.errors import ConfigError, OutriderError
from outrider.gateway.connection_slots import ConnectionSlots
from outrider.gateway.fleet_control import Broadcast, StandaloneFleet
from outrider.gateway.gateway import Gateway, GatewayState
from outrider.gateway.grpc.access import AccessInterceptor
from outrider.gateway.grpc.calls import caller_of, check_key, handler_of, is_from_this_host
from outrider.gateway.grpc.connections import GrpcConnections
from outrider.gateway.grpc.control import ControlServicer
from outrider.gateway.grpc.generation import GenerationServicer
from outrider.gateway.grpc.reflection import reflection_handlers
from outrider.gateway.grpc.requests import CHARGED_METHODS, RequestReceiver
from outrider.gateway.ports import GRPC_OPTION, shown
from outrider.proto import control_pb2, generation_pb2

__all__ = ["CONTROL", "GENERATION", "GrpcServer", "caller_of", "is_from_this_host"]

MAX_IDLE_MS = 600_000  # after which a connection without calls is closed
MAX_METADATA_BYTES = 16 * 2**10
_GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
GENERATION, CONTROL = _GENERATION.full_name, _CONTROL.full_name


def _ages(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """The maximum age of a connection, and the grace period of its calls."""
    if config.max_connection_age_s is None:
        return ()
    return (
        ("grpc.max_connection_age_ms", int(config.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(config.max_connection_grace_s * 1000)),
    )


class GrpcServer:
    """Serves until it is stopped.

    `address` is where it listens once it has started.
    """

    def __init__(
        self,
        gateway: Gateway,
        ask_cluster: AskCluster = no_cluster_view,
        broadcast: Broadcast | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        self.gateway = gateway
        self._ask_cluster = ask_cluster
        self._broadcast = broadcast or StandaloneFleet(gateway)
        self._shares_port = shares_port
        self.address = shown(gateway.config.host, gateway.config.grpc_port)
        gateway.on_state.append(self._show_health)
        self._health = health.aio.HealthServicer()
        self._server: Any = None
        self._connections = GrpcConnections(ConnectionSlots.of(gateway.config))

    async def start(self) -> None:
        """Listen at once; requests are served as soon as an engine is connected."""
        config = self.gateway.config
        server = self._server = grpc.aio.server(
            interceptors=(
                AccessInterceptor(
                    partial(caller_of, self.gateway),
                    partial(check_key, self.gateway),
                    self._count_error,
                    self._connections,
                ),
            ),
            options=(
                *_ages(config),
                # A port in use is an error unless it is shared.
                ("grpc.so_reuseport", int(self._shares_port)),
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_allowed_incoming_connections", self._connections.slots.hard_limit),
                # Fixed flow-control windows: unread requests stay with the client.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_concurrent_streams", config.max_streams_per_connection),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.server_handshake_timeout_ms", int(config.header_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
                # Keep-alive pings detect vanished clients; their requests are cancelled.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
        )
        server.add_generic_rpc_handlers(
            (
                handler_of(
                    _GENERATION,
                    GenerationServicer(self.gateway),
                    RequestReceiver(self.gateway, CHARGED_METHODS),
                    self.gateway.fail,
                    self._count_error,
                ),
                handler_of(
                    _CONTROL,
                    ControlServicer(self.gateway, self._ask_cluster, self._broadcast),
                    RequestReceiver(self.gateway),
                    self.gateway.fail,
                ),
                handler_of(_HEALTH, self._health, RequestReceiver(self.gateway), self.gateway.fail),
            )
        )
        server.add_generic_rpc_handlers(reflection_handlers((_GENERATION, _CONTROL, _HEALTH)))
        await self._show_health(self.gateway.state)
        try:
            if self.gateway.tls is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, self.gateway.tls.grpc_credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self.address}; the port may be in use or the address not be "
                f"one of this host: choose another {GRPC_OPTION} or --host."
            ) from error
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._connections.start(port)

    def _count_error(self, error: OutriderError) -> None:
        self.gateway.metrics.count_unauthorized(self.gateway.model, error)

    async def stop(self, drain_s: float) -> None:
        """Accept no more calls and let active ones finish within `drain_s`."""
        if self._server is not None:
            await self._server.stop(drain_s)
            self._connections.stop()

    async def _show_health(self, state: GatewayState) -> None:
        known = health_pb2.HealthCheckResponse
        is_serving = state is GatewayState.SERVING
        for service in ("", GENERATION):
            await self._health.set(service, known.SERVING if is_serving else known.NOT_SERVING)
        await self._health.set(CONTROL, known.SERVING)
