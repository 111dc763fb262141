"""A client's access to a server: address, API key and certificates."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import grpc

from outrider.errors import RequestError

DEFAULT_PORT = 50051
DEFAULT_SERVER = f"localhost:{DEFAULT_PORT}"
CHANNEL_OPTIONS = (
    # Log-probabilities of a long prompt may exceed gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # Reconnect quickly after a lost connection.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is the timeout of one connection attempt: a busy or distant server needs
    # longer than the initial back-off.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
KEY_VARIABLE = "OUTRIDER_API_KEY"
_HTTP_PORTS = (80, 443, 8000)
_SECURE = {"http": False, "grpc": False, "https": True, "grpcs": True}
_KEY = re.compile(r"[!-~]+")
# Schemes that gRPC itself resolves.
_OTHER_NAMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")

Options: TypeAlias = Sequence[tuple[str, Any]]
Tls: TypeAlias = bool | str | os.PathLike[str] | None
ClientCert: TypeAlias = str | os.PathLike[str] | tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Access:
    """`api_key` defaults to OUTRIDER_API_KEY. `tls` is True for the system's authorities, or a PEM
    file of others; None follows the address. `client_cert` is a PEM file with a certificate and its
    key, or a pair of files."""

    api_key: str | None = field(default=None, repr=False)
    tls: Tls = None
    client_cert: ClientCert = None

    @property
    def key(self) -> str | None:
        """The API key to send, if any."""
        shown = self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE) or None
        if shown is not None and _KEY.fullmatch(shown) is None:
            source = "api_key" if self.api_key is not None else KEY_VARIABLE
            raise RequestError(
                f"{source} is empty, or holds a space or a character that is not ASCII; give the "
                "key as it was printed."
            )
        return shown


def parse_address(address: str) -> tuple[str, bool]:
    """gRPC's target, and whether the address asks for TLS.

    Takes host, host:port and URLs; the port is 50051 unless given.
    """
    if not isinstance(address, str):
        raise RequestError(f"the server's address is {address!r}; give it as host:port.")
    text = address.strip()
    if text.startswith(_OTHER_NAMES):
        return text, False
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "grpc", text
    if scheme.lower() not in _SECURE:
        raise RequestError(
            f"the server's address is {address!r}; begin it with grpc://, grpcs:// or nothing."
        )
    if rest.count(":") > 1 and not rest.startswith("["):
        rest = f"[{rest}]"  # IPv6 without a port
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "@" in rest or any(each.isspace() for each in rest):
        raise RequestError(f"the server's address is {address!r}; give it as host:port.")
    shown = f"[{host}]" if ":" in host else host
    is_http = scheme.lower().startswith("http")
    if parts.path.strip("/") or parts.query or (is_http and port in _HTTP_PORTS):
        raise RequestError(
            f"the server's address is {address!r}, which is one of HTTP; this speaks gRPC, which "
            f"has a port of its own (server.grpc_port): give '{shown}:{DEFAULT_PORT}'."
        )
    return f"{shown}:{port or DEFAULT_PORT}", _SECURE[scheme.lower()]


def open_channel(address: str, access: Access, options: Options = CHANNEL_OPTIONS) -> Any:
    """A channel that sends the API key with every call."""
    return _open(grpc, address, access, options)


def open_aio_channel(address: str, access: Access, options: Options = CHANNEL_OPTIONS) -> Any:
    """The same for asyncio."""
    return _open(grpc.aio, address, access, options)


def _open(api: Any, address: str, access: Access, options: Options) -> Any:
    target, is_secure = parse_address(address)
    if is_secure or access.tls or access.client_cert is not None:
        channel = api.secure_channel(target, _credentials(access), options)
    else:
        channel = api.insecure_channel(target, options)
    key = access.key
    return channel if key is None else _Keyed(channel, key)


def _credentials(access: Access) -> grpc.ChannelCredentials:
    roots = None
    if access.tls is not None and not isinstance(access.tls, bool):
        roots = _read("tls", access.tls)
    cert = key = None
    if access.client_cert is not None:
        given = access.client_cert
        files = given if isinstance(given, tuple) else (given, given)
        cert, key = (_read("client_cert", file) for file in files)
        if b"PRIVATE KEY" not in key:
            raise RequestError(
                f"client_cert is {given!r}, which holds no private key; give a PEM file with both, "
                "or (certificate, key)."
            )
    return grpc.ssl_channel_credentials(roots, key, cert)


def _read(name: str, file: str | os.PathLike[str]) -> bytes:
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise RequestError(
            f"{name} is {os.fspath(file)!r}, which cannot be read: {error.strerror}; give the path "
            "of a PEM file."
        ) from None
    if b"-----BEGIN" not in data:
        raise RequestError(f"{name} is {os.fspath(file)!r}, which is no PEM file; give one.")
    return data


class _Keyed:
    """A channel that adds the API key to every call."""

    def __init__(self, channel: Any, key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {key}"),)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.unary_unary(*args, **kwargs), metadata=self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.unary_stream(*args, **kwargs), metadata=self._metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)
