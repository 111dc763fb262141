"""What every gRPC method shares: receiving requests, identifying callers, returning a status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

import grpc
from outrider.api_types.errors import metadata_of, status_of
from outrider.errors import OutriderError
from outrider.gateway.auth.caller import Caller, is_loopback
from outrider.gateway.gateway import Gateway

if TYPE_CHECKING:
    from outrider.gateway.grpc.requests import RequestReceiver

# The status message travels percent-encoded in a header, of which 8 KiB are sure to arrive.
MAX_SENTENCE_CHARS = 500

_Method = Callable[[Any, Any], Awaitable[Any]]
OnError = Callable[[OutriderError], None]
OnFailure = Callable[[Exception], None]


def _ignored(error: OutriderError) -> None:
    """The default: errors are not counted."""


def handler_of(
    service: ServiceDescriptor,
    servicer: object,
    requests: RequestReceiver,
    on_failure: OnFailure,
    on_error: OnError = _ignored,
) -> grpc.GenericRpcHandler:
    """A handler of a service for the methods that the servicer has.

    Replaces the generated one, which receives and parses a request before any code of ours runs.
    Errors that a method raises end the call with their status and message, after `on_error`;
    unexpected ones after `on_failure`.
    """
    handlers = {}
    for name, method in service.methods_by_name.items():
        own = getattr(servicer, name, None)
        if own is None:
            continue  # gRPC answers UNIMPLEMENTED
        make = (
            grpc.stream_stream_rpc_method_handler
            if method.server_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        handlers[name] = make(
            _guarded(
                requests.serve(name, own, GetMessageClass(method.input_type)), on_failure, on_error
            ),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _guarded(
    serve: Callable[[Any], Awaitable[Any]], on_failure: OnFailure, on_error: OnError
) -> _Method:
    async def call(requests: Any, context: Any) -> Any:
        try:
            return await serve(context)
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
    """End the call with the error's status and its message, shortened to fit the header."""
    sentence = str(error).encode(errors="backslashreplace").decode()  # lone surrogates
    if len(sentence) > MAX_SENTENCE_CHARS:
        half = MAX_SENTENCE_CHARS // 2  # the end is the remedy
        sentence = f"{sentence[:half]} ... {sentence[-half:]}"
    await context.abort(status_of(error), sentence, metadata_of(error))
    raise AssertionError("abort returned")


def caller_of(gateway: Gateway, context: Any) -> Caller:
    """The caller, by the key in the call's metadata."""
    shown = _shown_keys(context.invocation_metadata())
    return gateway.callers.identify_header(shown, is_local=is_from_this_host(context.peer()))


def check_key(gateway: Gateway, metadata: Any) -> None:
    """Raises `UnauthenticatedError` unless the metadata has a valid key, or none is needed."""
    gateway.callers.identify_header(_shown_keys(metadata), is_local=False)


def _shown_keys(metadata: Any) -> list[str]:
    return [str(value) for name, value in metadata or () if name == "authorization"]


def is_from_this_host(peer: str) -> bool:
    """Whether gRPC's name of a peer is a Unix socket or a loopback address."""
    return peer.partition(":")[0] == "unix" or is_loopback(host_of(peer))


def host_of(peer: str) -> str:
    """The address in gRPC's name of a peer; empty for a Unix socket."""
    _, _, address = peer.partition(":")
    return unquote(address).rpartition(":")[0].strip("[]")


def deadline_of(context: Any) -> float | None:
    """The deadline of a call, on the clock of `time.monotonic`."""
    left_s = context.time_remaining()
    return None if left_s is None else time.monotonic() + left_s
