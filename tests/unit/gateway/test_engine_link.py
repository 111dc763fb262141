"""What a gateway asks of its engine, and how much of it at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import CapacityError
from outrider.gateway.routing.engine_link import MAX_EXPLAINING, EngineAddress, EngineLink
from outrider.links.gateway_messages import (
    EngineFacts,
    ExplainSpeculation,
    ExplainSpeculationResult,
    Submit,
    SubmittedSample,
    Updates,
)
from outrider.scheduler.types import FinishReason, RequestUpdate, SampleId


async def _locate() -> EngineAddress:
    raise AssertionError("no connection is made here")


async def _nothing(facts: EngineFacts | None = None) -> None:
    """Of no interest."""


class _Channel:
    """What is sent stays here."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_accounts_are_asked_for_one_at_a_time() -> None:
    """Each holds up the engine for longer than a step takes."""

    async def ask_many() -> None:
        link = EngineLink(_locate, _nothing, _nothing)
        channel: Any = _Channel()
        link._channel = channel
        asking = [
            asyncio.create_task(link.explain_speculation(None, 256)) for _ in range(MAX_EXPLAINING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="retry later"):
            await link.explain_speculation(None, 256)
        for number in range(MAX_EXPLAINING):
            await asyncio.sleep(0.01)
            assert len(channel.sent) == number + 1
            asked = channel.sent[-1]
            assert isinstance(asked, ExplainSpeculation)
            link._queries.settle(ExplainSpeculationResult(asked.query, (), 0, ()))
        await asyncio.gather(*asking)

    asyncio.run(ask_many())


def test_the_load_is_what_the_engine_told_and_what_was_submitted_or_ended_since() -> None:
    async def follow() -> None:
        link = EngineLink(_locate, _nothing, _nothing)
        channel: Any = _Channel()
        link._channel = channel
        messages: asyncio.Queue[Any] = asyncio.Queue()
        channel.receive = messages.get
        receiving = asyncio.create_task(link._receive_all(channel))

        async def hear(message: Updates) -> int:
            messages.put_nowait(message)
            while not messages.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            return link.load

        spec: Any = None
        submit = Submit(spec, tuple(SubmittedSample(handle, 0) for handle in (1, 2)), None, False)
        assert await hear(Updates((), 5)) == 5
        link.submit(submit, lambda event: None)
        assert link.load == 7
        assert await hear(Updates((), 6)) == 6  # of which two are ours
        ended = RequestUpdate(SampleId(0, 1), finish_reason=FinishReason.STOP)
        assert await hear(Updates((ended,), 5)) == 5
        link.cancel(2)
        assert link.load == 4
        assert await hear(Updates((), 0)) == 0
        receiving.cancel()

    asyncio.run(follow())
