"""A caller: its scopes and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum

from outrider.api_types.errors import ForbiddenError
from outrider.errors import RequestError
from outrider.scheduler.params import LATEST_PRIORITY, SOONEST_PRIORITY


class Scope(StrEnum):
    """What a caller may do."""

    INFER = "infer"  # generate text, read status
    ADMIN = "admin"  # change settings, abort any request


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Limits of a caller over the whole server; None is unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # read and written
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `name` is that of the key, never the key."""

    name: str
    scopes: frozenset[Scope]
    limits: CallerLimits = CallerLimits()
    group: str = ""  # of keys that share prefix-cache blocks; "" is the key alone
    min_priority: int = SOONEST_PRIORITY
    max_priority: int = LATEST_PRIORITY

    def require(self, scope: Scope) -> None:
        if scope not in self.scopes:
            raise ForbiddenError(
                f"this needs the scope {scope.value!r}, which the key {self.name!r} does not have; "
                "use a key that has it."
                if self.name
                else f"this needs the scope {scope.value!r}; without keys only callers on the "
                "server's own host have it."
            )

    def check_priority(self, priority: int) -> None:
        if self.name and not self.min_priority <= priority <= self.max_priority:
            raise RequestError(
                f"priority is {priority}; the key {self.name!r} may use {self.min_priority} to "
                f"{self.max_priority}, lower ones running sooner."
            )


LOCAL = Caller("", frozenset(Scope))
"""Callers on the server's own host, where no keys are set."""
REMOTE = Caller("", frozenset({Scope.INFER}))
"""Callers on other hosts, where no keys are set."""


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
