"""What a gateway asks of its engine, and how much of it at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import CapacityError
from outrider.gateway.engine_link import MAX_EXPLAINING, EngineAddress, EngineLink
from outrider.links.gateway_messages import EngineFacts, ExplainSpeculation, SpeculationExplained


async def _locate() -> EngineAddress:
    raise AssertionError("nobody connects here")


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
            link._settle(SpeculationExplained(asked.query, (), 0, ()))
        await asyncio.gather(*asking)

    asyncio.run(ask_many())
