"""An engine as a target, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import pytest

from outrider.loadtest.records import CountedBy
from outrider.loadtest.requests import BenchRequest
from outrider.loadtest.targets import Reply, TargetFault, TargetSpec
from outrider.loadtest.targets.inprocess import InProcessTarget

pytestmark = pytest.mark.model


def on_engine(pair: Any, use: Callable[[InProcessTarget], Awaitable[Any]], **extras: Any) -> Any:
    options = {
        "model": pair.target,
        "draft_model": pair.draft,
        "speculation_policy": "fixed",
        "kv_cache_gb": 0.05,
        "log_level": "error",
        "num_speculative_tokens": 3,
    }

    async def run() -> Any:
        async with asyncio.timeout(60):
            target = InProcessTarget(TargetSpec(f"inprocess:?{urlencode(options)}", extras=extras))
            await target.open()
            try:
                return await use(target)
            finally:
                await target.close()

    return asyncio.run(run())


def ask(*ids: int, max_tokens: int = 20) -> BenchRequest:
    return BenchRequest("q/0", "test", token_ids=ids, max_tokens=max_tokens, ignores_eos=True)


def test_requests_share_the_engine_and_tell_what_speculation_did(pair: Any) -> None:
    async def use(target: InProcessTarget) -> None:
        replies = [Reply() for _ in range(3)]
        asks = [ask(5, 6, 7 + number) for number in range(3)]
        await asyncio.gather(*map(target.send, asks, replies))
        for reply in replies:
            assert reply.output_tokens == len(reply.token_ids) == sum(reply.update_tokens) == 20
            assert (reply.counted_by, reply.finish) == (CountedBy.IDS, "length")
            assert reply.prompt_tokens == 3
            told = reply.speculated
            assert told is not None and told.drafted > 0
            assert sum(told.rounds_by_accepted) == told.rounds
            by_accepted = enumerate(told.rounds_by_accepted)
            assert sum(j * rounds for j, rounds in by_accepted) == told.accepted
        assert "".join(replies[0].pieces)

    on_engine(pair, use)


def test_a_wrong_request_is_a_fault_and_a_cancelled_one_leaves_nothing_behind(pair: Any) -> None:
    async def use(target: InProcessTarget) -> None:
        with pytest.raises(TargetFault) as caught:
            await target.send(ask(10**6), Reply())
        assert caught.value.kind == "invalid argument"
        reply = Reply()
        task = asyncio.create_task(target.send(ask(5, 6, max_tokens=100_000), reply))
        while not reply.update_s:
            await asyncio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert target._engine is not None
        while target._engine.engine.has_work:
            await asyncio.sleep(0.001)

    on_engine(pair, use, speculation="off")
