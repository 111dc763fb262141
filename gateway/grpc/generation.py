"""The service `Generation`: requests for text over gRPC."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from outrider.api_types.conversations import conversation_from_proto
from outrider.api_types.convert import params_from_request
from outrider.errors import RequestError
from outrider.gateway.auth.callers import Caller
from outrider.gateway.calls import Call
from outrider.gateway.gateway import Gateway
from outrider.gateway.grpc.calls import caller_of, deadline_of
from outrider.gateway.grpc.requests import MAX_INLINE_BYTES
from outrider.gateway.grpc.responses import Responses
from outrider.gateway.limits import Admission
from outrider.gateway.resume import ResumeTokens, digest_of, resumption_from_proto
from outrider.gateway.upload_budget import Upload
from outrider.logs import request_context
from outrider.proto import generation_pb2
from outrider.text.input_processor import ProcessorInput
from outrider.text.messages import Conversation
from outrider.text.outputs import OutputDelta

Admitted: TypeAlias = tuple[Admission, Upload]
_Request = TypeVar("_Request", generation_pb2.GenerateRequest, generation_pb2.ResumeRequest)


class GenerationServicer:
    """The methods of the service; errors they raise become the call's status."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    # `del request` before streaming: large messages must not stay in memory for minutes.

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.GenerateRequest, context: Any, admitted: Admitted
    ) -> None:
        call, wants_spans = await self._read(request, context, admitted, _call)
        del request
        await self._stream(call, wants_spans, admitted, context)

    async def ResumeStream(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.ResumeRequest, context: Any, admitted: Admitted
    ) -> None:
        read = partial(_resumed_call, self._gateway.resume_tokens)
        call, wants_spans = await self._read(request, context, admitted, read)
        del request
        await self._stream(call, wants_spans, admitted, context)

    async def Release(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.ReleaseRequest, context: Any
    ) -> generation_pb2.ReleaseResponse:
        caller = caller_of(self._gateway, context)
        was_held = await self._gateway.release(request.resume_token, caller)
        return generation_pb2.ReleaseResponse(was_held=was_held)

    async def GenerateOnce(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.GenerateRequest, context: Any, admitted: Admitted
    ) -> generation_pb2.GenerateOnceResponse:
        call, wants_spans = await self._read(request, context, admitted, _call)
        del request
        whole = generation_pb2.GenerateOnceResponse()
        async with contextlib.aclosing(self._run(call, wants_spans, admitted)) as running:
            async for responses, delta in running:
                responses.add(delta, whole)
        return whole

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.TokenizeRequest, context: Any, admitted: Admitted
    ) -> generation_pb2.TokenizeResponse:
        deadline_s, owner = deadline_of(context), admitted[1].owner
        if request.ByteSize() <= MAX_INLINE_BYTES:
            prompt = _prompt_to_tokenize(request)
        else:
            pool = self._gateway.preparation.pool
            prompt = await pool.run(owner, deadline_s, _prompt_to_tokenize, request)
        is_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        served = self._gateway.serving(request.model)
        del request
        token_ids = await self._gateway.preparation.tokenize(
            served, owner, prompt, add_special_tokens=is_special, deadline_s=deadline_s
        )
        return generation_pb2.TokenizeResponse(
            token_ids=token_ids, max_model_len=served.facts.max_model_len
        )

    async def Detokenize(  # noqa: N802 - gRPC's name
        self, request: generation_pb2.DetokenizeRequest, context: Any, admitted: Admitted
    ) -> generation_pb2.DetokenizeResponse:
        text = await self._gateway.preparation.detokenize(
            self._gateway.serving(request.model),
            admitted[1].owner,
            request.token_ids,
            skip_special_tokens=request.skip_special_tokens,
            deadline_s=deadline_of(context),
        )
        return generation_pb2.DetokenizeResponse(text=text)

    async def _stream(self, call: Call, want_spans: bool, admitted: Admitted, context: Any) -> None:
        async with contextlib.aclosing(self._run(call, want_spans, admitted)) as running:
            async for responses, delta in running:
                await context.write(responses.message(delta))

    async def _run(
        self, call: Call, want_spans: bool, admitted: Admitted
    ) -> AsyncGenerator[tuple[Responses, OutputDelta], None]:
        """Each delta, and what writes it into a message. Closing it early cancels the request, or
        detaches it if it is resumable."""
        async with self._gateway.session(call) as session:
            admitted[1].release()
            with request_context(session.prepared.request_id):
                parts = (session, self._gateway.model, want_spans)
                if session.held and want_spans:  # detokenizes all that the client has: slow
                    pool = self._gateway.preparation.pool
                    responses = await pool.run(call.owner, call.deadline_s, Responses, *parts)
                else:
                    responses = Responses(*parts)
                # Closed explicitly, not at garbage collection: closing cancels the request.
                async with contextlib.aclosing(session.deltas()) as deltas:
                    async for delta in deltas:
                        yield responses, delta

    async def _read(
        self,
        request: _Request,
        context: Any,
        admitted: Admitted,
        read: Callable[[Caller, _Request], tuple[Call, bool]],
    ) -> tuple[Call, bool]:
        """The call, and whether the client requests text spans."""
        deadline_s, owner = deadline_of(context), admitted[1].owner
        caller = caller_of(self._gateway, context)
        if request.ByteSize() <= MAX_INLINE_BYTES:
            call, wants_spans = read(caller, request)
        else:  # off the event loop: thousands of entries would block every stream
            pool = self._gateway.preparation.pool
            call, wants_spans = await pool.run(owner, deadline_s, read, caller, request)
        call.deadline_s, call.admission, call.owner = deadline_s, admitted[0], owner
        call.admission.count(1, int(call.params.get("n", 1)))
        return call, wants_spans


def _call(caller: Caller, request: generation_pb2.GenerateRequest) -> tuple[Call, bool]:
    call = Call(
        prompt=_prompt(request),
        params=params_from_request(request),
        caller=caller,
        model=request.model,
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        resumable=request.resumable,
        digest=digest_of(request),
    )
    return call, request.want_text_spans


def _resumed_call(
    tokens: ResumeTokens, caller: Caller, request: generation_pb2.ResumeRequest
) -> tuple[Call, bool]:
    digest = digest_of(request.request)
    resume_id = tokens.read(request.resume_token, caller.name, digest, request.seed)
    call, wants_spans = _call(caller, request.request)
    call.resumption = resumption_from_proto(request, resume_id)
    return call, wants_spans


def _prompt_to_tokenize(request: generation_pb2.TokenizeRequest) -> str | Conversation:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "chat":
            return conversation_from_proto(request.chat)
    raise RequestError("the request has no prompt; give text or chat.")


def _prompt(request: generation_pb2.GenerateRequest) -> ProcessorInput:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return array("I", request.token_ids.ids)  # a view would keep the whole message
        case "chat":
            return conversation_from_proto(request.chat)
    raise RequestError("the request has no prompt; give text, token_ids or chat.")
