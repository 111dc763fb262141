"""Reads request bodies: limits their size, parses JSON, validates the schema."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from outrider.api_types.errors import RequestCancelledError, UnavailableError
from outrider.errors import FieldRefusedError, shown
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.errors import BodyTooLargeError, naming_fields, refusal_of
from outrider.gateway.upload_budget import Upload
from outrider.text.json_bodies import parse

Body = TypeVar("Body", bound=BaseModel)

# Larger bodies are parsed in child processes: parsing blocks the event loop.
MAX_INLINE_BYTES = 64 * 2**10
JSON_TYPE = "application/json"


async def read_json(
    request: Request,
    gateway: Gateway,
    upload: Upload,
    kind: type[Body],
    deadline_s: float | None = None,
) -> Body:
    """The body as an instance of `kind`."""
    sent_as = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent_as != JSON_TYPE:
        # Also a defense against cross-site requests: browsers preflight this content type.
        raise FieldRefusedError(
            "Content-Type",
            f"Content-Type is {shown(sent_as)}; send JSON, with 'Content-Type: {JSON_TYPE}'.",
        )
    async with upload.receiving():
        body = await _read(request, gateway.config.max_body_bytes, upload)
    if len(body) <= MAX_INLINE_BYTES:
        return validated(kind, parse(body))
    known = list(kind.model_fields)
    facts = gateway.facts
    if facts is None:
        raise UnavailableError("the engine is starting; try again in a moment.")
    with naming_fields(known):
        found = await gateway.body_parser.parse(upload.owner, body, known, facts, deadline_s)
    del body
    return validated(kind, found)


async def _read(request: Request, limit: int, upload: Upload) -> bytearray:
    try:
        announced = int(request.headers.get("content-length", "0"))
    except ValueError:
        announced = 0
    body, size = bytearray(), announced
    try:
        if size <= limit:
            async for piece in request.stream():
                size = len(body) + len(piece)
                if size > limit:
                    break
                body += piece
                await upload.receive(len(piece))
    except ClientDisconnect:
        raise RequestCancelledError(
            "the client disconnected before its request was complete."
        ) from None
    if size > limit:
        raise BodyTooLargeError(
            f"the body has {size} bytes or more; it may have {limit} (server.max_body_bytes), so "
            "send less at once."
        )
    return body


def validated(kind: type[Body], fields: dict[str, Any]) -> Body:
    try:
        return kind.model_validate(fields)
    except ValidationError as invalid:
        raise refusal_of(invalid) from None


def inline_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema without references, for the OpenAPI description of a route."""
    whole = kind.model_json_schema()
    parts = whole.pop("$defs", {})

    def replaced(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return replaced(parts[node["$ref"].rpartition("/")[2]])
            return {name: replaced(each) for name, each in node.items()}
        return [replaced(each) for each in node] if isinstance(node, list) else node

    described: dict[str, Any] = replaced(whole)
    return described


def described(kind: type[BaseModel]) -> dict[str, Any]:
    content = {JSON_TYPE: {"schema": inline_schema(kind)}}
    return {"requestBody": {"required": True, "content": content}}
