"""Which connections are closed when there are too many."""

from __future__ import annotations

import ipaddress

import pytest

from outrider.config import ServerConfig
from outrider.errors import ConfigError
from outrider.gateway.connection_slots import MIN_PER_ADDRESS, ConnectionSlot, ConnectionSlots


class _Room:
    """ConnectionSlots whose connections are known by number."""

    def __init__(self, slots: ConnectionSlots) -> None:
        self.slots = slots
        self.closed: list[int] = []
        self._count = 0

    def enter(self, host: str = "192.0.2.1", *, is_known: bool = False) -> ConnectionSlot:
        number, self._count = self._count, self._count + 1
        slot = self.slots.take(host, lambda: self.closed.append(number))
        if is_known:
            slot.mark_known()
        return slot


def test_the_oldest_unknown_one_goes_first_even_if_it_is_busy() -> None:
    room = _Room(ConnectionSlots(3))
    room.enter(is_known=True)
    room.enter().set_busy(True)
    room.enter()
    room.enter()
    room.enter()
    assert room.closed == [1, 2] and len(room.slots) == 3


def test_then_the_known_one_that_has_idled_longest() -> None:
    room = _Room(ConnectionSlots(3))
    first, *_ = [room.enter(is_known=True) for _ in range(3)]
    first.set_busy(True)
    first.set_busy(False)  # so it idles since just now
    room.enter(is_known=True)
    room.enter(is_known=True)
    assert room.closed == [1, 2]


def test_busy_ones_with_a_key_stay_and_the_newcomer_is_surplus() -> None:
    room = _Room(ConnectionSlots(2))
    for _ in range(2):
        room.enter(is_known=True).set_busy(True)
    assert room.enter().is_surplus
    assert room.closed == []


def test_a_seat_that_was_left_is_free_and_may_be_left_again() -> None:
    room = _Room(ConnectionSlots(1, limit_per_address=1))
    slot = room.enter()
    slot.release()
    slot.release()
    slot.mark_known()
    slot.set_busy(True)
    assert len(room.slots) == 0
    room.enter()
    assert room.closed == []


def test_an_address_has_its_own_bound() -> None:
    room = _Room(ConnectionSlots(10, limit_per_address=2))
    for host in ("192.0.2.1", "192.0.2.2", "192.0.2.1", "::ffff:192.0.2.1"):
        room.enter(host)
    assert room.closed == [0]


def test_an_address_of_ipv6_is_its_network() -> None:
    room = _Room(ConnectionSlots(10, limit_per_address=1))
    for host in ("2001:db8::1", "2001:db8::2%eth0", "2001:db8:0:1::1"):
        room.enter(host)
    assert room.closed == [0]


def test_proxies_that_are_trusted_are_known_and_not_counted_by_address() -> None:
    room = _Room(ConnectionSlots(3, 1, [ipaddress.ip_network("192.0.2.0/24")]))
    for host in ("192.0.2.1", "192.0.2.1", "198.51.100.1", "192.0.2.1"):
        room.enter(host)
    assert room.closed == [2]


def test_a_socket_file_has_no_address() -> None:
    room = _Room(ConnectionSlots(4, limit_per_address=1))
    room.enter("")
    room.enter("")
    assert room.closed == []


@pytest.mark.parametrize(("given", "bound"), [(None, MIN_PER_ADDRESS), (5, 5), (0, 0)])
def test_settings_give_the_bound_of_an_address(given: int | None, bound: int) -> None:
    slots = ConnectionSlots.of(ServerConfig(max_requests=16, max_connections_per_address=given))
    assert slots._limit_per_address == bound


def test_a_proxy_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="trusted_proxies is .*networks such as"):
        ServerConfig(trusted_proxies=("nginx",))
