"""Authorization of every gRPC method: those not named here need the scope `admin`."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
from outrider.errors import CapacityError, OutriderError
from outrider.gateway.auth.caller import Caller, Scope
from outrider.gateway.grpc.calls import OnError, abort, host_of
from outrider.gateway.grpc.connections import GrpcConnections, mark_known

MAX_OPEN_CALLS, MAX_OPEN_CALLS_OF_HOST = 1024, 64
# Probes have no keys.
_OPEN_SERVICES = ("grpc.health.v1.Health",)
_INFER_SERVICES = (
    "outrider.v1.Generation",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)
_INFER_METHODS = (
    "/outrider.v1.Control/GetStatus",
    "/outrider.v1.Control/ExplainSpeculation",
    "/outrider.v1.Control/GetModelInfo",
    "/outrider.v1.Control/GetServerInfo",
)


def scope_of(method: str) -> Scope | None:
    """The scope that "/package.Service/Method" needs; None if it needs no key."""
    service = method.strip("/").partition("/")[0]
    if service in _OPEN_SERVICES:
        return None
    is_for_all = service in _INFER_SERVICES or method in _INFER_METHODS
    return Scope.INFER if is_for_all else Scope.ADMIN


class _OpenCalls:
    """Limits calls that need no key, such as `Watch` of the health service, which clients may keep
    open forever."""

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()

    @contextlib.contextmanager
    def taken(self, host: str) -> Iterator[None]:
        if self._hosts[host] >= MAX_OPEN_CALLS_OF_HOST or self._hosts.total() >= MAX_OPEN_CALLS:
            raise CapacityError(
                "too many calls without a key are open; close some, or retry later."
            )
        self._hosts[host] += 1
        try:
            yield
        finally:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses unauthorized calls before their method runs.

    `identify` returns the caller of a call's context, or raises; `on_error` is called with the
    error. `check_key` raises if a call's metadata has no valid key. `connections` counts the calls
    of each connection.
    """

    def __init__(
        self,
        identify: Callable[[Any], Caller],
        check_key: Callable[[Any], object],
        on_error: OnError,
        connections: GrpcConnections,
    ) -> None:
        self._connections = connections
        self._identify = identify
        self._check_key = check_key
        self._on_error = on_error
        self._open_calls = _OpenCalls()
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}  # by method

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        scope = scope_of(details.method)
        if scope is not None:
            try:
                self._check_key(details.invocation_metadata)
            except OutriderError as error:
                return self._refusing(error)
        guarded = self._guarded.get(details.method)
        if guarded is not None:
            return guarded
        handler = await continuation(details)
        if handler is None:
            return None
        return self._guarded.setdefault(details.method, self._guard(handler, scope))

    def _refusing(self, error: OutriderError) -> grpc.RpcMethodHandler:
        """Ends the call before its request is read, whatever its size: registered as a client
        stream that is never read."""

        async def refuse(requests: Any, context: Any) -> None:
            with self._connections.call(context.peer()):
                self._on_error(error)
                await abort(context, error)

        return grpc.stream_unary_rpc_method_handler(refuse)

    def _guard(self, handler: Any, scope: Scope | None) -> grpc.RpcMethodHandler:
        @contextlib.asynccontextmanager
        async def guarded(context: Any) -> AsyncIterator[None]:
            with (
                self._connections.call(context.peer()) as connection,
                contextlib.ExitStack() as stack,
            ):
                try:
                    if scope is None:
                        stack.enter_context(self._open_calls.taken(host_of(context.peer())))
                    else:
                        caller = self._identify(context)
                        mark_known(connection)
                        caller.require(scope)
                except OutriderError as error:
                    self._on_error(error)
                    await abort(context, error)
                yield

        kinds = {
            (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        }
        method, make = kinds[handler.request_streaming, handler.response_streaming]
        wrap = _checked_generator if inspect.isasyncgenfunction(method) else _checked
        return make(
            wrap(method, guarded),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


_Guard = Callable[[Any], AbstractAsyncContextManager[None]]


def _checked(method: Callable[[Any, Any], Awaitable[Any]], guarded: _Guard) -> Any:
    async def call(request: Any, context: Any) -> Any:
        async with guarded(context):
            return await method(request, context)

    return call


def _checked_generator(method: Callable[[Any, Any], AsyncIterator[Any]], guarded: _Guard) -> Any:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        async with guarded(context):
            async for response in method(request, context):
                yield response

    return call
