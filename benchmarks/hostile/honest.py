"""Honest clients: HTTP streams in a closed loop, which record the gaps between chunks."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import aiohttp

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "List the steps to bake a loaf of bread, with times.",
    "Summarise how a bill becomes a law in plain words.",
)
MAX_TOKENS = 64


@dataclass(slots=True)
class HonestStats:
    """(time, gap in seconds) of each chunk, and requests by outcome."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    completed: int = 0
    failures: list[str] = field(default_factory=list)


async def keep_streaming(
    url: str, key: str, num_streams: int, seconds: float, stats: HonestStats
) -> None:
    """Run `num_streams` concurrent streams for `seconds`; the last requests run to their end."""
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        end_s = time.monotonic() + seconds
        await asyncio.gather(
            *(_stream(session, url, number, end_s, stats) for number in range(num_streams))
        )


async def _stream(
    session: aiohttp.ClientSession, url: str, number: int, end_s: float, stats: HonestStats
) -> None:
    turn = number
    while time.monotonic() < end_s:
        prompt = f"{PROMPTS[turn % len(PROMPTS)]} ({turn})"
        turn += 16
        try:
            await _one(session, url, prompt, stats)
        except (aiohttp.ClientError, TimeoutError) as error:
            stats.failures.append(f"{type(error).__name__}: {error}"[:200])
            await asyncio.sleep(1.0)


async def _one(session: aiohttp.ClientSession, url: str, prompt: str, stats: HonestStats) -> None:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "ignore_eos": True,
        "stream": True,
    }
    sent_s = last_s = time.monotonic()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            stats.failures.append(f"{response.status}: {(await response.text())[:200]}")
            await asyncio.sleep(1.0)
            return
        is_first, is_done = True, False
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            now_s = time.monotonic()
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif json.loads(line[5:]).get("error"):
                stats.failures.append(line.decode()[:200])
                return
            elif is_first:
                stats.firsts.append((now_s, now_s - sent_s))
                is_first = False
            else:
                stats.gaps.append((now_s, now_s - last_s))
            last_s = now_s
        if is_done:
            stats.completed += 1
        else:
            stats.failures.append("the stream ended without [DONE]")
