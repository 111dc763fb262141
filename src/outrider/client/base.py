"""What the blocking and the asyncio client share: all but the waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from grpc_health.v1.health_pb2_grpc import HealthStub

from outrider.api_types.results import Completion
from outrider.client.access import DEFAULT_SERVER, Access, ClientCert, Tls
from outrider.client.requests import (
    ChatMessage,
    Put,
    make_request,
    put_chat,
    put_prompt,
)
from outrider.client.resuming import RESUME_WINDOW_S, Calls, ServerEndpoint
from outrider.errors import RequestError
from outrider.proto import generation_pb2
from outrider.proto.control_pb2_grpc import ControlStub
from outrider.proto.generation_pb2_grpc import GenerationStub
from outrider.scheduler.params import SamplingParams
from outrider.text.prompts import Prompt


class Stub:
    """The methods of all services of a server."""

    def __init__(self, channel: Any) -> None:
        for service in (GenerationStub, ControlStub, HealthStub):
            vars(self).update(vars(service(channel)))


class Closed:
    """Replaces a closed client's stub: every call raises."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __getattr__(self, name: str) -> NoReturn:
        raise RequestError(f"this client of {self._address} was closed; make another to ask again.")


class BaseStream:
    """One request and its present call."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._call = calls.first()
        self._left = threading.Event()  # its setting also ends a pause

    @property
    def completion(self) -> Completion:
        return self._calls.completion

    def _pause_s(self, error: Any) -> float:
        return self._calls.pause_s(error, is_left=self._left.is_set())

    def _leave(self) -> generation_pb2.ReleaseRequest | None:
        """Cancel the call. Returns what else to send."""
        self._left.set()
        self._call.cancel()
        return self._calls.release()


StreamT = TypeVar("StreamT", bound=BaseStream)


class BaseClient(Generic[StreamT]):
    """The connection and the requests. A subclass names its kind of channel and of stream."""

    _open_channel: Callable[[str, Access], Any]
    _stream_class: type[StreamT]

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
        self._channel = self._open_channel(address, Access(api_key, tls, client_cert))
        self._server = ServerEndpoint(Stub(self._channel), address, resume, resume_window_s)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> StreamT:
        """`generate` as a stream of chunks."""
        return self._start(put_prompt(prompt), params, overrides)

    def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> StreamT:
        """`chat` as a stream of chunks."""
        return self._start(put_chat(messages, overrides), params, overrides)

    def _start(self, put: Put, params: SamplingParams | None, overrides: dict[str, Any]) -> StreamT:
        timeout_s = overrides.pop("timeout_s", None)
        request = make_request(put, params, overrides)
        return self._stream_class(Calls(self._server, request, timeout_s))
