"""Reads the bodies of requests: within bounds, as JSON, as what they must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from outrider.errors import RequestError
from outrider.gateway.errors import RequestCancelledError
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.errors import (
    BodyTooLargeError,
    FieldRefusedError,
    refusal_of,
    shown,
)

Asked = TypeVar("Asked", bound=BaseModel)

# Reading more would hold up every stream of this process.
MAX_INLINE_BYTES = 64 * 2**10
JSON_TYPE = "application/json"


async def read_json(
    request: Request, gateway: Gateway, kind: type[Asked], deadline_s: float | None = None
) -> Asked:
    """The body as an instance of `kind`."""
    sent_as = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent_as != JSON_TYPE:
        # Also what keeps other sites' pages from calling: browsers ask before they send this type.
        raise FieldRefusedError(
            "Content-Type",
            f"Content-Type is {shown(sent_as)}; send JSON, with 'Content-Type: {JSON_TYPE}'.",
        )
    with gateway.reading.room() as take:
        body = await _read(request, gateway.config.max_body_bytes, take)
        if len(body) <= MAX_INLINE_BYTES:
            return parse(kind, body)
        return await gateway.preparing.run(deadline_s, parse, kind, body)


async def _read(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    try:
        announced = int(request.headers.get("content-length", "0"))
    except ValueError:
        announced = 0
    pieces, size = [], announced
    try:
        if size <= most:
            size = 0
            async for piece in request.stream():
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    break
                take(len(piece))
    except ClientDisconnect:
        raise RequestCancelledError("the client left before its request was complete.") from None
    if size > most:
        raise BodyTooLargeError(
            f"the body has {size} bytes or more; it may have {most} (server.max_body_bytes), so "
            "send less at once."
        )
    return b"".join(pieces)


def parse(kind: type[Asked], body: bytes) -> Asked:
    """An instance made of the JSON of a body; raises the sentence that is wrong with it."""
    try:
        found = json.loads(body, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        raise RequestError("the body is nested too deeply; send a flatter one.") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON ({error}); send an object.") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body is {shown(found)}; it must be a JSON object.")
    try:
        return kind.model_validate(found)
    except ValidationError as invalid:
        raise refusal_of(invalid) from None


def _refuse(constant: str) -> NoReturn:
    raise RequestError(f"the body holds {constant}, which is not JSON; send finite numbers.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise FieldRefusedError(name[:64], f"{shown(name)} is in the body twice; send it once.")
        found[name] = value
    return found


def inline_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """For the description of a route that reads its body itself."""
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
