"""Room for uploads: who gets it, and who has to give it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.errors import CapacityError
from outrider.gateway import upload_budget as module
from outrider.gateway.upload_budget import SMALL_BYTES, Upload, UploadBudget

LARGE = 2 * SMALL_BYTES


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_S", 0.001)


class Stalled:
    """An upload that sends so much and then no more."""

    def __init__(self, budget: UploadBudget, owner: str, num_bytes: int) -> None:
        self._budget = budget
        self._owner = owner
        self._num_bytes = num_bytes
        self.has_sent = asyncio.Event()
        self.upload: Upload | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with self._budget.upload(self._owner) as self.upload:
            async with self.upload.receiving():
                await self.upload.receive(self._num_bytes)
                self.has_sent.set()
                await asyncio.Event().wait()

    @property
    def is_closed(self) -> bool:
        return self.task.done() and isinstance(self.task.exception(), CapacityError)


def _run(body: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await body
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(limited())


async def _stalled(budget: UploadBudget, owner: str, num_bytes: int) -> Stalled:
    made = Stalled(budget, owner, num_bytes)
    await made.has_sent.wait()
    return made


def test_small_requests_need_no_room() -> None:
    async def body() -> None:
        budget = UploadBudget(LARGE)
        await _stalled(budget, "a", LARGE)
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                await stack.enter_context(budget.upload("b")).receive(SMALL_BYTES)

    _run(body())


def test_the_slowest_upload_of_the_owner_who_holds_most_makes_room() -> None:
    async def body() -> None:
        clock = Clock()
        budget = UploadBudget(5 * LARGE, clock)
        few = await _stalled(budget, "few", LARGE)
        clock.now_s += 10
        old = await _stalled(budget, "many", 2 * LARGE)
        clock.now_s += 5
        young = await _stalled(budget, "many", 2 * LARGE)
        clock.now_s += 2
        with budget.upload("new") as upload:
            await upload.receive(LARGE)
            await asyncio.wait((old.task,))
            assert old.is_closed and not young.task.done() and not few.task.done()
            await upload.receive(LARGE)  # what was closed is room
            assert upload.num_bytes == 2 * LARGE

    _run(body())


def test_an_upload_is_not_closed_before_it_had_a_moment() -> None:
    async def body() -> None:
        clock = Clock()
        budget = UploadBudget(2 * LARGE, clock)
        young = await _stalled(budget, "a", 2 * LARGE)
        newcomer = asyncio.create_task(_take(budget, "b", LARGE))
        await asyncio.sleep(0.02)
        assert not newcomer.done() and not young.task.done()
        clock.now_s += module.GRACE_S
        await newcomer
        await asyncio.wait((young.task,))
        assert young.is_closed

    _run(body())


async def _take(budget: UploadBudget, owner: str, num_bytes: int) -> None:
    with budget.upload(owner) as upload:
        await upload.receive(num_bytes)


def test_an_owner_has_half_at_most_while_others_wait() -> None:
    async def body() -> None:
        budget = UploadBudget(4 * LARGE, Clock())
        holders = [await _stalled(budget, "a", LARGE) for _ in range(4)]
        other = asyncio.create_task(_hold(budget, "b", 2 * LARGE))
        more = asyncio.create_task(_hold(budget, "a", LARGE))
        await asyncio.sleep(0.01)
        for holder in holders[:2]:  # one alone would be enough for the second of those who wait
            holder.task.cancel()
            await asyncio.sleep(0.01)
        assert other.done() and not more.done()

    _run(body())


async def _hold(budget: UploadBudget, owner: str, num_bytes: int) -> Upload:
    upload = Upload(budget, owner)
    await upload.receive(num_bytes)
    return upload


def test_an_upload_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_TIMEOUT_S", 0.01)

    async def body() -> None:
        budget = UploadBudget(LARGE, Clock())
        with budget.upload("a") as prepared:
            await prepared.receive(LARGE)  # not received any more, so it is not closed
            waiting = asyncio.create_task(_take(budget, "b", LARGE))
            with pytest.raises(CapacityError, match="as many large requests as it can hold"):
                await waiting
        await _take(budget, "b", LARGE)

    _run(body())


def test_what_was_reserved_beyond_a_request_is_given_back() -> None:
    async def body() -> None:
        budget = UploadBudget(2 * LARGE, Clock())
        with budget.upload("a") as small, budget.upload("a") as large:
            await small.reserve(2 * LARGE)
            small.received(100)
            assert small.num_bytes == 0
            await large.reserve(2 * LARGE)
            large.received(LARGE)
            assert large.num_bytes == LARGE
            large.release()
            await _take(budget, "b", 2 * LARGE)

    _run(body())


def test_many_small_requests_at_once_pass_one_after_the_other() -> None:
    """None knows the size of another's before it has come."""

    async def body() -> None:
        budget = UploadBudget(4 * LARGE, Clock())

        async def call() -> None:
            with budget.upload("a") as upload:
                await upload.reserve(LARGE)
                await asyncio.sleep(0)
                upload.received(10)

        await asyncio.gather(*(call() for _ in range(2000)))
        assert not budget._held and not budget._waiting and budget._num_waiting == 0

    _run(body())
