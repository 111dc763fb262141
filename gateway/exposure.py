"""Whether a server may listen where it is told to."""

from __future__ import annotations

import ipaddress
import socket

from outrider.config import ServerConfig
from outrider.errors import ConfigError


def check_exposure(config: ServerConfig) -> str | None:
    """Raise `ConfigError` if strangers could call a server that asks nobody for a key, unless that
    is wanted; then a sentence that warns of it. None if there is nothing to say."""
    has_keys = config.api_key is not None or config.api_keys_file is not None
    if has_keys or config.tls_client_ca is not None or _is_local(config.host):
        return None
    if not config.allow_anonymous:
        raise ConfigError(
            f"server.host is {config.host!r}, which other hosts can reach, but nobody needs a key; "
            "set one (--api-key, server.api_keys_file), listen on 127.0.0.1, or let anybody in "
            "with --allow-anonymous."
        )
    return (
        f"anybody who reaches {config.host} may use this server: it asks for no key "
        "(server.allow_anonymous is true)"
    )


def _is_local(host: str) -> bool:
    """Whether every address of that name is this host's own loopback."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:  # which is told when it is listened on
        return True
    hosts = (str(address[0]).partition("%")[0] for *_, address in found)
    return all(ipaddress.ip_address(each).is_loopback for each in hosts)
