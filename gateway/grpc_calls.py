"""What every gRPC method shares: reading requests, knowing callers, ending with a status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from outrider.errors import OutriderError, RequestError
from outrider.gateway.caller import Caller, is_loopback
from outrider.gateway.errors import metadata_of, status_of
from outrider.gateway.gateway import Gateway

# A status travels in a header, of which 8 KiB are sure to arrive, each byte of a letter as three.
MAX_SENTENCE_CHARS = 500

_Method = Callable[[Any, Any], Awaitable[Any]]
OnError = Callable[[OutriderError], None]
OnFailure = Callable[[Exception], None]


def _unnoticed(error: OutriderError) -> None:
    """Nobody counts it."""


def handler_of(
    service: ServiceDescriptor,
    servicer: object,
    on_failure: OnFailure,
    on_error: OnError = _unnoticed,
) -> grpc.GenericRpcHandler:
    """The methods of a service that the servicer has, as coroutines of a request and a context.

    In place of the generated one, with which bytes that are no request end in UNKNOWN. Errors that
    a method raises end the call with their status and sentence, after `on_error` has heard them;
    `on_failure` hears those that nobody expected.
    """
    handlers = {}
    for name, method in service.methods_by_name.items():
        own = getattr(servicer, name, None)
        if own is None:
            continue  # gRPC answers UNIMPLEMENTED
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[name] = make(
            _guarded(own, method.input_type.name, on_failure, on_error),
            request_deserializer=_reader_of(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _reader_of(kind: type[Message]) -> Callable[[bytes], Message | None]:
    def read(data: bytes) -> Message | None:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return read


def _guarded(method: _Method, wanted: str, on_failure: OnFailure, on_error: OnError) -> _Method:
    async def call(request: Any, context: Any) -> Any:
        try:
            if request is None:
                raise RequestError(
                    f"the request cannot be read; send a {wanted} as the .proto file has it."
                )
            return await method(request, context)
        except OutriderError as error:
            on_error(error)
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            on_failure(error)
            await abort(
                context,
                OutriderError("the server failed in a way it should not; its log has the details."),
            )

    return call


async def abort(context: Any, error: OutriderError) -> NoReturn:
    """End the call with the error's status, its sentence shortened to what arrives."""
    sentence = str(error).encode(errors="backslashreplace").decode()  # halves of characters
    if len(sentence) > MAX_SENTENCE_CHARS:
        half = MAX_SENTENCE_CHARS // 2  # the end is the remedy
        sentence = f"{sentence[:half]} ... {sentence[-half:]}"
    await context.abort(status_of(error), sentence, metadata_of(error))
    raise AssertionError("abort returned")


def caller_of(gateway: Gateway, context: Any) -> Caller:
    """Who calls, by the key in the call's metadata."""
    shown = _shown_keys(context.invocation_metadata())
    return gateway.callers.identify_header(shown, is_local=is_from_this_host(context.peer()))


def check_key(gateway: Gateway, metadata: Any) -> None:
    """Raises `UnauthenticatedError` unless somebody shows this key, or needs none."""
    gateway.callers.identify_header(_shown_keys(metadata), is_local=False)


def _shown_keys(metadata: Any) -> list[str]:
    return [str(value) for name, value in metadata or () if name == "authorization"]


def is_from_this_host(peer: str) -> bool:
    """Whether gRPC's name of a peer is that of a socket file or of the loopback."""
    kind, _, address = peer.partition(":")
    host = unquote(address).rpartition(":")[0].strip("[]")
    if kind == "unix":
        return True
    return is_loopback(host)
