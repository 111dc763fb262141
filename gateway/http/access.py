"""Who calls over HTTP: what routes depend on to know and to demand it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from outrider.errors import OutriderError, shown
from outrider.gateway.caller import Caller, Scope, is_loopback
from outrider.gateway.errors import ForbiddenError
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.errors import error_response
from outrider.gateway.http.labels import label_in
from outrider.gateway.limits import Admission
from outrider.gateway.reading import Upload

_CALLER, _ADMITTED = "outrider.caller", "outrider.admitted"
ON_KNOWN = "outrider.on_known"
"""What in a scope hears that the request has a valid key, or needs none."""
# What is charged to a key before its body is read: all that takes a body from keys with the
# scope `infer`.
CHARGED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
_OPEN_PATHS = ("/livez", "/readyz", "/health", "/healthz", "/ping", "/version", "/", "/favicon.ico")
_OPEN_FOLDERS = ("/page/",)


Admitted: TypeAlias = tuple[Admission, Upload]


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def caller_of(request: Request) -> Caller:
    """Whoever may ask for text; raises what the client is told otherwise."""
    return _require(request, Scope.INFER)


def admitted_of(request: Request) -> Admitted:
    """The call as it was charged, on a path where it is."""
    admitted: Admitted = request.scope[_ADMITTED]
    return admitted


async def admin_of(request: Request) -> Caller:
    """Whoever may change how the server works."""
    return _require(request, Scope.ADMIN)


class AccessGuard:
    """Asks for a key before all routes but those that are open, so that none can be forgotten, and
    charges it for those that cost something.

    What they depend on finds the caller that was found here.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there is nothing else
            return
        try:
            with contextlib.ExitStack() as stack:
                if not is_open(scope["path"]):
                    self._let_in(scope, stack)
                await self._app(scope, receive, send)
                return
        except _Refused as refused:
            error = refused.error
        self._gateway.metrics.turn_away(self._gateway.model, error)
        await error_response(error)(scope, receive, send)

    def _let_in(self, scope: ASGIScope, stack: contextlib.ExitStack) -> None:
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
    """A call is not let in."""

    def __init__(self, error: OutriderError) -> None:
        self.error = error


def is_open(path: str) -> bool:
    """Whether anybody may ask for it: probes, and the page before it has a key to show."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


def _require(request: Request, scope: Scope) -> Caller:
    caller: Caller | None = request.scope.get(_CALLER)
    if caller is None:
        caller = _identified(request, request.app.state.gateway)
    caller.require(scope)
    return caller


def _identified(request: Request, gateway: Gateway) -> Caller:
    is_local = request.client is not None and is_loopback(request.client.host)
    if is_local and not gateway.callers.needs_key and _is_by_foreign_name(request, gateway):
        _check_strangers_may_call(request, gateway)
        is_local = False
    return gateway.callers.identify_header(
        request.headers.getlist("authorization"),
        is_local=is_local and not _is_from_foreign_page(request, gateway),
    )


def _is_by_foreign_name(request: Request, gateway: Gateway) -> bool:
    """A page can have its own name lead to this host: then its browser takes us for the page's
    server, and lets the page read what we answer."""
    host = _host_of(f"//{request.headers.get('host', '')}")
    if host is None:
        return True
    known = {"", "localhost", gateway.config.host.lower(), socket.gethostname().lower()}
    known.update(_host_of(origin) or "" for origin in gateway.config.cors_origins)
    return not (host in known or host.endswith(".localhost") or _is_address(host))


def _check_strangers_may_call(request: Request, gateway: Gateway) -> None:
    config = gateway.config
    if not config.allow_anonymous and "*" not in config.cors_origins:
        raise ForbiddenError(
            f"Host is {shown(request.headers.get('host', ''))}, which is not a name of this "
            "host; call localhost, name its origin in server.cors_origins, or set a key "
            "(--api-key)."
        )


def _is_from_foreign_page(request: Request, gateway: Gateway) -> bool:
    """A browser on this host does what pages from anywhere tell it to."""
    origin = request.headers.get("origin")
    if origin is None or origin in gateway.config.cors_origins:
        return False
    host = _host_of(origin)
    return host != "localhost" and not is_loopback(host or "")


def _host_of(address: str) -> str | None:
    """In small letters; None if that is no address."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return None


def _is_address(host: str) -> bool:
    """Which needs no name, and so can be had from nobody but us."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


GatewayOf = Annotated[Gateway, Depends(gateway_of)]
CallerOf = Annotated[Caller, Depends(caller_of)]
AdminOf = Annotated[Caller, Depends(admin_of)]
