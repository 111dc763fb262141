"""The same client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import grpc

from outrider.api_types.errors import error_of
from outrider.api_types.results import Chunk, Completion
from outrider.client import unary
from outrider.client.access import open_aio_channel
from outrider.client.base import BaseClient, BaseStream, Closed
from outrider.client.batches import complete_all_async
from outrider.client.requests import ChatMessage, Completions, Params, Prompts
from outrider.client.resuming import RELEASE_TIMEOUT_S, Calls
from outrider.proto import generation_pb2
from outrider.scheduler.params import SamplingParams
from outrider.text.prompts import Prompt, is_one

P = ParamSpec("P")
T = TypeVar("T")


class AsyncStream(BaseStream):
    """`Stream` for asyncio; cancelling the task that reads it cancels the request."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._releasing: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        try:
            response = await self._next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._calls.take(response)

    async def _next(self) -> Any:
        while True:
            try:
                return await self._call.read()
            except grpc.RpcError as error:
                if self._calls.is_complete:
                    return grpc.aio.EOF
                await asyncio.sleep(self._pause_s(error))
            self._call = self._calls.again()

    def cancel(self) -> None:
        """Has no effect on a request that has ended."""
        release = self._leave()
        if release is not None:
            self._releasing = asyncio.ensure_future(self._release(release))

    async def _release(self, release: generation_pb2.ReleaseRequest) -> None:
        with contextlib.suppress(grpc.RpcError):
            await self._calls.server.stub.Release(release, timeout=RELEASE_TIMEOUT_S)

    async def result(self) -> Completion:
        async for _ in self:
            pass
        return self.completion


def _awaited(
    describe: Callable[P, unary.UnaryCall[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The coroutine method that makes a call and awaits its result."""

    @unary.as_method_of(describe)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = describe(*args, **kwargs)
        try:
            return call.parse(await call.start(self._server.stub))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    return method


class AsyncClient(BaseClient[AsyncStream]):
    """`Client` for asyncio: the same methods, those that wait as coroutines."""

    _open_channel = staticmethod(open_aio_channel)
    _stream_class = AsyncStream

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()
        self._server.stub = Closed(self.address)

    @overload
    async def generate(
        self, prompt: Prompt, params: Params = None, **overrides: Any
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompt: Prompts, params: Params = None, **overrides: Any
    ) -> Completions: ...

    async def generate(
        self, prompt: Prompt | Prompts, params: Params = None, **overrides: Any
    ) -> Completion | Completions:
        if is_one(prompt):
            return await self.stream(prompt, params, **overrides).result()
        return await complete_all_async(self.stream, prompt, params, overrides)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Completion:
        return await self.chat_stream(messages, params, **overrides).result()

    status = _awaited(unary.status)
    model_info = _awaited(unary.model_info)
    server_info = _awaited(unary.server_info)
    tokenize = _awaited(unary.tokenize)
    detokenize = _awaited(unary.detokenize)
    set_speculation = _awaited(unary.set_speculation)
    explain_speculation = _awaited(unary.explain_speculation)
    scale = _awaited(unary.scale)
    roll_out = _awaited(unary.roll_out)
    drain = _awaited(unary.drain)
    abort = _awaited(unary.abort)
