"""Unsupported routes of OpenAI's and vLLM's APIs: their errors name the supported ones."""

from __future__ import annotations

from fastapi import APIRouter, Request

from outrider.gateway.http.errors import NoSuchRouteError

router = APIRouter(include_in_schema=False)

WRITES = "this server writes text; use /v1/completions or /v1/chat/completions."
_REASONS = {
    "embeddings": "embeddings are not served here, for " + WRITES,
    "responses": "the responses API is not served here; use /v1/chat/completions.",
    "messages": "the messages API is not served here; use /v1/chat/completions.",
    "assistants": "assistants are not served here; use /v1/chat/completions.",
    "threads": "threads are not served here; use /v1/chat/completions.",
    "realtime": "the realtime API is not served here; use /v1/chat/completions with stream.",
    "audio": "sound is not served here, for " + WRITES,
    "images": "images are not served here, for " + WRITES,
    "videos": "videos are not served here, for " + WRITES,
    "moderations": "moderation is not served here, for " + WRITES,
    "rerank": "ranking is not served here, for " + WRITES,
    "score": "scoring is not served here, for " + WRITES,
    "files": "files are not kept here; send prompts with each request.",
    "uploads": "files are not kept here; send prompts with each request.",
    "vector_stores": "files are not kept here; send prompts with each request.",
    "batches": "batches are not served here; send several prompts to /v1/completions at once.",
    "fine_tuning": "models are not trained here.",
}
_METHODS = ["GET", "POST", "DELETE"]


async def refuse(request: Request) -> None:
    kind = request.url.path.removeprefix("/v1/").split("/")[0]
    raise NoSuchRouteError(_REASONS[kind])


for _kind in _REASONS:
    router.add_api_route(f"/v1/{_kind}", refuse, methods=_METHODS)
    router.add_api_route(f"/v1/{_kind}/{{rest:path}}", refuse, methods=_METHODS)
