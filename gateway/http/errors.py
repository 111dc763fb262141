"""Errors as HTTP responses, in the shape OpenAI's clients read."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.api_types.errors import (
    DeadlineError,
    ForbiddenError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
    retry_after,
)
from outrider.errors import (
    MAX_SHOWN_CHARS,
    CapacityError,
    ContextLengthError,
    FieldRefusedError,
    OutriderError,
    RequestError,
    shown,
)
from outrider.gateway.gateway import Gateway

RETRY_AFTER_S = 1
MAX_SENTENCE_CHARS = 300
SERVER_FAILED = "the server failed in a way it should not; its log has the details."


class BodyTooLargeError(RequestError):
    """The body is larger than server.max_body_bytes."""


class NoSuchRouteError(RequestError):
    """A part of OpenAI's API that is not supported."""


_STATUSES: dict[type[OutriderError], HTTPStatus] = {
    RequestError: HTTPStatus.BAD_REQUEST,
    BodyTooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    NoSuchRouteError: HTTPStatus.NOT_FOUND,
    UnknownModelError: HTTPStatus.NOT_FOUND,
    UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    CapacityError: HTTPStatus.TOO_MANY_REQUESTS,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineError: HTTPStatus.REQUEST_TIMEOUT,
    RequestCancelledError: HTTPStatus.SERVICE_UNAVAILABLE,
}
_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
}
# What a value must be, by the type of pydantic's error.
_RULES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "text",
}


# -- sentences --------------------------------------------------------------------------------

# A field that is missing, the one that was sent in its place, and the route that takes that.
_OTHER_ROUTES = {
    "prompt": ("messages", "/v1/chat/completions"),
    "messages": ("prompt", "/v1/completions"),
}


def refusal_of(invalid: ValidationError | RequestValidationError) -> FieldRefusedError:
    """The first of pydantic's errors as one of ours."""
    first = invalid.errors()[0]
    parts = [part for part in first["loc"] if part not in ("body", "path", "query", "header")]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    name = name.removeprefix(".")[:MAX_SHOWN_CHARS]
    if first["type"] == "missing":
        remedy = "the request must have it"
        other, route = _OTHER_ROUTES.get(name, ("", ""))
        if other and isinstance(first["input"], dict) and first["input"].get(other) is not None:
            remedy = f"send {other} to {route}"
        return FieldRefusedError(name, f"{name} is missing; {remedy}.")
    rule = _RULES.get(first["type"]) or first["msg"][:1].lower() + first["msg"][1:]
    subject = name or "the request"
    return FieldRefusedError(name, f"{subject} is {shown(first['input'])}; it must be {rule}.")


def with_field(error: OutriderError, known: Collection[str]) -> OutriderError:
    """The error with `param` set to the field that its message begins with, if that is known."""
    place, second, *_ = [*str(error).split(" ", 2), "", ""]
    if isinstance(error, ContextLengthError):
        place = "prompt" if "prompt" in known else "messages"
    elif place == "the" and second in ("prompt", "conversation", "chat"):
        place = "prompt" if second == "prompt" and "prompt" in known else "messages"
    elif place == "token_ids" and "tokens" in known:  # as /detokenize has it
        place = "tokens"
    if not hasattr(error, "param") and re.split(r"[.[]", place, maxsplit=1)[0] in known:
        vars(error)["param"] = place[:MAX_SHOWN_CHARS]
    return error


@contextlib.contextmanager
def naming_fields(known: Collection[str]) -> Iterator[None]:
    """Errors raised inside name their field in `param`."""
    try:
        yield
    except OutriderError as error:
        raise with_field(error, known) from None


# -- responses --------------------------------------------------------------------------------


def status_of(error: OutriderError) -> HTTPStatus:
    """The status of the error's class, or of its nearest base class."""
    found = (_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_body(
    status: int, sentence: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(HTTPStatus(status), "api_error" if status >= 500 else "invalid_request_error")
    if len(sentence) > MAX_SENTENCE_CHARS:
        half = (MAX_SENTENCE_CHARS - 5) // 2  # the end is the remedy
        sentence = f"{sentence[:half]} ... {sentence[-half:]}"
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code or status}}


def body_of(error: OutriderError) -> dict[str, Any]:
    param, code = getattr(error, "param", None) or None, getattr(error, "code", None)
    return error_body(status_of(error), str(error), param, code)


def error_response(error: OutriderError) -> Response:
    status = status_of(error)
    headers = {}
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["Retry-After"] = str(retry_after(error.retry_after_s or RETRY_AFTER_S))
    if status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return _response(body_of(error), status, headers)


def _route_meant(request: Request) -> str | None:
    """The existing route with /v1 added or removed: base URLs often lack it, or have it twice."""
    requested = request.scope["path"]
    name = requested.removeprefix("/v1").rstrip("/")
    for path in (f"/v1{name}", name):
        scope = {**request.scope, "path": path}
        if path == requested:
            continue
        if any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
            return shown(path)
    return None


def _response(body: dict[str, Any], status: int, headers: Any = None) -> Response:
    # ASCII: the message may quote what the client sent, lone surrogates included.
    return Response(json.dumps(body), status, headers, media_type="application/json")


def answer_errors(app: FastAPI) -> None:
    """Return every error of the app in OpenAI's shape."""

    @app.exception_handler(OutriderError)
    async def ours(request: Request, error: OutriderError) -> Response:
        gateway: Gateway = request.app.state.gateway
        gateway.metrics.count_unauthorized(gateway.model, error)
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(refusal_of(error))

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        path = shown(request.url.path)
        match error.status_code:
            case HTTPStatus.NOT_FOUND:
                meant = _route_meant(request)
                remedy = "/openapi.json lists what there is" if meant is None else f"use {meant}"
                sentence = f"there is no {path} here; {remedy}."
            case HTTPStatus.METHOD_NOT_ALLOWED:
                ways = (error.headers or {}).get("Allow", "another method")
                sentence = f"{path} does not take {request.method[:20]}; use {ways}."
            case _:
                sentence = f"{path}: {error.detail}."
        return _response(error_body(error.status_code, sentence), error.status_code, error.headers)


class FailureGuard:
    """Returns unexpected errors in OpenAI's shape; Starlette's default logs each one and closes the
    connection."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            self._gateway.fail(error)
            if has_begun:  # all that is left is to close the connection
                raise
            body = error_body(HTTPStatus.INTERNAL_SERVER_ERROR, SERVER_FAILED)
            await _response(body, HTTPStatus.INTERNAL_SERVER_ERROR)(scope, receive, send)
