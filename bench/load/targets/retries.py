"""Sending again what a server had no room for, if that was asked for."""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime

from outrider.bench.load.targets.base import Reply, TargetFault

LONGEST_WAIT_S = 10.0
_FIRST_WAIT_S = 0.25  # doubled every time, where the server names no time
_MOST_DOUBLINGS = 10


class NoRoomFault(TargetFault):
    """The server took nothing of the request and may take it later."""

    def __init__(self, kind: str, message: str = "", after_s: float | None = None) -> None:
        super().__init__(kind, message)
        self.after_s = after_s  # as the server asks


async def with_retries(attempt: Callable[[], Awaitable[None]], reply: Reply, limit: int) -> None:
    """Run `attempt` again while it raises `NoRoomFault`, up to `limit` times; `reply` counts."""
    while True:
        try:
            return await attempt()
        except NoRoomFault as fault:
            if reply.retries >= limit:
                raise
            wait_s = fault.after_s
            if wait_s is None:
                wait_s = _FIRST_WAIT_S * 2 ** min(reply.retries, _MOST_DOUBLINGS)
        reply.retries += 1
        await asyncio.sleep(min(wait_s, LONGEST_WAIT_S))


def retry_after_s(header: str | None) -> float | None:
    """Seconds from a `Retry-After` header, which may name a number or a date."""
    if header is None:
        return None
    try:
        seconds = float(header)
        return None if math.isnan(seconds) else max(seconds, 0.0)
    except ValueError:
        pass
    try:
        then = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=datetime.UTC)
    return max((then - datetime.datetime.now(datetime.UTC)).total_seconds(), 0.0)
