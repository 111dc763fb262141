"""The gRPC server: generation, control, health and reflection over one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.gateway.cluster_view import AskCluster, nobody_knows
from outrider.gateway.convert import params_from_request
from outrider.gateway.engine_link import Locate
from outrider.gateway.errors import MARK
from outrider.gateway.errors import status_of as code_of
from outrider.gateway.gateway import Call, Conversation, Gateway, State
from outrider.gateway.responses import Responses
from outrider.gateway.speculation import account_to_proto, change_from_proto, settings_to_proto
from outrider.gateway.status import status_of
from outrider.logs import request_context
from outrider.proto import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from outrider.text.front_door import Prompt

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

MAX_INLINE_BYTES = 64 * 2**10
# A status travels in a header, of which 8 KiB are sure to arrive, each byte of a letter as three.
MAX_SENTENCE_CHARS = 500
DEFAULT_ADDRESS = "127.0.0.1:50051"
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
SERVICES = (GENERATION, CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a gateway serves."""

    address: str = DEFAULT_ADDRESS  # port 0 takes a free one
    served_name: str | None = None  # what clients call the model; None: the target as configured
    # How long streams wait for a lost engine; None: as long as its restart may take.
    resubmit_timeout_s: float | None = None
    max_request_bytes: int = 4 * 2**20
    drain_s: float = 30.0  # what running requests get to finish when the server stops


class GrpcServer:
    """Serves until it is stopped.

    `address` is where it listens once it has started.
    """

    def __init__(
        self,
        locate: Locate,
        options: ServerOptions | None = None,
        ask_cluster: AskCluster = nobody_knows,
    ) -> None:
        self.options = options or ServerOptions()
        self._ask_cluster = ask_cluster
        self.address = self.options.address
        self.gateway = Gateway(
            locate,
            self._show_health,
            served_name=self.options.served_name,
            resubmit_timeout_s=self.options.resubmit_timeout_s,
        )
        self._health = health.aio.HealthServicer()
        self._server: Any = None

    async def start(self) -> None:
        """Listen at once, and answer as soon as there is an engine."""
        server = self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a share of it
                ("grpc.max_receive_message_length", self.options.max_request_bytes),
                # Clients that vanish without a word are noticed and their requests cancelled.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            )
        )
        server.add_generic_rpc_handlers((_handler_of(_Generation(self.gateway)),))
        control_pb2_grpc.add_ControlServicer_to_server(
            _Control(self.gateway, self._ask_cluster), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(SERVICES, server)
        await self._show_health(self.gateway.state)
        host = self.options.address.rpartition(":")[0]
        try:
            port = server.add_insecure_port(self.options.address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self.options.address}; the port may be taken or the address "
                "not be one of this host: choose another."
            ) from error
        self.address = f"{host}:{port}"
        await server.start()
        self.gateway.start()

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish for a while, then end."""
        await self.gateway.drain()
        if self._server is not None:
            await self._server.stop(self.options.drain_s if drain_s is None else drain_s)
        await self.gateway.stop()

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._server.wait_for_termination()

    async def _show_health(self, state: State) -> None:
        known = health_pb2.HealthCheckResponse
        is_serving = state is State.SERVING
        for service in ("", GENERATION):
            await self._health.set(service, known.SERVING if is_serving else known.NOT_SERVING)
        await self._health.set(CONTROL, known.SERVING)


class _Generation(generation_pb2_grpc.GenerationServicer):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.GenerateRequest | None, context: Any
    ) -> None:
        try:
            if request is None:
                raise RequestError(
                    "the request cannot be read; send a GenerateRequest of proto/generation.proto."
                )
            await self._stream(request, context)
        except OutriderError as error:
            await _abort(context, code_of(error), str(error))
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a request failed")
            await _abort(
                context,
                grpc.StatusCode.INTERNAL,
                "the server failed in a way it should not; its log has the details.",
            )

    async def _stream(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        left_s = context.time_remaining()
        deadline_s = None if left_s is None else time.monotonic() + left_s
        if request.ByteSize() <= MAX_INLINE_BYTES:
            call = _call(request, deadline_s)
        else:  # reading millions of entries would hold up every stream
            call = await self._gateway.preparing.run(deadline_s, _call, request, deadline_s)
        async with self._gateway.session(call) as session:
            with request_context(session.prepared.request_id):
                responses = Responses(session, self._gateway.model, request.want_text_spans)
                # Closed here and now rather than when it is collected: leaving cancels the request.
                async with contextlib.aclosing(session.deltas()) as deltas:
                    async for delta in deltas:
                        await context.write(responses.make(delta))


def _handler_of(servicer: _Generation) -> grpc.GenericRpcHandler:
    """In place of the generated one, with which bytes that are no request end in UNKNOWN."""
    generate = grpc.unary_stream_rpc_method_handler(
        servicer.Generate,
        request_deserializer=_read_request,
        response_serializer=generation_pb2.GenerateResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(GENERATION, {"Generate": generate})


def _read_request(data: bytes) -> generation_pb2.GenerateRequest | None:
    try:
        return generation_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return None


def _call(request: generation_pb2.GenerateRequest, deadline_s: float | None) -> Call:
    return Call(
        prompt=_prompt(request),
        params=params_from_request(request),
        model=request.model,
        request_id=request.request_id,
        priority=request.priority,
        deadline_s=deadline_s,
    )


def _prompt(request: generation_pb2.GenerateRequest) -> Prompt | Conversation:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return request.token_ids.ids
        case "chat":
            chat = request.chat
            has_choice = chat.HasField("add_generation_prompt")
            return Conversation(
                [{"role": each.role, "content": each.content} for each in chat.messages],
                chat.template if chat.HasField("template") else None,
                chat.add_generation_prompt if has_choice else True,
            )
    raise RequestError("the request has no prompt; give text, token_ids or chat.")


class _Control(control_pb2_grpc.ControlServicer):
    def __init__(self, gateway: Gateway, ask_cluster: AskCluster) -> None:
        self._gateway = gateway
        self._ask_cluster = ask_cluster

    async def GetStatus(  # noqa: N802 - gRPC's name
        self, request: control_pb2.GetStatusRequest, context: Any
    ) -> control_pb2.GetStatusResponse:
        return await status_of(self._gateway, self._ask_cluster)

    async def SetSpeculation(  # noqa: N802 - gRPC's name
        self, request: control_pb2.SetSpeculationRequest, context: Any
    ) -> control_pb2.SpeculationSettings:
        if not is_from_this_host(context.peer()):
            sentence = "speculation is set from the server's own host; call it there."
            await _abort(context, grpc.StatusCode.PERMISSION_DENIED, sentence)
        change = change_from_proto(request)
        return settings_to_proto(await _answer(context, self._gateway.link.set_speculation(change)))

    async def ExplainSpeculation(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ExplainSpeculationRequest, context: Any
    ) -> control_pb2.ExplainSpeculationResponse:
        step = request.step if request.HasField("step") else None
        asking = self._gateway.link.explain_speculation(step, request.last or 1)
        return account_to_proto(await _answer(context, asking))


def is_from_this_host(peer: str) -> bool:
    """Whether gRPC's name of a peer is that of a socket file or of the loopback."""
    kind, _, address = peer.partition(":")
    host = unquote(address).rpartition(":")[0].strip("[]")
    if kind == "unix":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


async def _answer(context: Any, asking: Awaitable[_Answer]) -> _Answer:
    """What the engine says, or the call ends with its sentence."""
    try:
        return await asking
    except OutriderError as error:
        await _abort(context, code_of(error), str(error))


async def _abort(context: Any, code: grpc.StatusCode, sentence: str) -> NoReturn:
    if len(sentence) > MAX_SENTENCE_CHARS:
        half = MAX_SENTENCE_CHARS // 2  # the end is the remedy
        sentence = f"{sentence[:half]} ... {sentence[-half:]}"
    await context.abort(code, sentence, (MARK,))
    raise AssertionError("abort returned")
