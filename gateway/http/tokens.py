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
    """Token ids of a text or a conversation, as generation would read it."""
    upload = admitted_of(request)[1]
    asked = await read_json(request, gateway, upload, TokenizeRequest)
    special = asked.add_special_tokens is not False
    with naming_fields(TokenizeRequest.model_fields):
        tokens = await gateway.tokenize(
            upload.owner, _prompt(asked), model=asked.model or "", add_special_tokens=special
        )
    facts = gateway.facts
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": None if facts is None else facts.max_model_len,
        "token_strs": None,
    }


@router.post("/detokenize", openapi_extra=described(DetokenizeRequest))
async def detokenize(request: Request, gateway: GatewayOf, caller: CallerOf) -> dict[str, str]:
    """The text of token ids."""
    upload = admitted_of(request)[1]
    asked = await read_json(request, gateway, upload, DetokenizeRequest)
    skip = bool(asked.skip_special_tokens)
    with naming_fields(DetokenizeRequest.model_fields):
        text = await gateway.detokenize(
            upload.owner, asked.tokens, model=asked.model or "", skip_special_tokens=skip
        )
    return {"prompt": text}


def _prompt(asked: TokenizeRequest) -> str | Conversation:
    if (asked.prompt is None) == (asked.messages is None):
        found = "both are" if asked.messages is not None else "neither is"
        raise FieldRefusedError(
            "prompt", f"prompt or messages must be given, but {found}; give one of them."
        )
    if asked.prompt is not None:
        return asked.prompt
    return conversation_of(
        asked.messages or [],
        asked.chat_template,
        asked.add_generation_prompt,
        asked.chat_template_kwargs,
    )
