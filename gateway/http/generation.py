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
from outrider.gateway.callers import Caller
from outrider.gateway.calls import Call
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.access import Admitted, CallerOf, GatewayOf, admitted_of
from outrider.gateway.http.answers import Answer, Asked, WholeAnswer
from outrider.gateway.http.body import described, read_json
from outrider.gateway.http.choices import Wanted
from outrider.gateway.http.fields import refuse_unknown, warning_of
from outrider.gateway.http.labels import clean_label, label_in
from outrider.gateway.http.logprobs import TokenNames
from outrider.gateway.http.schemas import ChatRequest, CompletionRequest, GenerationRequest
from outrider.gateway.http.stream import StreamedAnswer
from outrider.links.gateway_messages import EngineFacts
from outrider.text.front_door import Prompt
from outrider.text.messages import Conversation

logger = logging.getLogger(__name__)
router = APIRouter(tags=["generation"])

TIMEOUT = "X-Request-Timeout"
MAX_TIMEOUT_S = 7 * 24 * 3600.0


@router.post("/v1/completions", openapi_extra=described(CompletionRequest))
async def create_completion(request: Request, gateway: GatewayOf, caller: CallerOf) -> Answer:
    """Go on with a text."""
    deadline_s, admitted = deadline_of(request), admitted_of(request)
    asked = await read_json(request, gateway, admitted[1], CompletionRequest, deadline_s)
    prompts = asked.prompts()
    return _answer(request, gateway, caller, admitted, asked, prompts, deadline_s, is_chat=False)


@router.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
async def create_chat_completion(request: Request, gateway: GatewayOf, caller: CallerOf) -> Answer:
    """Go on with a conversation."""
    deadline_s, admitted = deadline_of(request), admitted_of(request)
    asked = await read_json(request, gateway, admitted[1], ChatRequest, deadline_s)
    prompts = [asked.conversation()]
    return _answer(request, gateway, caller, admitted, asked, prompts, deadline_s, is_chat=True)


def deadline_of(request: Request) -> float | None:
    """By when the client wants it, on the clock of `time.monotonic`; None is at any time."""
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


def _answer(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    admitted: Admitted,
    asked: GenerationRequest,
    prompts: Sequence[Prompt | Conversation],
    deadline_s: float | None,
    *,
    is_chat: bool,
) -> Answer:
    field_names = frozenset(type(asked).model_fields)
    warning = _warning(asked.unknown, field_names, gateway.config.unknown_fields)
    num_samples = max(asked.n or 1, 1)
    _check_samples(len(prompts), num_samples, gateway.config.max_samples)
    admission, upload = admitted
    admission.count(len(prompts), num_samples)
    answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    params = asked.params()
    label = label_in(request.scope["headers"]) or clean_label(asked.request_id or "")
    calls = [
        Call(
            prompt=prompt,
            params=params,
            caller=caller,
            owner=upload.owner,
            admission=admission,
            model=asked.model or "",
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{number}",
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt or "",
            deadline_s=deadline_s,
            protocol="http",
            label=label,
        )
        for number, prompt in enumerate(prompts)
    ]
    read = Asked(
        calls=calls,
        upload=upload,
        num_samples=num_samples,
        wanted=Wanted(
            is_chat=is_chat,
            token_ids=bool(asked.return_token_ids),
            speculation=bool(asked.return_speculation),
            prompt_logprobs=asked.prompt_logprobs is not None,
            names=TokenNames(as_ids=bool(asked.return_tokens_as_token_ids)),
        ),
        answer_id=answer_id,
        label=label,
        model=gateway.model,
        fingerprint=request.app.state.fingerprints.of(gateway.facts),
        field_names=field_names,
        warning=warning,
    )
    if not asked.stream:
        return WholeAnswer(gateway, read)
    return StreamedAnswer(
        gateway,
        read,
        wants_usage=asked.wants_usage,
        wants_usage_always=asked.wants_usage_always,
    )


def _warning(unknown: list[str], known: frozenset[str], treatment: str) -> str:
    """The answer's header about unknown fields, or ""."""
    if not unknown:
        return ""
    if treatment == "refuse":
        raise refuse_unknown(unknown[0], known)
    warning = warning_of(unknown, known)
    logger.debug("a request has %s", warning)
    return warning


def _check_samples(num_prompts: int, num_samples: int, most: int) -> None:
    if num_prompts * num_samples <= most:
        return
    prompts = "" if num_prompts == 1 else f" for each of {num_prompts} prompts"
    raise FieldRefusedError(
        "n",
        f"n is {num_samples}{prompts}; a request may have {most} texts (server.max_samples), so "
        "ask for fewer.",
    )


class Fingerprints:
    """Names what decides about texts beside a request: with another, a seed may give another."""

    def __init__(self) -> None:
        self._known: tuple[EngineFacts | None, str] = (None, "")

    def of(self, facts: EngineFacts | None) -> str:
        if self._known[0] is not facts:
            settings = json.dumps([__version__, facts and facts.settings], default=str)
            self._known = facts, f"fp_{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
        return self._known[1]
