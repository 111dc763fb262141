"""How the request of a gRPC call is received.

Every call is registered as if its client sent a stream, of which the first message is the request:
so gRPC holds no more of it than a window until it is asked for. By then the key is charged and
there is room for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from outrider.errors import RequestError
from outrider.gateway.gateway import Gateway
from outrider.gateway.grpc_calls import caller_of, deadline_of, host_of
from outrider.gateway.http.connections import MIN_BODY_BYTES_PER_S
from outrider.gateway.proto_scan import check_counts
from outrider.gateway.reading import Reading, Upload
from outrider.gateway.resume import MAX_HELD_TOKENS

# Larger ones are parsed and converted in threads: two bytes may be a message.
MAX_INLINE_BYTES = 8 * 2**10
MAX_OTHERS = 8  # requests of methods that are not charged, if all are as large as can be
CHARGED_METHODS = frozenset({"Generate", "GenerateOnce", "ResumeStream", "Tokenize", "Detokenize"})
"""Those of the service `Generation` that cost something; `Release` must get through always."""

_Method = Callable[..., Awaitable[Any]]


class Requests:
    """Receives requests for the methods of a service."""

    def __init__(self, gateway: Gateway, charged: frozenset[str] = frozenset()) -> None:
        self._gateway = gateway
        self._charged = charged
        # Probes and orders do not wait for uploads of prompts.
        self._others = Reading(MAX_OTHERS * gateway.config.max_body_bytes)

    def serve(self, name: str, method: _Method, kind: type[Message]) -> _Method:
        """The method as one of a call's context. One that is charged gets what `Gateway.admitted`
        gives as well. It is the only holder of the request, so that it may let go of it."""
        gateway = self._gateway

        async def serve_charged(context: Any) -> Any:
            caller, host = caller_of(gateway, context), host_of(context.peer())
            with gateway.admitted(caller, host) as admitted:
                request = self._receive(kind, context, admitted[1])
                return await method(await request, context, admitted)

        async def serve(context: Any) -> Any:
            with self._others.upload(host_of(context.peer())) as upload:
                return await method(await self._receive(kind, context, upload), context)

        return serve_charged if name in self._charged else serve

    async def _receive(self, kind: type[Message], context: Any, upload: Upload) -> Message:
        config = self._gateway.config
        await upload.reserve(config.max_body_bytes)
        slowest_s = config.header_timeout_s + config.max_body_bytes / MIN_BODY_BYTES_PER_S
        async with upload.receiving(slowest_s):
            data = await context.read()
        if data is grpc.aio.EOF:
            data = None
        upload.received(len(data or b""))
        if data is None or len(data) <= MAX_INLINE_BYTES:
            return _parsed(kind, data)
        facts = self._gateway.facts
        max_ids = MAX_HELD_TOKENS
        if facts is not None:
            max_ids = max(max_ids, facts.max_model_len, facts.vocab_size)
        return await self._gateway.preparing.run(
            upload.owner, deadline_of(context), _counted_and_parsed, kind, data, max_ids
        )


def _counted_and_parsed(kind: type[Message], data: bytes, max_ids: int) -> Message:
    check_counts(data, kind.DESCRIPTOR, max_ids)
    return _parsed(kind, data)


def _parsed(kind: type[Message], data: bytes | None) -> Message:
    try:
        if data is not None:
            return kind.FromString(data)
    except DecodeError:
        pass
    raise RequestError(
        f"the request cannot be read; send a {kind.DESCRIPTOR.name} as the .proto file has it."
    )
