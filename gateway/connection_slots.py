"""Limits the open connections of a process, and chooses which to evict."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import TypeAlias

from outrider.config import ServerConfig
from outrider.gateway.bounds import max_connections

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

UNKNOWN_IDLE_S = 5  # idle timeout of a connection without a valid key
MIN_PER_ADDRESS = 64
MIN_HEADROOM = 8


class ConnectionSlot:
    """The slot of one connection: unknown until a request on it had a valid key, busy while a
    request is served. `close` ends the connection; call `release` when it has ended.

    `is_surplus`: all other connections are busy, so this one cannot be served.
    """

    __slots__ = ("_groups", "_slots", "close", "is_busy", "is_known", "is_surplus")

    def __init__(
        self, slots: ConnectionSlots, groups: list[_Group], close: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._groups = groups
        self.close = close
        self.is_known = False
        self.is_busy = False
        self.is_surplus = False

    def mark_known(self) -> None:
        """A request on the connection had a valid key."""
        if not self.is_known:
            self.is_known = True
            for group in self._groups:
                group.move(self)

    def set_busy(self, is_busy: bool) -> None:
        if is_busy is not self.is_busy:
            self.is_busy = is_busy
            for group in self._groups:
                group.move(self)

    def release(self) -> None:
        """Idempotent."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.remove(self)
        self._slots.drop_empty(groups)


class _Group:
    """Connections that share a limit: unknown ones in order of arrival, known idle ones in the
    order in which they became idle."""

    def __init__(self, limit: int, address: str = "") -> None:
        self.limit = limit
        self.address = address
        self.num_slots = 0
        self._unknown: dict[ConnectionSlot, None] = {}
        self._idle: dict[ConnectionSlot, None] = {}

    def add(self, slot: ConnectionSlot) -> None:
        self.num_slots += 1
        self.move(slot)

    def remove(self, slot: ConnectionSlot) -> None:
        self.num_slots -= 1
        self._unknown.pop(slot, None)
        self._idle.pop(slot, None)

    def move(self, slot: ConnectionSlot) -> None:
        if not slot.is_known:
            self._unknown.setdefault(slot)
            return
        self._unknown.pop(slot, None)
        self._idle.pop(slot, None)
        if not slot.is_busy:
            self._idle[slot] = None

    def to_evict(self, newcomer: ConnectionSlot) -> ConnectionSlot | None:
        """Unknown connections first, busy or not: without a key they hold no request to lose."""
        for rows in (self._unknown, self._idle):
            for slot in rows:
                if slot is not newcomer:
                    return slot
        return None


class ConnectionSlots:
    """All connections of one protocol. At a limit, a new connection evicts the oldest unknown or
    idle one. Connections from `trusted` networks (proxies) are known from the start and not limited
    by address."""

    def __init__(
        self, limit: int, limit_per_address: int = 0, trusted: Iterable[Network] = ()
    ) -> None:
        self.limit = limit
        self.hard_limit = limit + max(limit // 4, MIN_HEADROOM)
        self._limit_per_address = limit_per_address  # 0: no limit
        self._trusted = tuple(trusted)
        self._all = _Group(limit)
        self._by_address: dict[str, _Group] = {}

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionSlots:
        limit = max_connections(config)
        per_address = config.max_connections_per_address
        if per_address is None:
            per_address = max(limit // 4, MIN_PER_ADDRESS)
        trusted = (ipaddress.ip_network(each, strict=False) for each in config.trusted_proxies)
        return cls(limit, per_address, trusted)

    def __len__(self) -> int:
        return self._all.num_slots

    def take(self, host: str, close: Callable[[], None]) -> ConnectionSlot:
        """A slot for a connection from this address."""
        address = plain_address(host)
        is_trusted = self._is_trusted(address)
        groups = [self._all]
        if self._limit_per_address and address and not is_trusted:
            client = _client_of(address)
            new = _Group(self._limit_per_address, client)
            groups.insert(0, self._by_address.setdefault(client, new))
        slot = ConnectionSlot(self, groups, close)
        slot.is_known = is_trusted
        for group in groups:
            group.add(slot)
        for group in groups:
            if group.num_slots > group.limit:
                self._make_room(group, slot)
        return slot

    def drop_empty(self, groups: Iterable[_Group]) -> None:
        for group in groups:
            if not group.num_slots:
                self._by_address.pop(group.address, None)

    def _make_room(self, group: _Group, newcomer: ConnectionSlot) -> None:
        slot = group.to_evict(newcomer)
        if slot is None:
            newcomer.is_surplus = True
            return
        slot.release()
        slot.close()

    def _is_trusted(self, address: str) -> bool:
        if not self._trusted or not address:
            return False
        found = ipaddress.ip_address(address)
        return any(found in network for network in self._trusted)


def _client_of(address: str) -> str:
    """The address that identifies a client: IPv4, or an IPv6 /64, within which hosts choose."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network(f"{address}/64", strict=False))


def plain_address(host: str) -> str:
    """An IP address in canonical form; empty for anything else, such as a socket file."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
