"""What a gateway keeps of its streams, and how many it takes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeService, fake_service, scripted_token
from waits import wait_until

from outrider.errors import CapacityError
from outrider.gateway.calls import Call
from outrider.kernels.seeds import sample_seed
from outrider.scheduler.params import SamplingParams

PROMPT = [10, 11, 12, 13]


def _in_gateway(service: FakeService, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs it where the gateway runs."""
    keeping = service.server.gateway._watching
    assert keeping is not None
    return asyncio.run_coroutine_threadsafe(coroutine, keeping.get_loop()).result(60)


def test_logprobs_that_were_streamed_are_not_kept(tmp_path: Path) -> None:
    params = SamplingParams(logprobs=2, prompt_logprobs=2, max_tokens=60, ignore_eos=True)

    async def read() -> tuple[int, list[int], Any]:
        async with service.server.gateway.session(
            Call(PROMPT, dataclasses.asdict(params))
        ) as session:
            output, told, kept = session.output, 0, []
            async for delta in session.deltas():
                positions = output.outputs[0].logprobs or []
                told += len(delta.token_ids)
                assert len(positions) == len(delta.token_ids)
                kept.append(len(positions))
            return told, kept, output.prompt_logprobs

    with fake_service(tmp_path) as service:
        told, kept, prompt_logprobs = _in_gateway(service, read())
    assert told == 60 and len(kept) > 2 and max(kept) < 60
    assert prompt_logprobs == [None] * len(PROMPT)


def test_what_has_come_while_the_reader_was_away_comes_as_one_delta(tmp_path: Path) -> None:
    params = {"n": 2, "max_tokens": 60, "seed": 5, "ignore_eos": True}

    async def read() -> tuple[int, list[list[int]], Any]:
        async with service.server.gateway.session(Call(PROMPT, params)) as session:
            num_deltas, tokens = 0, [[], []]  # type: ignore[var-annotated]
            async for delta in session.deltas():
                num_deltas += 1
                tokens[delta.index] += delta.token_ids
                assert sum(done.num_tokens for done in delta.rounds) == len(delta.token_ids)
                assert (delta.finish_reason is None) == (len(tokens[delta.index]) < 60)
                await asyncio.to_thread(wait_until, lambda: not service.engine.running)
            return num_deltas, tokens, session.output

    with fake_service(tmp_path) as service:
        num_deltas, tokens, output = _in_gateway(service, read())
    assert num_deltas <= 4, "what one step adds to each sample, then all the rest of it"
    assert tokens == [each.token_ids for each in output.outputs]
    own = [sample_seed(5, index) for index in range(2)]
    assert tokens == [[scripted_token(seed, 4 + at) for at in range(60)] for seed in own]


def test_a_reader_who_lags_behind_holds_up_its_request_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.session.MAX_UNREAD", 50)
    params = SamplingParams(n=2, max_tokens=200, seed=5, ignore_eos=True)

    async def read() -> tuple[list[list[int]], int]:
        async with service.server.gateway.session(
            Call(PROMPT, dataclasses.asdict(params))
        ) as session:
            most = 0
            async for _ in session.deltas():
                if len(service.engine.cancelled) < 4:
                    await asyncio.to_thread(
                        wait_until,
                        lambda: service.engine.running == set() or session.output.finished,
                    )
                most = max(most, len(session._inbox._events))
            return [output.token_ids for output in session.output.outputs], most

    with fake_service(tmp_path) as service:
        texts, most = _in_gateway(service, read())
        first, *others = service.engine.submitted
        assert others, "it was never held up"
        assert not first.is_resumed and all(submit.is_resumed for submit in others)
    own = [sample_seed(5, index) for index in range(2)]
    assert texts == [[scripted_token(seed, 4 + at) for at in range(200)] for seed in own]
    assert most < 100


def test_more_requests_than_allowed_are_refused_until_one_has_ended(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"max_requests": 2}, is_paused=True) as service:
        streams = [service.client.stream(PROMPT, max_tokens=3) for _ in range(2)]
        wait_until(lambda: len(service.engine.submitted) == 2)
        with pytest.raises(CapacityError, match=r"2 requests are active already \(server\.max_r"):
            service.client.generate(PROMPT)
        service.engine.is_paused = False
        for stream in streams:
            stream.result()
        wait_until(lambda: service.client.status().active_requests == 0)
        assert len(service.client.generate(PROMPT, max_tokens=3).samples[0].token_ids) == 3
