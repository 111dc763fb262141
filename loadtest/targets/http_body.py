"""Reads HTTP bodies with limits."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp


async def read_body(content: aiohttp.StreamReader, max_bytes: int, within_s: float) -> bytes:
    """The body, up to `max_bytes` and to what arrives `within_s`.

    aiohttp's own `read(n)` returns whatever has arrived, which may be any part of a body.
    """
    parts: list[bytes] = []
    left = max_bytes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while left > 0 and (part := await content.read(left)):
                parts.append(part)
                left -= len(part)
    return b"".join(parts)
