"""Waiting for whichever comes first, and for work of threads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run them all until one has ended, cancel the others, and raise what the ended ones raised."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def all_of(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Run them all to their ends. When one fails the others are cancelled, and have ended before
    that is told."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_own_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Begun at once, in a thread that nobody else waits for; done or failed as the work is, or with
    `OSError` if the system gives no thread for it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(tell: Callable[[], None]) -> None:
        if not outcome.done():
            tell()

    def run() -> None:
        try:
            tell = partial(outcome.set_result, work())
        except BaseException as error:  # whatever it is, somebody waits for it
            tell = partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody does
            loop.call_soon_threadsafe(settle, tell)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        outcome.set_exception(OSError(errno.EAGAIN, str(error)))
    return outcome
