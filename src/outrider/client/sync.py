"""A client for threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client.access import DEFAULT_SERVER, Access, ClientCert, Tls, open_channel
from outrider.client.batches import Closed, complete_all
from outrider.client.operating import Operating
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
from outrider.gateway.conversations import detokenize_request, tokenize_request
from outrider.gateway.errors import UnavailableError, error_of
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
from outrider.proto import control_pb2, control_pb2_grpc, generation_pb2_grpc
from outrider.scheduler.params import SamplingParams
from outrider.text.prompts import is_one

STATUS_TIMEOUT_S = 5.0
BETWEEN_STEPS_TIMEOUT_S = 15.0  # a step may be long
_POLL_S = 0.1


class Stream:
    """Iterates over the chunks of one request; `completion` is what they have added up to.

    Leaving it early, as a context manager or by `cancel`, cancels the request.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._call = calls.first()
        self._is_left = threading.Event()

    @property
    def completion(self) -> Completion:
        return self._calls.completion

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                return self._calls.take(next(self._call))
            except grpc.RpcError as error:
                if self._calls.is_complete:
                    raise StopIteration from None
                is_left = self._is_left.is_set()
                self._is_left.wait(self._calls.pause_s(error, is_left=is_left))
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
        self._is_left.set()
        self._call.cancel()
        release = self._calls.release()
        if release is not None:
            with contextlib.suppress(grpc.RpcError):
                self._calls.server.generation.Release(release, timeout=RELEASE_TIMEOUT_S)

    def result(self) -> Completion:
        """Read to the end."""
        with self:
            for _ in self:
                pass
        return self.completion


class Client(Operating):
    """A connection to a server; may be shared by threads.

    `api_key` is that of OUTRIDER_API_KEY if not given. `tls` is True, or the file (PEM) of the
    authorities to trust; an address that begins with https:// asks for it, too. `client_cert` is a
    file (PEM) with a certificate and its key, or one of each.

    Every method that generates takes, besides the parameters of `SamplingParams` by name: `model`,
    `request_id`, `priority` (-100 to 100, lower ones run sooner), `cache_salt`, `timeout_s`, the
    deadline of the whole request, and `resumable`.

    With `resume`, a request whose connection is lost goes on where it was, at whatever answers at
    the address within `resume_window_s`: exactly so if the server is deterministic. Those that are
    `resumable` go on at the server meanwhile.
    """

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
        self._channel = open_channel(address, Access(api_key, tls, client_cert))
        generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._server = Server(generation, address, resume, resume_window_s)
        self._control: Any = control_pb2_grpc.ControlStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

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
        closed: Any = Closed(self.address)
        self._server.generation = self._control = self._health = closed

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

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> Stream:
        """The same, chunk by chunk as it is generated."""
        return self._start(put_prompt(prompt), params, overrides)

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

    def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Stream:
        """The same, chunk by chunk as it is generated."""
        return self._start(put_chat(messages, overrides), params, overrides)

    def _start(self, put: Put, params: SamplingParams | None, overrides: dict[str, Any]) -> Stream:
        timeout_s = overrides.pop("timeout_s", None)
        request = make_request(put, params, overrides)
        return Stream(Calls(self._server, request, timeout_s))

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

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool = True,
        timeout_s: float = STATUS_TIMEOUT_S,
        **chat_options: Any,
    ) -> list[int]:
        """Token ids of a text or of a conversation, which takes the options of `chat`."""
        request = tokenize_request(prompt, add_special_tokens, chat_options)
        try:
            return list(self._server.generation.Tokenize(request, timeout=timeout_s).token_ids)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        timeout_s: float = STATUS_TIMEOUT_S,
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, skip_special_tokens)
        try:
            return str(self._server.generation.Detokenize(request, timeout=timeout_s).text)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def model_info(self, timeout_s: float = STATUS_TIMEOUT_S) -> ModelInfo:
        """The served model, and what requests get that ask for nothing special."""
        request = control_pb2.GetModelInfoRequest()
        try:
            return ModelInfo.from_proto(self._control.GetModelInfo(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def server_info(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServerInfo:
        """The server's version and limits."""
        request = control_pb2.GetServerInfoRequest()
        try:
            return ServerInfo.from_proto(self._control.GetServerInfo(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once the server answers requests; raise `UnavailableError` if it takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._is_ready(left_s):
                self._server.has_answered = True
                return
            time.sleep(min(_POLL_S, left_s))
        raise not_ready(self.address, timeout_s)

    def _is_ready(self, timeout_s: float) -> bool:
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def not_ready(address: str, timeout_s: float) -> UnavailableError:
    return UnavailableError(
        f"the server at {address} was not ready within {timeout_s:g} s; see its log."
    )
