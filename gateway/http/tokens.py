"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from outrider.errors import FieldRefusedError
from outrider.gateway.http.access import CallerOf, GatewayOf, admitted_of
from outrider.gateway.http.body import described, read_json
from outrider.gateway.http.errors import naming_fields
from outrider.gateway.http.schemas import DetokenizeRequest, TokenizeRequest, conversation_of
from outrider.text.messages import Conversation

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=described(TokenizeRequest))
async def tokenize(request: Request, gateway: GatewayOf, caller: CallerOf) -> dict[str, Any]:
    """Token ids of a text or a conversation, as generation would see them."""
    upload = admitted_of(request)[1]
    body = await read_json(request, gateway, upload, TokenizeRequest)
    special = body.add_special_tokens is not False
    with naming_fields(TokenizeRequest.model_fields):
        prompt, served = _prompt(body), gateway.serving(body.model or "")
        tokens = await gateway.preparation.tokenize(
            served, upload.owner, prompt, add_special_tokens=special
        )
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": served.facts.max_model_len,
        "token_strs": None,
    }


@router.post("/detokenize", openapi_extra=described(DetokenizeRequest))
async def detokenize(request: Request, gateway: GatewayOf, caller: CallerOf) -> dict[str, str]:
    """The text of token ids."""
    upload = admitted_of(request)[1]
    body = await read_json(request, gateway, upload, DetokenizeRequest)
    skip = bool(body.skip_special_tokens)
    with naming_fields(DetokenizeRequest.model_fields):
        served = gateway.serving(body.model or "")
        text = await gateway.preparation.detokenize(
            served, upload.owner, body.tokens, skip_special_tokens=skip
        )
    return {"prompt": text}


def _prompt(body: TokenizeRequest) -> str | Conversation:
    if (body.prompt is None) == (body.messages is None):
        found = "both are" if body.messages is not None else "neither is"
        raise FieldRefusedError(
            "prompt", f"prompt or messages must be given, but {found}; give one of them."
        )
    if body.prompt is not None:
        return body.prompt
    return conversation_of(
        body.messages or [],
        body.chat_template,
        body.add_generation_prompt,
        body.chat_template_kwargs,
    )
