"""Talking to a server.

    with Client("localhost:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)

Parameters are those of `SamplingParams`. What a server refuses is raised as the error the engine
itself would raise, with its sentence. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import OutriderError, RequestError
from outrider.gateway.convert import put_params
from outrider.gateway.errors import (
    DeadlineError,
    RequestCancelledError,
    RequestIdInUseError,
    UnavailableError,
    UnknownModelError,
    error_of,
)
from outrider.gateway.results import Chunk, Completion, Sample, ServerStatus
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

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineError",
    "RequestCancelledError",
    "RequestIdInUseError",
    "Sample",
    "ServerStatus",
    "SpeculationAccount",
    "SpeculationSettings",
    "Stream",
    "UnavailableError",
    "UnknownModelError",
    "chat_request",
    "prompt_request",
]

DEFAULT_SERVER = "localhost:50051"
STATUS_TIMEOUT_S = 5.0
BETWEEN_STEPS_TIMEOUT_S = 15.0  # a step may be long
_POLL_S = 0.1

Prompt: TypeAlias = str | Sequence[int]
ChatMessage: TypeAlias = Mapping[str, str]


class Stream:
    """Iterates over the chunks of one request; `completion` is what they have added up to.

    Leaving it early, as a context manager or by `cancel`, cancels the request.
    """

    def __init__(self, call: Any, address: str) -> None:
        self.completion = Completion()
        self._call = call
        self._address = address

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            return self.completion.take(next(self._call))
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Has no effect on a request that has ended."""
        self._call.cancel()

    def result(self) -> Completion:
        """Read to the end."""
        with self:
            for _ in self:
                pass
        return self.completion


class Client:
    """A connection to a server; may be shared by threads.

    Every method that generates takes, besides the parameters of `SamplingParams` by name: `model`,
    `request_id`, `priority` (-100 to 100, lower ones run sooner), and `timeout_s`, the deadline of
    the whole request.
    """

    def __init__(self, address: str = DEFAULT_SERVER) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> Completion:
        """Continue a text or a list of token ids."""
        return self.stream(prompt, params, **overrides).result()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> Stream:
        """The same, chunk by chunk as it is generated."""
        return self._start(_put_prompt(prompt), params, overrides)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Completion:
        """Answer a conversation of {"role": ..., "content": ...} messages."""
        return self.chat_stream(messages, params, **overrides).result()

    def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Stream:
        """The same, chunk by chunk as it is generated."""
        return self._start(_put_chat(messages), params, overrides)

    def _start(self, put: _Put, params: SamplingParams | None, overrides: dict[str, Any]) -> Stream:
        timeout_s = overrides.pop("timeout_s", None)
        request = _request(put, params, overrides)
        return Stream(self._generation.Generate(request, timeout=timeout_s), self.address)

    def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServerStatus:
        request = control_pb2.GetStatusRequest()
        try:
            return ServerStatus.from_proto(self._control.GetStatus(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def set_speculation(
        self,
        policy: str | None = None,
        max_depth: int | None = None,
        *,
        lift_max_depth: bool = False,
        timeout_s: float = BETWEEN_STEPS_TIMEOUT_S,
    ) -> SpeculationSettings:
        """Change the server's policy, or the most drafts of any request, from its next step on;
        what is not given stays. `lift_max_depth` leaves each request its own limit."""
        request = set_request(policy, max_depth, lift_max_depth)
        try:
            return settings_from_proto(self._control.SetSpeculation(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def explain_speculation(
        self,
        step: int | None = None,
        last: int = 1,
        *,
        timeout_s: float = BETWEEN_STEPS_TIMEOUT_S,
    ) -> SpeculationAccount:
        """A step, or the last ones: what was weighed, what was chosen, what came of it."""
        request = explain_request(step, last)
        try:
            return account_from_proto(self._control.ExplainSpeculation(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once the server answers requests; raise `UnavailableError` if it takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._is_ready(left_s):
                return
            time.sleep(min(_POLL_S, left_s))
        raise _not_ready(self.address, timeout_s)

    def _is_ready(self, timeout_s: float) -> bool:
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class AsyncStream:
    """`Stream` for asyncio; cancelling the task that reads it cancels the request."""

    def __init__(self, call: Any, address: str) -> None:
        self.completion = Completion()
        self._call = call
        self._address = address

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return self.completion.take(response)

    def cancel(self) -> None:
        self._call.cancel()

    async def result(self) -> Completion:
        async for _ in self:
            pass
        return self.completion


class AsyncClient:
    """`Client` for asyncio: the same methods, those that wait as coroutines."""

    def __init__(self, address: str = DEFAULT_SERVER) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

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

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> Completion:
        return await self.stream(prompt, params, **overrides).result()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> AsyncStream:
        return self._start(_put_prompt(prompt), params, overrides)

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
        return self._start(_put_chat(messages), params, overrides)

    def _start(
        self, put: _Put, params: SamplingParams | None, overrides: dict[str, Any]
    ) -> AsyncStream:
        timeout_s = overrides.pop("timeout_s", None)
        request = _request(put, params, overrides)
        return AsyncStream(self._generation.Generate(request, timeout=timeout_s), self.address)

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


# -- requests ---------------------------------------------------------------------------------

_Put: TypeAlias = Callable[[generation_pb2.GenerateRequest], None]
"""Writes the prompt into a request."""

# A long answer with log-probabilities of a long prompt may take more than gRPC's 4 MiB.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 * 2**20),)
_OF_THE_REQUEST = ("model", "request_id", "priority", "want_text_spans")


def prompt_request(
    prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
) -> generation_pb2.GenerateRequest:
    """The message `Client.generate` sends, for those who bring a connection of their own."""
    return _request(_put_prompt(prompt), params, overrides)


def chat_request(
    messages: Sequence[ChatMessage], params: SamplingParams | None = None, **overrides: Any
) -> generation_pb2.GenerateRequest:
    """The message `Client.chat` sends, likewise."""
    return _request(_put_chat(messages), params, overrides)


def _request(
    put: _Put, params: SamplingParams | None, overrides: dict[str, Any]
) -> generation_pb2.GenerateRequest:
    """Raises before anything is sent if it cannot be right."""
    own = {name: overrides.pop(name) for name in _OF_THE_REQUEST if name in overrides}
    checked = SamplingParams.from_mapping(_given(params) | overrides)
    try:
        request = generation_pb2.GenerateRequest(**own)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request has a wrong {', '.join(own)}: {error}.") from None
    try:
        put(request)
        put_params(request, checked)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RequestError(
            f"the request holds half a character ({half!r}); give whole ones."
        ) from None
    return request


def _given(params: SamplingParams | None) -> dict[str, Any]:
    if params is None:
        return {}
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _put_prompt(prompt: Prompt) -> _Put:
    def put(request: generation_pb2.GenerateRequest) -> None:
        if isinstance(prompt, str):
            request.text = prompt
            return
        try:
            request.token_ids.ids.extend(prompt)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"the prompt must be text or a list of token ids >= 0: {error}."
            ) from None
        request.token_ids.SetInParent()

    return put


def _put_chat(messages: Sequence[ChatMessage]) -> _Put:
    def put(request: generation_pb2.GenerateRequest) -> None:
        for message in messages:
            try:
                request.chat.messages.add(**message)
            except (TypeError, ValueError) as error:
                raise RequestError(
                    f"a message is {message!r}; give {{'role': ..., 'content': ...}}: {error}."
                ) from None
        request.chat.SetInParent()

    return put


def _not_ready(address: str, timeout_s: float) -> OutriderError:
    return UnavailableError(
        f"the server at {address} was not ready within {timeout_s:g} s; see its log."
    )
