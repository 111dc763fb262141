"""Which connections stay when there are more than a process may have."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import TypeAlias

from outrider.config import ServerConfig
from outrider.gateway.bounds import most_connections

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

UNKNOWN_IDLE_S = 5  # that a connection without a valid key may idle
LEAST_PER_ADDRESS = 64
LEAST_HEADROOM = 8


class Seat:
    """The place of one connection. It is unknown until a request on it had a valid key, and busy
    while one is being answered. `close` ends the connection; whoever ends it calls `leave`.

    `is_surplus`: every other connection is busy, so this one cannot be served.
    """

    __slots__ = ("_groups", "_seats", "close", "is_busy", "is_known", "is_surplus")

    def __init__(self, seats: Seats, groups: list[_Group], close: Callable[[], None]) -> None:
        self._seats = seats
        self._groups = groups
        self.close = close
        self.is_known = False
        self.is_busy = False
        self.is_surplus = False

    def know(self) -> None:
        """A request on it had a valid key."""
        if not self.is_known:
            self.is_known = True
            for group in self._groups:
                group.move(self)

    def set_busy(self, is_busy: bool) -> None:
        if is_busy is not self.is_busy:
            self.is_busy = is_busy
            for group in self._groups:
                group.move(self)

    def leave(self) -> None:
        """May be called again."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.remove(self)
        self._seats.drop_empty(groups)


class _Group:
    """Connections that share a bound. Unknown ones are in the order they came in, known ones that
    idle in the order they began to."""

    def __init__(self, most: int, address: str = "") -> None:
        self.most = most
        self.address = address
        self.num_seats = 0
        self._unknown: dict[Seat, None] = {}
        self._idle: dict[Seat, None] = {}

    def add(self, seat: Seat) -> None:
        self.num_seats += 1
        self.move(seat)

    def remove(self, seat: Seat) -> None:
        self.num_seats -= 1
        self._unknown.pop(seat, None)
        self._idle.pop(seat, None)

    def move(self, seat: Seat) -> None:
        if not seat.is_known:
            self._unknown.setdefault(seat)
            return
        self._unknown.pop(seat, None)
        self._idle.pop(seat, None)
        if not seat.is_busy:
            self._idle[seat] = None

    def first_out(self, newcomer: Seat) -> Seat | None:
        """Unknown ones go first, busy or not: without a key there is nothing to wait for."""
        for rows in (self._unknown, self._idle):
            for seat in rows:
                if seat is not newcomer:
                    return seat
        return None


class Seats:
    """All connections of one protocol. At a bound, the oldest one that nothing is lost with is
    closed for a newcomer. Connections from `trusted` networks, which are proxies', are known from
    the start and not counted by address."""

    def __init__(
        self, most: int, most_per_address: int = 0, trusted: Iterable[Network] = ()
    ) -> None:
        self.most = most
        self.most_at_all = most + max(most // 4, LEAST_HEADROOM)
        self._most_per_address = most_per_address  # 0: no bound
        self._trusted = tuple(trusted)
        self._all = _Group(most)
        self._by_address: dict[str, _Group] = {}

    @classmethod
    def of(cls, config: ServerConfig) -> Seats:
        most = most_connections(config)
        per_address = config.max_connections_per_address
        if per_address is None:
            per_address = max(most // 4, LEAST_PER_ADDRESS)
        trusted = (ipaddress.ip_network(each, strict=False) for each in config.trusted_proxies)
        return cls(most, per_address, trusted)

    def __len__(self) -> int:
        return self._all.num_seats

    def take(self, host: str, close: Callable[[], None]) -> Seat:
        """A place for a connection from that address."""
        address = plain_address(host)
        is_trusted = self._is_trusted(address)
        groups = [self._all]
        if self._most_per_address and address and not is_trusted:
            place = _client_of(address)
            new = _Group(self._most_per_address, place)
            groups.insert(0, self._by_address.setdefault(place, new))
        seat = Seat(self, groups, close)
        seat.is_known = is_trusted
        for group in groups:
            group.add(seat)
        for group in groups:
            if group.num_seats > group.most:
                self._make_room(group, seat)
        return seat

    def drop_empty(self, groups: Iterable[_Group]) -> None:
        for group in groups:
            if not group.num_seats:
                self._by_address.pop(group.address, None)

    def _make_room(self, group: _Group, newcomer: Seat) -> None:
        seat = group.first_out(newcomer)
        if seat is None:
            newcomer.is_surplus = True
            return
        seat.leave()
        seat.close()

    def _is_trusted(self, address: str) -> bool:
        if not self._trusted or not address:
            return False
        found = ipaddress.ip_address(address)
        return any(found in network for network in self._trusted)


def _client_of(address: str) -> str:
    """What one client has: an IPv4 address, or the 64 bits of IPv6 that a host chooses freely."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network(f"{address}/64", strict=False))


def plain_address(host: str) -> str:
    """An address as it is compared; empty for anything else, such as a socket file."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
