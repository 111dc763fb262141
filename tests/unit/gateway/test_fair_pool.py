"""Requests are prepared side by side, in a queue with an end, and not beyond their deadline."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from outrider.api_types.errors import DeadlineError
from outrider.errors import CapacityError
from outrider.gateway.fair_pool import FairThreadPool


class Slow:
    """A preparation that takes until it is released."""

    def __init__(self) -> None:
        self.runs = 0
        self.released = threading.Event()

    def __call__(self) -> str:
        self.runs += 1
        assert self.released.wait(60)
        return "slow"


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.released.set()


def test_a_slow_preparation_does_not_stop_another(slow: Slow) -> None:
    async def both() -> tuple[str, str]:
        preparing = FairThreadPool("test", num_threads=2, max_pending=8)
        first = asyncio.create_task(preparing.run("a", None, slow))
        quick = await asyncio.wait_for(preparing.run("a", None, lambda: "quick"), 10)
        slow.released.set()
        return await first, quick

    assert asyncio.run(both()) == ("slow", "quick")


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_deadline_passes_while_waiting_and_while_running(slow: Slow, num_before: int) -> None:
    async def late() -> None:
        preparing = FairThreadPool("test", num_threads=1, max_pending=8)
        before = [asyncio.create_task(preparing.run("a", None, slow)) for _ in range(num_before)]
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError, match="while the request was being prepared"):
            await preparing.run("a", time.monotonic() + 0.05, slow)
        slow.released.set()
        await asyncio.gather(*before)
        await preparing.run("a", None, lambda: "the thread is free")

    asyncio.run(late())
    assert slow.runs == 1, "what was given up while it waited must not run"


def test_a_full_queue_refuses_until_there_is_room(slow: Slow) -> None:
    async def crowd() -> str:
        preparing = FairThreadPool("test", num_threads=1, max_pending=2)
        waiting = [asyncio.create_task(preparing.run("a", None, slow)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="2 requests are being prepared already"):
            await preparing.run("a", None, lambda: "")
        slow.released.set()
        await asyncio.gather(*waiting)
        return await preparing.run("a", None, lambda: "room")

    assert asyncio.run(crowd()) == "room"


def test_what_was_given_up_counts_until_its_thread_is_free(slow: Slow) -> None:
    async def crowd() -> None:
        preparing = FairThreadPool("test", num_threads=1, max_pending=1)
        with pytest.raises(DeadlineError):
            await preparing.run("a", time.monotonic() + 0.05, slow)
        with pytest.raises(CapacityError):
            await preparing.run("a", None, lambda: "")

    asyncio.run(crowd())


def test_an_error_of_the_preparation_is_the_callers() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    async def run() -> None:
        await FairThreadPool("test", 1, 1).run("a", time.monotonic() + 10, fail)

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(run())


def test_what_fails_after_it_was_given_up_is_no_news(slow: Slow) -> None:
    def fail() -> None:
        slow()
        raise ValueError("a client's words")

    async def given_up() -> list[str]:
        logged: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(str(context)))
        preparing = FairThreadPool("test", num_threads=1, max_pending=8)
        waiting = asyncio.create_task(preparing.run("a", None, fail))
        while not slow.runs:
            await asyncio.sleep(0.01)
        waiting.cancel()
        slow.released.set()
        await preparing.run("a", None, lambda: None)
        del waiting
        gc.collect()
        await asyncio.sleep(0)
        return logged

    assert asyncio.run(given_up()) == []


def test_owners_take_turns_however_much_one_of_them_has_waiting(slow: Slow) -> None:
    async def turns() -> list[str]:
        order: list[str] = []
        preparing = FairThreadPool("test", num_threads=1, max_pending=32)
        busy = asyncio.create_task(preparing.run("many", None, slow))
        while not slow.runs:
            await asyncio.sleep(0.01)
        many = [
            asyncio.create_task(preparing.run("many", None, order.append, "many"))
            for _ in range(16)
        ]
        await asyncio.sleep(0)
        few = asyncio.create_task(preparing.run("few", None, order.append, "few"))
        await asyncio.sleep(0)
        slow.released.set()
        await asyncio.gather(busy, few, *many)
        return order

    assert "few" in asyncio.run(turns())[:2]


def test_a_full_queue_rejects_the_owner_that_holds_most_of_it(slow: Slow) -> None:
    async def crowd() -> str:
        preparing = FairThreadPool("test", num_threads=1, max_pending=4)
        waiting = [asyncio.create_task(preparing.run("many", None, slow)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await preparing.run("many", None, lambda: "")
        few = asyncio.create_task(preparing.run("few", None, lambda: "let in"))
        await asyncio.sleep(0)
        slow.released.set()
        await asyncio.gather(*waiting)
        return await few

    assert asyncio.run(crowd()) == "let in"


def test_work_given_up_while_it_waits_leaves_the_queue_at_once(slow: Slow) -> None:
    async def crowd() -> None:
        preparing = FairThreadPool("test", num_threads=1, max_pending=2)
        running = asyncio.create_task(preparing.run("a", None, slow))
        while not slow.runs:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(preparing.run("a", None, slow))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waiting = asyncio.create_task(preparing.run("a", None, lambda: ""))
        await asyncio.sleep(0)
        slow.released.set()
        await asyncio.gather(running, waiting)

    asyncio.run(crowd())
    assert slow.runs == 1


def test_however_many_owners_there_are_the_queue_is_bounded(slow: Slow) -> None:
    async def crowd() -> int:
        preparing = FairThreadPool("test", num_threads=1, max_pending=8)
        waiting = [
            asyncio.create_task(preparing.run(f"owner {number}", None, slow))
            for number in range(8)
            for _ in range(8)
        ]
        await asyncio.sleep(0.1)
        slow.released.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        return sum(each == "slow" for each in found)

    assert 8 <= asyncio.run(crowd()) <= 16
