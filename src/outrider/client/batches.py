"""Several prompts through one client: sent concurrently, answered in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outrider.api_types.results import Completion
from outrider.errors import RequestError
from outrider.text.prompts import matched

MAX_CONCURRENT = 64  # requests of one call; a server has other clients too


def complete_all(
    start: Callable[..., Any], prompts: Iterable[Any], params: Any, overrides: Mapping[str, Any]
) -> list[Completion]:
    """`start` opens a stream. If one fails, the others are cancelled."""
    waiting, done = deque(_requests(prompts, params, overrides)), []
    running: deque[Any] = deque()
    try:
        while waiting or running:
            while waiting and len(running) < MAX_CONCURRENT:
                prompt, own = waiting.popleft()
                running.append(start(prompt, own, **overrides))
            done.append(running[0].result())
            running.popleft()
    finally:
        for stream in running:
            stream.cancel()
    return done


async def complete_all_async(
    start: Callable[..., Any], prompts: Iterable[Any], params: Any, overrides: Mapping[str, Any]
) -> list[Completion]:
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def complete(prompt: Any, own: Any) -> Completion:
        async with slots:
            completion: Completion = await start(prompt, own, **overrides).result()
            return completion

    requests = _requests(prompts, params, overrides)
    tasks = [asyncio.ensure_future(complete(*each)) for each in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _requests(
    prompts: Iterable[Any], params: Any, overrides: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    listed = list(prompts)
    if "request_id" in overrides:
        raise RequestError("request_id names one request; leave it out with several prompts.")
    return list(zip(listed, matched(params, len(listed)), strict=True))
