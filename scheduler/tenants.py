"""Who shares the scheduler: what each tenant was served, and what it holds.

Service is counted in tokens: those of prompts that were not cached, and those of outputs. It only
grows. It is compared among tenants that wait, so a tenant that begins to wait is lifted to the
level of those that do (`WaitingQueue`): nothing is saved up by asking for nothing.
"""

from __future__ import annotations

MOST_IDLE = 1024
"""Tenants without requests whose service is remembered; the one that left first is forgotten."""


class Tenant:
    """One of those who share the scheduler. Without keys there is only one."""

    __slots__ = ("name", "num_requests", "num_running", "num_waiting", "service", "without_row_s")

    def __init__(self, name: str) -> None:
        self.name = name
        self.service = 0
        self.num_requests = 0  # unfinished, each sample counting
        self.num_waiting = 0  # of these: without a row, also for a sibling's prompt
        self.num_running = 0  # and with one
        self.without_row_s = 0.0  # since when it waits and has no row


class Tenants:
    """Those with requests, and for a while those that had some."""

    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        self.active: dict[str, Tenant] = {}
        self._idle: dict[str, Tenant] = {}  # the first to leave comes first
        self._most_idle = most_idle

    def __len__(self) -> int:
        """That are remembered."""
        return len(self.active) + len(self._idle)

    def enter(self, name: str) -> Tenant:
        """The tenant of a new request."""
        tenant = self.active.get(name)
        if tenant is None:
            tenant = self._idle.pop(name, None) or Tenant(name)
            self.active[name] = tenant
        tenant.num_requests += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request of the tenant has ended."""
        tenant.num_requests -= 1
        if tenant.num_requests:
            return
        del self.active[tenant.name]
        self._idle[tenant.name] = tenant
        if len(self._idle) > self._most_idle:
            del self._idle[next(iter(self._idle))]

    def largest_waiting(self) -> Tenant | None:
        """The tenant with most requests that wait."""
        return max(self.active.values(), key=lambda each: each.num_waiting, default=None)
