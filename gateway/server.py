"""The gRPC server: generation, control, health and reflection over one gateway."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from outrider.config import ServerConfig
from outrider.errors import ConfigError, OutriderError
from outrider.gateway.cluster_view import AskCluster, nobody_knows
from outrider.gateway.control import ControlServicer
from outrider.gateway.fleet_control import Alone, Broadcast
from outrider.gateway.gateway import Gateway, State
from outrider.gateway.generation import GenerationServicer
from outrider.gateway.grpc_access import AccessInterceptor
from outrider.gateway.grpc_calls import caller_of, check_key, handler_of, is_from_this_host
from outrider.gateway.grpc_connections import GrpcConnections
from outrider.gateway.grpc_requests import CHARGED_METHODS, Requests
from outrider.gateway.ports import GRPC_OPTION, shown
from outrider.gateway.reflection import reflection_handlers
from outrider.gateway.seats import Seats
from outrider.proto import control_pb2, generation_pb2

__all__ = ["CONTROL", "GENERATION", "GrpcServer", "caller_of", "is_from_this_host"]

MAX_IDLE_MS = 600_000  # after which a connection without calls is closed
MAX_METADATA_BYTES = 16 * 2**10
_GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
GENERATION, CONTROL = _GENERATION.full_name, _CONTROL.full_name


def _ages(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """When a connection is asked to be made anew, and how long its calls get then."""
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
        ask_cluster: AskCluster = nobody_knows,
        broadcast: Broadcast | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        self.gateway = gateway
        self._ask_cluster = ask_cluster
        self._broadcast = broadcast or Alone(gateway)
        self._shares_port = shares_port
        self.address = shown(gateway.config.host, gateway.config.grpc_port)
        gateway.on_state.append(self._show_health)
        self._health = health.aio.HealthServicer()
        self._server: Any = None
        self._connections = GrpcConnections(Seats.of(gateway.config))

    async def start(self) -> None:
        """Listen at once, and answer as soon as there is an engine."""
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
                # Unless it is to be shared, a port that is taken is an error.
                ("grpc.so_reuseport", int(self._shares_port)),
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_allowed_incoming_connections", self._connections.seats.most_at_all),
                # Windows do not grow: what is not asked for yet stays with the client.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_concurrent_streams", config.max_streams_per_connection),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.server_handshake_timeout_ms", int(config.header_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
                # Clients that vanish without a word are noticed and their requests cancelled.
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
                    Requests(self.gateway, CHARGED_METHODS),
                    self.gateway.fail,
                    self._count_error,
                ),
                handler_of(
                    _CONTROL,
                    ControlServicer(self.gateway, self._ask_cluster, self._broadcast),
                    Requests(self.gateway),
                    self.gateway.fail,
                ),
                handler_of(_HEALTH, self._health, Requests(self.gateway), self.gateway.fail),
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
                f"cannot listen on {self.address}; the port may be taken or the address not be "
                f"one of this host: choose another {GRPC_OPTION} or --host."
            ) from error
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._connections.start(port)

    def _count_error(self, error: OutriderError) -> None:
        self.gateway.metrics.turn_away(self.gateway.model, error)

    async def stop(self, drain_s: float) -> None:
        """Take no more calls, and give those in hand so long."""
        if self._server is not None:
            await self._server.stop(drain_s)
            self._connections.stop()

    async def _show_health(self, state: State) -> None:
        known = health_pb2.HealthCheckResponse
        is_serving = state is State.SERVING
        for service in ("", GENERATION):
            await self._health.set(service, known.SERVING if is_serving else known.NOT_SERVING)
        await self._health.set(CONTROL, known.SERVING)
