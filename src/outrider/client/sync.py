"""The blocking client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import grpc
from grpc_health.v1 import health_pb2

from outrider.api_types.errors import UnavailableError, error_of
from outrider.api_types.results import Chunk, Completion
from outrider.client import unary
from outrider.client.access import open_channel
from outrider.client.base import BaseClient, BaseStream, Closed
from outrider.client.batches import complete_all
from outrider.client.requests import ChatMessage, Completions, Params, Prompts
from outrider.client.resuming import RELEASE_TIMEOUT_S
from outrider.scheduler.params import SamplingParams
from outrider.text.prompts import Prompt, is_one

_POLL_S = 0.1

P = ParamSpec("P")
T = TypeVar("T")


class Stream(BaseStream):
    """Iterates over the chunks of one request; `completion` accumulates them.

    Leaving it early, as a context manager or by `cancel`, cancels the request.
    """

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                return self._calls.take(next(self._call))
            except grpc.RpcError as error:
                if self._calls.is_complete:
                    raise StopIteration from None
                self._left.wait(self._pause_s(error))
            self._call = self._calls.again()

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
        release = self._leave()
        if release is not None:
            with contextlib.suppress(grpc.RpcError):
                self._calls.server.stub.Release(release, timeout=RELEASE_TIMEOUT_S)

    def result(self) -> Completion:
        """Read to the end."""
        with self:
            for _ in self:
                pass
        return self.completion


def _blocking(
    describe: Callable[P, unary.UnaryCall[T]],
) -> Callable[Concatenate[Client, P], T]:
    """The method that makes a call and waits for its result."""

    @unary.as_method_of(describe)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = describe(*args, **kwargs)
        try:
            return call.parse(call.start(self._server.stub))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    return method


class Client(BaseClient[Stream]):
    """A connection to a server. Thread-safe.

    `api_key` defaults to OUTRIDER_API_KEY. `tls` is True, or a PEM file of trusted authorities; an
    address with https:// also selects TLS. `client_cert` is a PEM file with a certificate and its
    key, or a pair of files.

    Methods that generate take, besides the parameters of `SamplingParams` by name: `model`,
    `request_id`, `priority` (-100 to 100, lower ones run sooner), `cache_salt`, `timeout_s`, the
    timeout of the whole request, and `resumable`.

    With `resume`, a request whose connection is lost resumes at any server that answers at the
    address within `resume_window_s`; its text is the same if the server is deterministic. Requests
    with `resumable` keep running at the server meanwhile.
    """

    _open_channel = staticmethod(open_channel)
    _stream_class = Stream

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
        self._server.stub = Closed(self.address)

    @overload
    def generate(self, prompt: Prompt, params: Params = None, **overrides: Any) -> Completion: ...

    @overload
    def generate(self, prompt: Prompts, params: Params = None, **overrides: Any) -> Completions: ...

    def generate(
        self, prompt: Prompt | Prompts, params: Params = None, **overrides: Any
    ) -> Completion | Completions:
        """Continue a text or a list of token ids; of a list of prompts, each in a list."""
        if is_one(prompt):
            return self.stream(prompt, params, **overrides).result()
        return complete_all(self.stream, prompt, params, overrides)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Completion:
        """Answer a conversation of {"role": ..., "content": ...} messages.

        Takes `chat_template_kwargs`, `add_generation_prompt` and, where the server allows it,
        `chat_template` as well.
        """
        return self.chat_stream(messages, params, **overrides).result()

    status = _blocking(unary.status)
    model_info = _blocking(unary.model_info)
    server_info = _blocking(unary.server_info)
    tokenize = _blocking(unary.tokenize)
    detokenize = _blocking(unary.detokenize)
    set_speculation = _blocking(unary.set_speculation)
    explain_speculation = _blocking(unary.explain_speculation)
    # Operators' methods; with API keys they need one of scope `admin`.
    scale = _blocking(unary.scale)
    roll_out = _blocking(unary.roll_out)
    drain = _blocking(unary.drain)
    abort = _blocking(unary.abort)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the server accepts requests; raises `UnavailableError` on timeout."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._is_ready(left_s):
                self._server.has_answered = True
                return
            time.sleep(min(_POLL_S, left_s))
        raise UnavailableError(
            f"the server at {self.address} was not ready within {timeout_s:g} s; see its log."
        )

    def _is_ready(self, timeout_s: float) -> bool:
        try:
            answer = self._server.stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
