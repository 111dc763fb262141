"""A fake of Outrider's gRPC server; messages are serialized in advance."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from outrider.api_types.convert import PROPOSER_ORIGIN, TARGET_ORIGIN
from outrider.loadtest.fake.http_events import CACHED_TOKENS, PROMPT_TOKENS
from outrider.loadtest.fake.script import DRIP_S, Fault, Script, ScriptPlayer, ServedRequest
from outrider.proto import generation_pb2

_REFUSALS = {
    Fault.TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Fault.INTERNAL: grpc.StatusCode.INTERNAL,
    Fault.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Fault.HANG_UP: grpc.StatusCode.UNAVAILABLE,
}
_BREAKS = {  # mid-stream; gRPC reports a lost connection as a status, too
    Fault.RESET: grpc.StatusCode.UNAVAILABLE,
    Fault.STREAM_ERROR: grpc.StatusCode.INTERNAL,
}
_NO_MESSAGE = b"\xff\xff\xff"
_FOREVER_S = 3600.0


class FakeGrpcServer:
    """Serves a script as `outrider.v1.Generation`. All tokens of an update but the last count as
    drafted. `actor` has the request log."""

    def __init__(
        self, script: Script, host: str = "127.0.0.1", port: int = 0, credentials: Any = None
    ) -> None:
        self.actor = ScriptPlayer(script)
        self._credentials = credentials
        self._host, self._port = host, port
        self._server: Any = None
        self._messages: dict[int, list[bytes]] = {}

    async def __aenter__(self) -> FakeGrpcServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        handler = grpc.unary_stream_rpc_method_handler(self._generate)
        methods = {"Generate": handler}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("outrider.v1.Generation", methods),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self._server)
        address = f"{self._host}:{self._port}"
        if self._credentials is None:
            self._port = self._server.add_insecure_port(address)
        else:
            self._port = self._server.add_secure_port(address, self._credentials)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    @property
    def url(self) -> str:
        return f"grpc{'s' * bool(self._credentials)}://{self._host}:{self._port}"

    @property
    def served(self) -> list[ServedRequest]:
        return self.actor.served

    async def _generate(self, request: bytes, context: Any) -> None:
        message = generation_pb2.GenerateRequest.FromString(request)
        served = self.actor.begin(_prompt_of(message), time.monotonic())
        messages = self._messages_for(message.sampling.max_tokens)
        try:
            await self._answer(served, messages, context)
        except asyncio.CancelledError:
            served.is_closed_early = True
            raise

    async def _answer(self, served: ServedRequest, messages: list[bytes], context: Any) -> None:
        actor, start_s, fault = self.actor, served.received_s, served.fault
        was_stalled = False
        for number, due_s in enumerate(actor.delays(len(messages))):
            now_s = await _until(start_s + due_s)
            if not was_stalled and (stalled_s := actor.stall_delay_s(start_s, now_s)):
                was_stalled = True
                start_s += stalled_s
                now_s = await _until(start_s + due_s)
            if fault is not None and await self._fail(fault, number, messages, context):
                return
            if number == 0:
                served.first_s = now_s
            await context.write(messages[number])
            served.updates = number + 1
        served.last_s = now_s

    async def _fail(self, fault: Fault, number: int, messages: list[bytes], context: Any) -> bool:
        if fault in _REFUSALS:
            await context.abort(_REFUSALS[fault], f"scripted {fault}")
        if fault is Fault.DRIP:
            await asyncio.sleep(DRIP_S)
            return False
        if number < len(messages) // 2:
            return False
        if fault in _BREAKS:
            await context.abort(_BREAKS[fault], f"scripted {fault}")
        if fault is Fault.MALFORMED:
            await context.write(_NO_MESSAGE)
        if fault is Fault.SILENCE:
            await asyncio.sleep(_FOREVER_S)
        return True

    def _messages_for(self, max_tokens: int) -> list[bytes]:
        num_updates = max(self.actor.script.num_updates(max_tokens), 1)
        if num_updates not in self._messages:
            self._messages[num_updates] = _messages_of(self.actor.script, num_updates)
        return self._messages[num_updates]


async def _until(due_s: float) -> float:
    while (left_s := due_s - (now_s := time.monotonic())) > 0:
        await asyncio.sleep(left_s)
    return now_s


def _prompt_of(request: generation_pb2.GenerateRequest) -> str:
    if request.WhichOneof("prompt") == "chat":
        content: str = request.chat.messages[-1].content
        return content
    return str(request.text)


def _messages_of(script: Script, num_updates: int) -> list[bytes]:
    drafted = script.tokens_per_update - 1
    messages = [
        generation_pb2.GenerateResponse(
            request_id="fake-1",
            text=script.word * script.tokens_per_update,
            token_ids=script.token_ids(number),
            origins=[PROPOSER_ORIGIN] * drafted + [TARGET_ORIGIN],
            proposer="fake" if drafted else "",
        )
        for number in range(num_updates)
    ]
    start = messages[0].start
    start.model, start.prompt_tokens = script.model, PROMPT_TOKENS
    last = messages[-1]
    last.end.reason = generation_pb2.FINISH_REASON_LENGTH
    usage, stats = last.summary.usage, last.summary.speculation
    usage.prompt_tokens, usage.cached_tokens = PROMPT_TOKENS, CACHED_TOKENS
    usage.completion_tokens = num_updates * script.tokens_per_update
    stats.rounds = num_updates
    stats.drafted_tokens = stats.accepted_tokens = num_updates * drafted
    stats.block_efficiency = float(script.tokens_per_update)
    return [message.SerializeToString() for message in messages]
