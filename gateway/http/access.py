"""Authentication and authorization over HTTP: a middleware, and dependencies for routes."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from outrider.api_types.errors import ForbiddenError
from outrider.errors import OutriderError, shown
from outrider.gateway.auth.caller import Caller, Scope, is_loopback
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.errors import error_response
from outrider.gateway.http.labels import label_in
from outrider.gateway.limits import Admission
from outrider.gateway.upload_budget import Upload

_CALLER, _ADMITTED = "outrider.caller", "outrider.admitted"
ON_KNOWN = "outrider.on_known"
"""The scope's callback for a request with a valid key, or that needs none."""
# Charged to the key before the body is read: all routes of the scope `infer` that take a body.
CHARGED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
_OPEN_PATHS = ("/livez", "/readyz", "/health", "/healthz", "/ping", "/version", "/", "/favicon.ico")
_OPEN_FOLDERS = ("/page/",)


Admitted: TypeAlias = tuple[Admission, Upload]


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def caller_of(request: Request) -> Caller:
    """A caller with the scope `infer`; raises otherwise."""
    return _require(request, Scope.INFER)


def admitted_of(request: Request) -> Admitted:
    """The charged call, on `CHARGED_PATHS`."""
    admitted: Admitted = request.scope[_ADMITTED]
    return admitted


async def admin_of(request: Request) -> Caller:
    """A caller with the scope `admin`; raises otherwise."""
    return _require(request, Scope.ADMIN)


class AccessGuard:
    """Requires a key on all routes but the open ones, so that none can be forgotten, and charges
    the key on `CHARGED_PATHS`.

    Dependencies of routes read the caller from the scope.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            with contextlib.ExitStack() as stack:
                if not is_open(scope["path"]):
                    self._admit(scope, stack)
                await self._app(scope, receive, send)
                return
        except _Refused as refused:
            error = refused.error
        self._gateway.metrics.count_unauthorized(self._gateway.model, error)
        await error_response(error)(scope, receive, send)

    def _admit(self, scope: ASGIScope, stack: contextlib.ExitStack) -> None:
        try:
            caller = scope[_CALLER] = _identified(Request(scope), self._gateway)
            if ON_KNOWN in scope:
                scope[ON_KNOWN]()
            if scope["path"] in CHARGED_PATHS and scope["method"] == "POST":
                caller.require(Scope.INFER)
                scope[_ADMITTED] = stack.enter_context(
                    self._gateway.admitted(
                        caller,
                        (scope.get("client") or ("",))[0],
                        protocol="http",
                        label=label_in(scope["headers"]),
                    )
                )
        except OutriderError as error:
            raise _Refused(error) from None


class _Refused(Exception):  # noqa: N818 - never leaves the guard
    """A call was rejected."""

    def __init__(self, error: OutriderError) -> None:
        self.error = error


def is_open(path: str) -> bool:
    """Whether a path needs no key: probes, and the page, which asks for the key."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


def _require(request: Request, scope: Scope) -> Caller:
    caller: Caller | None = request.scope.get(_CALLER)
    if caller is None:
        caller = _identified(request, request.app.state.gateway)
    caller.require(scope)
    return caller


def _identified(request: Request, gateway: Gateway) -> Caller:
    is_local = request.client is not None and is_loopback(request.client.host)
    if is_local and not gateway.callers.needs_key and _has_foreign_host(request, gateway):
        _check_anonymous_allowed(request, gateway)
        is_local = False
    return gateway.callers.identify_header(
        request.headers.getlist("authorization"),
        is_local=is_local and not _has_foreign_origin(request, gateway),
    )


def _has_foreign_host(request: Request, gateway: Gateway) -> bool:
    """DNS rebinding: a page's host name that resolves to this host makes its browser treat our
    responses as same-origin."""
    host = _host_of(f"//{request.headers.get('host', '')}")
    if host is None:
        return True
    known = {"", "localhost", gateway.config.host.lower(), socket.gethostname().lower()}
    known.update(_host_of(origin) or "" for origin in gateway.config.cors_origins)
    return not (host in known or host.endswith(".localhost") or _is_address(host))


def _check_anonymous_allowed(request: Request, gateway: Gateway) -> None:
    config = gateway.config
    if not config.allow_anonymous and "*" not in config.cors_origins:
        raise ForbiddenError(
            f"Host is {shown(request.headers.get('host', ''))}, which is not a name of this "
            "host; call localhost, name its origin in server.cors_origins, or set a key "
            "(--api-key)."
        )


def _has_foreign_origin(request: Request, gateway: Gateway) -> bool:
    """Cross-site requests of a browser on this host have no local rights."""
    origin = request.headers.get("origin")
    if origin is None or origin in gateway.config.cors_origins:
        return False
    host = _host_of(origin)
    return host != "localhost" and not is_loopback(host or "")


def _host_of(address: str) -> str | None:
    """In lower case; None if it cannot be parsed."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return None


def _is_address(host: str) -> bool:
    """An IP address needs no DNS, so it cannot be rebound."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


GatewayOf = Annotated[Gateway, Depends(gateway_of)]
CallerOf = Annotated[Caller, Depends(caller_of)]
AdminOf = Annotated[Caller, Depends(admin_of)]
