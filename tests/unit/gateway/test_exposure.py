"""Who may listen where without keys."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import ServerConfig
from outrider.errors import ConfigError
from outrider.gateway.exposure import check_exposure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "[::1]", "localhost"])
def test_nobody_needs_a_key_on_the_loopback(host: str) -> None:
    assert check_exposure(ServerConfig(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_elsewhere_somebody_must_say_so(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.host is .*--allow-anonymous"):
        check_exposure(ServerConfig(host=host))
    warning = check_exposure(ServerConfig(host=host, allow_anonymous=True))
    assert warning is not None and host in warning


@pytest.mark.parametrize(
    "guard",
    [
        {"api_key": "k"},
        {"api_keys_file": "keys.yaml"},
        {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "ca"},
    ],
)
def test_keys_or_clients_certificates_are_enough(guard: dict[str, Any]) -> None:
    assert check_exposure(ServerConfig(host="0.0.0.0", **guard)) is None
