"""Target for Outrider's gRPC API."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError

from outrider.api_types.convert import FINISH_REASON_NAMES, PROPOSER_ORIGIN
from outrider.client import CHANNEL_OPTIONS, chat_request, prompt_request
from outrider.errors import ConfigError, OutriderError
from outrider.loadtest.records import MAX_VALUE, CountedBy, RequestSpeculation
from outrider.loadtest.requests import BenchRequest
from outrider.loadtest.targets.base import Reply, TargetFault, TargetSpec
from outrider.loadtest.targets.retries import OverloadedFault, with_retries
from outrider.loadtest.targets.rounds import add_counts, rounds_by_accepted
from outrider.proto import generation_pb2
from outrider.scheduler.params import SamplingParams

_METHOD = "/outrider.v1.Generation/Generate"
_OPEN_S = 5.0
_MAX_MESSAGE_CHARS = 300
_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # without it, channels share one connection
)
_SHORT = {grpc.StatusCode.DEADLINE_EXCEEDED: "deadline"}
# gRPC's equivalents of 429 and 503.
_NO_ROOM = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class GrpcTarget:
    """Round-robins requests over channels. Extras are parameters of `SamplingParams`."""

    outlives_shifts = False

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        parts = urlsplit(spec.url)
        self._address = parts.netloc
        self._is_secure = parts.scheme == "grpcs"
        if self._is_secure and spec.insecure:
            raise ConfigError(
                f"the target {spec.url} cannot skip the certificate check, which gRPC always does; "
                "name the root certificate in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH."
            )
        try:
            SamplingParams.from_mapping(spec.extras)
        except OutriderError as error:
            raise ConfigError(f"the extras of {spec.url} are wrong: {error}") from None
        self._metadata = [_entry(name.lower(), value) for name, value in spec.headers.items()]
        if spec.api_key is not None:
            self._metadata.append(("authorization", f"Bearer {spec.api_key}"))
        self._channels: list[Any] = []
        self._calls: Any = itertools.cycle(())

    async def open(self) -> None:
        for _ in range(max(self._spec.channels, 1)):
            if self._is_secure:
                credentials = grpc.ssl_channel_credentials()
                channel = grpc.aio.secure_channel(self._address, credentials, _OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(self._address, _OPTIONS)
            self._channels.append(channel)
        self._calls = itertools.cycle(
            [
                channel.unary_stream(
                    _METHOD,
                    request_serializer=generation_pb2.GenerateRequest.SerializeToString,
                )
                for channel in self._channels
            ]
        )
        try:
            async with asyncio.timeout(_OPEN_S):
                await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        except TimeoutError:
            await self.close()
            raise TargetFault(
                "unavailable", f"{self._address} has not answered within {_OPEN_S:g} s"
            ) from None

    async def close(self) -> None:
        channels, self._channels = self._channels, []
        self._calls = itertools.cycle(())
        await asyncio.gather(*(channel.close() for channel in channels))

    async def send(self, request: BenchRequest, reply: Reply) -> None:
        try:
            message = self._request(request)
        except OutriderError as error:
            raise TargetFault("invalid argument", str(error)[:_MAX_MESSAGE_CHARS]) from None
        reply.counted_by = CountedBy.IDS
        reply.sending()
        await with_retries(lambda: self._attempt(message, reply), reply, max(self._spec.retries, 0))

    async def _attempt(self, message: generation_pb2.GenerateRequest, reply: Reply) -> None:
        start = next(self._calls, None)
        if start is None:
            raise TargetFault("closed", "the target was closed")
        call = start(message, metadata=self._metadata or None)
        try:
            await _read(call, reply)
        except grpc.RpcError as error:
            raise _fault_of(error, is_untouched=not reply.update_s) from None
        finally:
            call.cancel()  # no effect on a finished call

    def _request(self, request: BenchRequest) -> generation_pb2.GenerateRequest:
        values: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignores_eos,
            "seed": request.seed,
            **self._spec.extras,
        }
        if self._spec.model is not None:
            values["model"] = self._spec.model
        if request.messages:
            messages = [{"role": m.role, "content": m.content} for m in request.messages]
            return chat_request(messages, **values)
        if request.token_ids is not None:
            return prompt_request(request.token_ids, **values)
        return prompt_request(request.text or "", **values)


def _entry(name: str, value: str) -> tuple[str, str | bytes]:
    """gRPC requires bytes for metadata keys ending in -bin."""
    return name, value.encode() if name.endswith("-bin") else value


async def _read(call: Any, reply: Reply) -> None:
    """Reads all samples to the end. Hot loop: its cost per message bounds the client's rate."""
    origins: dict[int, list[int]] = {}
    summary: Any = None
    read, end, parse = call.read, grpc.aio.EOF, generation_pb2.GenerateResponse.FromString
    try:
        while (message := await read()) is not end:
            response = parse(message)
            ids = response.token_ids
            if ids:
                reply.update(len(ids))
                reply.token_ids += ids
                origins.setdefault(response.index, []).extend(response.origins)
            if response.text:
                reply.pieces.append(response.text)
            if response.HasField("start"):
                reply.prompt_tokens = response.start.prompt_tokens
            if response.HasField("end"):
                reply.finish = FINISH_REASON_NAMES.get(response.end.reason, "unknown")
            if response.HasField("summary"):
                summary = response.summary
    except DecodeError as error:
        raise TargetFault("malformed", str(error)[:_MAX_MESSAGE_CHARS]) from None
    finally:
        _settle(reply, summary, origins)
    if summary is None:
        raise TargetFault("cut off", "the stream ended without its summary")


def _settle(reply: Reply, summary: Any, origins: dict[int, list[int]]) -> None:
    if not origins and summary is None:
        return
    speculation = RequestSpeculation()
    for of_sample in origins.values():
        add_counts(
            speculation.rounds_by_accepted,
            rounds_by_accepted(origin == PROPOSER_ORIGIN for origin in of_sample),
        )
    if summary is not None:
        reply.prompt_tokens = summary.usage.prompt_tokens
        reply.cached_tokens = summary.usage.cached_tokens
        stats = summary.speculation
        speculation.rounds = stats.rounds
        speculation.drafted, speculation.accepted = stats.drafted_tokens, stats.accepted_tokens
        if (
            max(speculation.rounds, speculation.drafted, speculation.accepted) < MAX_VALUE
        ):  # else the counts are invalid
            reply.speculated = speculation


def _fault_of(error: Any, *, is_untouched: bool) -> TargetFault:
    code = error.code()
    kind = _SHORT.get(code, code.name.lower().replace("_", " "))
    message = (error.details() or "")[:_MAX_MESSAGE_CHARS]
    if code in _NO_ROOM and is_untouched:
        return OverloadedFault(kind, message)
    return TargetFault(kind, message)
