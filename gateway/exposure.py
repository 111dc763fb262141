"""Refuses to listen on a public address without authentication."""

from __future__ import annotations

import ipaddress
import socket

from outrider.config import ServerConfig
from outrider.errors import ConfigError


def check_exposure(config: ServerConfig) -> str | None:
    """Raise `ConfigError` if other hosts can reach a server without authentication, unless that is
    allowed explicitly; then return a warning. None if the server is not exposed."""
    has_keys = config.api_key is not None or config.api_keys_file is not None
    if has_keys or config.tls_client_ca is not None or _is_local(config.host):
        return None
    if not config.allow_anonymous:
        raise ConfigError(
            f"server.host is {config.host!r}, which other hosts can reach, but no API key is set; "
            "set one (--api-key, server.api_keys_file), listen on 127.0.0.1, or allow everyone "
            "with --allow-anonymous."
        )
    return (
        f"every client that reaches {config.host} may use this server: it needs no API key "
        "(server.allow_anonymous is true)"
    )


def _is_local(host: str) -> bool:
    """Whether every address of `host` is a loopback address."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:  # listening will report it
        return True
    hosts = (str(address[0]).partition("%")[0] for *_, address in found)
    return all(ipaddress.ip_address(each).is_loopback for each in hosts)
