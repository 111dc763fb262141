"""The service `Generation`: requests for text over gRPC."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from outrider.errors import RequestError
from outrider.gateway.callers import Caller
from outrider.gateway.calls import Call
from outrider.gateway.conversations import conversation_from_proto
from outrider.gateway.convert import params_from_request
from outrider.gateway.gateway import Gateway
from outrider.gateway.grpc_calls import caller_of
from outrider.gateway.once import WholeAnswer
from outrider.gateway.responses import Responses
from outrider.gateway.resume import ResumeTokens, digest_of, resumption_from_proto
from outrider.logs import request_context
from outrider.proto import generation_pb2
from outrider.text.front_door import Prompt
from outrider.text.messages import Conversation

MAX_INLINE_BYTES = 64 * 2**10
_Request = TypeVar("_Request", generation_pb2.GenerateRequest, generation_pb2.ResumeRequest)


class GenerationServicer:
    """A method for each of the service; what they raise becomes the call's status."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        call = await self._read(request, context, _call)
        await self._stream(call, request.want_text_spans, context)

    async def ResumeStream(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.ResumeRequest, context: Any
    ) -> None:
        tokens = self._gateway.resume_tokens
        call = await self._read(request, context, partial(_resumed_call, tokens))
        await self._stream(call, request.request.want_text_spans, context)

    async def Release(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.ReleaseRequest, context: Any
    ) -> generation_pb2.ReleaseResponse:
        caller = caller_of(self._gateway, context)
        was_held = await self._gateway.release(request.resume_token, caller)
        return generation_pb2.ReleaseResponse(was_held=was_held)

    async def GenerateOnce(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> generation_pb2.GenerateOnceResponse:
        whole = WholeAnswer()
        call = await self._read(request, context, _call)
        answering = self._responses(call, request.want_text_spans)
        async with contextlib.aclosing(answering) as responses:
            async for response in responses:
                whole.take(response)
        return whole.answer()

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.TokenizeRequest, context: Any
    ) -> generation_pb2.TokenizeResponse:
        match request.WhichOneof("prompt"):
            case "text":
                prompt: str | Conversation = request.text
            case "chat":
                prompt = conversation_from_proto(request.chat)
            case _:
                raise RequestError("the request has no prompt; give text or chat.")
        is_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        token_ids = await self._gateway.tokenize(
            prompt,
            model=request.model,
            add_special_tokens=is_special,
            deadline_s=_deadline_of(context),
        )
        facts = self._gateway.facts
        return generation_pb2.TokenizeResponse(
            token_ids=token_ids, max_model_len=0 if facts is None else facts.max_model_len
        )

    async def Detokenize(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.DetokenizeRequest, context: Any
    ) -> generation_pb2.DetokenizeResponse:
        text = await self._gateway.detokenize(
            request.token_ids,
            model=request.model,
            skip_special_tokens=request.skip_special_tokens,
            deadline_s=_deadline_of(context),
        )
        return generation_pb2.DetokenizeResponse(text=text)

    async def _stream(self, call: Call, want_spans: bool, context: Any) -> None:
        async with contextlib.aclosing(self._responses(call, want_spans)) as responses:
            async for response in responses:
                await context.write(response)

    async def _responses(
        self, call: Call, want_spans: bool
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Closing it early cancels the request, or leaves it to the engine if it is resumable."""
        async with self._gateway.session(call) as session:
            with request_context(session.prepared.request_id):
                parts = (session, self._gateway.model, want_spans)
                if session.held and want_spans:  # which are cut from all that the client has
                    preparing = self._gateway.preparing
                    responses = await preparing.run(call.deadline_s, Responses, *parts)
                else:
                    responses = Responses(*parts)
                # Closed here and now rather than when it is collected: leaving cancels the request.
                async with contextlib.aclosing(session.deltas()) as deltas:
                    async for delta in deltas:
                        yield responses.make(delta)

    async def _read(
        self,
        request: _Request,
        context: Any,
        read: Callable[[_Request, float | None, Caller], Call],
    ) -> Call:
        deadline_s = _deadline_of(context)
        caller = caller_of(self._gateway, context)
        if request.ByteSize() <= MAX_INLINE_BYTES:
            return read(request, deadline_s, caller)
        # Reading millions of entries would hold up every stream.
        return await self._gateway.preparing.run(deadline_s, read, request, deadline_s, caller)


def _deadline_of(context: Any) -> float | None:
    left_s = context.time_remaining()
    return None if left_s is None else time.monotonic() + left_s


def _call(
    request: generation_pb2.GenerateRequest, deadline_s: float | None, caller: Caller
) -> Call:
    return Call(
        prompt=_prompt(request),
        params=params_from_request(request),
        caller=caller,
        model=request.model,
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline_s=deadline_s,
        resumable=request.resumable,
        digest=digest_of(request),
    )


def _resumed_call(
    tokens: ResumeTokens,
    request: generation_pb2.ResumeRequest,
    deadline_s: float | None,
    caller: Caller,
) -> Call:
    digest = digest_of(request.request)
    resume_id = tokens.read(request.resume_token, caller.name, digest, request.seed)
    call = _call(request.request, deadline_s, caller)
    return replace(call, resumption=resumption_from_proto(request, resume_id))


def _prompt(request: generation_pb2.GenerateRequest) -> Prompt | Conversation:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return request.token_ids.ids
        case "chat":
            return conversation_from_proto(request.chat)
    raise RequestError("the request has no prompt; give text, token_ids or chat.")
