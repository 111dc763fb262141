"""Helpers for asyncio tasks, and for blocking work in threads."""

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
    """Run all until one ends, cancel the others, and raise the errors of the ended ones."""
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
    """Run all to completion. If one fails, cancel the others, wait for them, then raise."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_own_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run work in a daemon thread of its own. The future fails with `OSError` if no thread can be
    started."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not outcome.done():
            set_outcome()

    def run() -> None:
        try:
            set_outcome = partial(outcome.set_result, work())
        except BaseException as error:  # raised by the awaiting task
            set_outcome = partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, set_outcome)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        outcome.set_exception(OSError(errno.EAGAIN, str(error)))
    return outcome
