"""The same client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, overload

import grpc

from outrider.client.access import DEFAULT_SERVER, Access, ClientCert, Tls, open_aio_channel
from outrider.client.batches import Closed, complete_all_async
from outrider.client.operating import AsyncOperating
from outrider.client.requests import (
    ChatMessage,
    Completions,
    Params,
    Prompt,
    Prompts,
    Put,
    make_request,
    put_chat,
    put_prompt,
)
from outrider.client.resuming import RELEASE_TIMEOUT_S, RESUME_WINDOW_S, Calls, Server
from outrider.client.sync import BETWEEN_STEPS_TIMEOUT_S, STATUS_TIMEOUT_S
from outrider.gateway.conversations import detokenize_request, tokenize_request
from outrider.gateway.errors import error_of
from outrider.gateway.info_results import ModelInfo, ServerInfo
from outrider.gateway.results import Chunk, Completion, ServerStatus
from outrider.gateway.speculation import (
    SpeculationAccount,
    account_from_proto,
    explain_request,
    set_request,
    settings_from_proto,
)
from outrider.links.speculation import SpeculationSettings
from outrider.proto import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from outrider.scheduler.params import SamplingParams
from outrider.text.prompts import is_one


class AsyncStream:
    """`Stream` for asyncio; cancelling the task that reads it cancels the request."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._call = calls.first()
        self._is_left = False
        self._releasing: asyncio.Task[None] | None = None

    @property
    def completion(self) -> Completion:
        return self._calls.completion

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
                await asyncio.sleep(self._calls.pause_s(error, is_left=self._is_left))
            self._call = self._calls.again()

    def cancel(self) -> None:
        """Has no effect on a request that has ended."""
        self._is_left = True
        self._call.cancel()
        release = self._calls.release()
        if release is not None:
            self._releasing = asyncio.ensure_future(self._release(release))

    async def _release(self, release: generation_pb2.ReleaseRequest) -> None:
        with contextlib.suppress(grpc.RpcError):
            await self._calls.server.generation.Release(release, timeout=RELEASE_TIMEOUT_S)

    async def result(self) -> Completion:
        async for _ in self:
            pass
        return self.completion


class AsyncClient(AsyncOperating):
    """`Client` for asyncio: the same methods, those that wait as coroutines."""

    def __init__(
        self,
        address: str = DEFAULT_SERVER,
        *,
        api_key: str | None = None,
        tls: Tls = None,
        client_cert: ClientCert = None,
        resume: bool = True,
        resume_window_s: float = RESUME_WINDOW_S,
    ) -> None:
        self.address = address
        self._channel = open_aio_channel(address, Access(api_key, tls, client_cert))
        generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._server = Server(generation, address, resume, resume_window_s)
        self._control: Any = control_pb2_grpc.ControlStub(self._channel)

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
        closed: Any = Closed(self.address)
        self._server.generation = self._control = closed

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

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> AsyncStream:
        return self._start(put_prompt(prompt), params, overrides)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Completion:
        return await self.chat_stream(messages, params, **overrides).result()

    def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> AsyncStream:
        return self._start(put_chat(messages, overrides), params, overrides)

    def _start(
        self, put: Put, params: SamplingParams | None, overrides: dict[str, Any]
    ) -> AsyncStream:
        timeout_s = overrides.pop("timeout_s", None)
        request = make_request(put, params, overrides)
        return AsyncStream(Calls(self._server, request, timeout_s))

    async def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServerStatus:
        request = control_pb2.GetStatusRequest()
        try:
            response = await self._control.GetStatus(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return ServerStatus.from_proto(response)

    async def set_speculation(
        self,
        policy: str | None = None,
        max_depth: int | None = None,
        *,
        lift_max_depth: bool = False,
        timeout_s: float = BETWEEN_STEPS_TIMEOUT_S,
    ) -> SpeculationSettings:
        request = set_request(policy, max_depth, lift_max_depth)
        try:
            response = await self._control.SetSpeculation(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return settings_from_proto(response)

    async def explain_speculation(
        self,
        step: int | None = None,
        last: int = 1,
        *,
        timeout_s: float = BETWEEN_STEPS_TIMEOUT_S,
    ) -> SpeculationAccount:
        request = explain_request(step, last)
        try:
            response = await self._control.ExplainSpeculation(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return account_from_proto(response)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool = True,
        timeout_s: float = STATUS_TIMEOUT_S,
        **chat_options: Any,
    ) -> list[int]:
        request = tokenize_request(prompt, add_special_tokens, chat_options)
        try:
            response = await self._server.generation.Tokenize(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        timeout_s: float = STATUS_TIMEOUT_S,
    ) -> str:
        request = detokenize_request(token_ids, skip_special_tokens)
        try:
            response = await self._server.generation.Detokenize(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return str(response.text)

    async def model_info(self, timeout_s: float = STATUS_TIMEOUT_S) -> ModelInfo:
        request = control_pb2.GetModelInfoRequest()
        try:
            response = await self._control.GetModelInfo(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return ModelInfo.from_proto(response)

    async def server_info(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServerInfo:
        request = control_pb2.GetServerInfoRequest()
        try:
            response = await self._control.GetServerInfo(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return ServerInfo.from_proto(response)
