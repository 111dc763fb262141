"""Retries requests that an overloaded server rejected."""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime

from outrider.loadtest.targets.base import Reply, TargetFault

MAX_WAIT_S = 10.0
_FIRST_WAIT_S = 0.25  # doubled every time, without a Retry-After
_MAX_DOUBLINGS = 10


class OverloadedFault(TargetFault):
    """The server rejected the request and may accept it later."""

    def __init__(self, kind: str, message: str = "", after_s: float | None = None) -> None:
        super().__init__(kind, message)
        self.after_s = after_s  # from Retry-After


async def with_retries(attempt: Callable[[], Awaitable[None]], reply: Reply, limit: int) -> None:
    """Retries `attempt` on `OverloadedFault`, up to `limit` times; counts in `reply.retries`."""
    while True:
        try:
            return await attempt()
        except OverloadedFault as fault:
            if reply.retries >= limit:
                raise
            wait_s = fault.after_s
            if wait_s is None:
                wait_s = _FIRST_WAIT_S * 2 ** min(reply.retries, _MAX_DOUBLINGS)
        reply.retries += 1
        await asyncio.sleep(min(wait_s, MAX_WAIT_S))


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a `Retry-After` header, which is a number or a date."""
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
