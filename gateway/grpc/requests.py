"""Receives the request of a gRPC call.

Every method is registered as a client stream whose first message is the request: gRPC then buffers
no more than a flow-control window until the message is read. By then the key is charged and the
upload budget reserved.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

import grpc
from outrider.errors import RequestError
from outrider.gateway.gateway import Gateway
from outrider.gateway.grpc.calls import caller_of, deadline_of, host_of
from outrider.gateway.grpc.proto_scan import check_counts
from outrider.gateway.http.connections import MIN_BODY_BYTES_PER_S
from outrider.gateway.resume import MAX_HELD_TOKENS
from outrider.gateway.upload_budget import Upload, UploadBudget

# Larger requests are parsed and converted in threads: every two bytes may be a message.
MAX_INLINE_BYTES = 8 * 2**10
MAX_OTHERS = 8  # maximum-size requests of uncharged methods, as their budget
CHARGED_METHODS = frozenset({"Generate", "GenerateOnce", "ResumeStream", "Tokenize", "Detokenize"})
"""The methods of `Generation` that are charged; `Release` must always get through."""

_Method = Callable[..., Awaitable[Any]]


class RequestReceiver:
    """Receives requests for the methods of a service."""

    def __init__(self, gateway: Gateway, charged: frozenset[str] = frozenset()) -> None:
        self._gateway = gateway
        self._charged = charged
        # A separate budget: probes and operators' commands do not wait for prompts.
        self._others = UploadBudget(MAX_OTHERS * gateway.config.max_body_bytes)

    def serve(self, name: str, method: _Method, kind: type[Message]) -> _Method:
        """The method as a handler of a call's context. A charged one also gets what
        `Gateway.admitted` yields. It holds the only reference to the request, so it can free it."""
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
        return await self._gateway.preparation.pool.run(
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
