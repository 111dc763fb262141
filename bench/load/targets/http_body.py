"""Bodies of HTTP, read whole but not without end."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp


async def read_body(content: aiohttp.StreamReader, most: int, within_s: float) -> bytes:
    """The body, at most `most` bytes of it and what has come by then.

    aiohttp's own `read(most)` gives what has just arrived, which may be any part of a body.
    """
    parts: list[bytes] = []
    left = most
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while left > 0 and (part := await content.read(left)):
                parts.append(part)
                left -= len(part)
    return b"".join(parts)
