"""Who may change what holds for everybody."""

from __future__ import annotations

import pytest

from outrider.gateway.grpc.server import is_from_this_host


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("ipv4:127.0.0.1:40312", True),
        ("ipv6:[::1]:40312", True),
        ("ipv6:%5B::1%5D:40312", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:40312", True),
        ("unix:", True),
        ("ipv4:10.0.0.7:40312", False),
        ("ipv6:%5B2001:db8::1%5D:40312", False),
        ("ipv6:%5B::ffff:10.0.0.7%5D:40312", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_settings_of_a_server_are_changed_from_its_own_host(peer: str, is_here: bool) -> None:
    assert is_from_this_host(peer) is is_here
