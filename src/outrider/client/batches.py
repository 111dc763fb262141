"""Several prompts through one client: sent side by side, answered in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from outrider.errors import RequestError
from outrider.gateway.results import Completion
from outrider.text.prompts import matched

AT_ONCE = 64  # requests of one call; a server takes more, but from others too


class Closed:
    """In the place of a closed client's connection."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __getattr__(self, name: str) -> NoReturn:
        raise RequestError(f"this client of {self._address} was closed; make another to ask again.")


def plain_prompt(prompt: Any) -> Any:
    """Text or token ids, out of the mapping that `LLM` takes as well."""
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or not {"prompt", "prompt_token_ids"}.issuperset(prompt):
        raise RequestError(
            f"a prompt given as a mapping has the keys {sorted(map(str, prompt))}; it must have "
            "either 'prompt' or 'prompt_token_ids'."
        )
    return next(iter(prompt.values()))


def complete_all(
    start: Callable[..., Any], prompts: Iterable[Any], params: Any, overrides: Mapping[str, Any]
) -> list[Completion]:
    """`start` opens a stream. One that fails ends the others."""
    waiting, done = deque(_requests(prompts, params, overrides)), []
    running: deque[Any] = deque()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
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
    seats = asyncio.Semaphore(AT_ONCE)

    async def complete(prompt: Any, own: Any) -> Completion:
        async with seats:
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
