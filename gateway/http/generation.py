"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request

from outrider import __version__
from outrider.errors import FieldRefusedError, shown
from outrider.gateway.auth.callers import Caller
from outrider.gateway.calls import Call
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.access import Admitted, CallerOf, GatewayOf, admitted_of
from outrider.gateway.http.answers import CompleteResponse, ParsedRequest, ResponseWriter
from outrider.gateway.http.body import described, read_json
from outrider.gateway.http.choices import ChoiceOptions
from outrider.gateway.http.fields import refuse_unknown, warning_of
from outrider.gateway.http.labels import clean_label, label_in
from outrider.gateway.http.logprobs import TokenNames
from outrider.gateway.http.schemas import ChatRequest, CompletionRequest, GenerationRequest
from outrider.gateway.http.stream import StreamedResponse
from outrider.links.gateway_messages import EngineFacts
from outrider.text.input_processor import ProcessorInput

logger = logging.getLogger(__name__)
router = APIRouter(tags=["generation"])

TIMEOUT = "X-Request-Timeout"
MAX_TIMEOUT_S = 7 * 24 * 3600.0


@router.post("/v1/completions", openapi_extra=described(CompletionRequest))
async def create_completion(
    request: Request, gateway: GatewayOf, caller: CallerOf
) -> ResponseWriter:
    """Complete a text."""
    deadline_s, admitted = deadline_of(request), admitted_of(request)
    body = await read_json(request, gateway, admitted[1], CompletionRequest, deadline_s)
    prompts = body.prompts()
    return _response(request, gateway, caller, admitted, body, prompts, deadline_s, is_chat=False)


@router.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
async def create_chat_completion(
    request: Request, gateway: GatewayOf, caller: CallerOf
) -> ResponseWriter:
    """Answer a conversation."""
    deadline_s, admitted = deadline_of(request), admitted_of(request)
    body = await read_json(request, gateway, admitted[1], ChatRequest, deadline_s)
    prompts = [body.conversation()]
    return _response(request, gateway, caller, admitted, body, prompts, deadline_s, is_chat=True)


def deadline_of(request: Request) -> float | None:
    """The client's deadline, on the clock of `time.monotonic`; None without one."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return None
    try:
        left_s = float(given)
    except ValueError:
        left_s = math.nan
    if not 0 < left_s <= MAX_TIMEOUT_S:
        raise FieldRefusedError(
            TIMEOUT,
            f"{TIMEOUT} is {shown(given)}; it must be seconds, above 0 and at most "
            f"{MAX_TIMEOUT_S:.0f}.",
        )
    return time.monotonic() + left_s


def _response(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    admitted: Admitted,
    body: GenerationRequest,
    prompts: Sequence[ProcessorInput],
    deadline_s: float | None,
    *,
    is_chat: bool,
) -> ResponseWriter:
    field_names = frozenset(type(body).model_fields)
    warning = _warning(body.unknown, field_names, gateway.config.unknown_fields)
    num_samples = max(body.n or 1, 1)
    _check_samples(len(prompts), num_samples, gateway.config.max_samples)
    admission, upload = admitted
    admission.count(len(prompts), num_samples)
    response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    params = body.params()
    label = label_in(request.scope["headers"]) or clean_label(body.request_id or "")
    calls = [
        Call(
            prompt=prompt,
            params=params,
            caller=caller,
            owner=upload.owner,
            admission=admission,
            model=body.model or "",
            request_id=response_id if len(prompts) == 1 else f"{response_id}-{number}",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            deadline_s=deadline_s,
            protocol="http",
            label=label,
        )
        for number, prompt in enumerate(prompts)
    ]
    parsed = ParsedRequest(
        calls=calls,
        upload=upload,
        num_samples=num_samples,
        options=ChoiceOptions(
            is_chat=is_chat,
            token_ids=bool(body.return_token_ids),
            speculation=bool(body.return_speculation),
            prompt_logprobs=body.prompt_logprobs is not None,
            names=TokenNames(as_ids=bool(body.return_tokens_as_token_ids)),
        ),
        response_id=response_id,
        label=label,
        model=gateway.model,
        fingerprint=request.app.state.fingerprints.of(gateway.facts),
        field_names=field_names,
        warning=warning,
    )
    if not body.stream:
        return CompleteResponse(gateway, parsed)
    return StreamedResponse(
        gateway,
        parsed,
        wants_usage=body.wants_usage,
        wants_usage_always=body.wants_usage_always,
    )


def _warning(unknown: list[str], known: frozenset[str], treatment: str) -> str:
    """The response header about unknown fields, or ""."""
    if not unknown:
        return ""
    if treatment == "refuse":
        raise refuse_unknown(unknown[0], known)
    warning = warning_of(unknown, known)
    logger.debug("a request has %s", warning)
    return warning


def _check_samples(num_prompts: int, num_samples: int, limit: int) -> None:
    if num_prompts * num_samples <= limit:
        return
    prompts = "" if num_prompts == 1 else f" for each of {num_prompts} prompts"
    raise FieldRefusedError(
        "n",
        f"n is {num_samples}{prompts}; a request may have {limit} texts (server.max_samples), so "
        "ask for fewer.",
    )


class Fingerprints:
    """`system_fingerprint`: changes with release and settings, which a seed's text depends on."""

    def __init__(self) -> None:
        self._known: tuple[EngineFacts | None, str] = (None, "")

    def of(self, facts: EngineFacts | None) -> str:
        if self._known[0] is not facts:
            settings = json.dumps([__version__, facts and facts.settings], default=str)
            self._known = facts, f"fp_{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
        return self._known[1]
