"""Concurrent streams over one engine: same text as `LLM`, nothing left behind, no reader lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, EngineDeadError, RequestError
from outrider.scheduler.params import SamplingParams
from outrider.text.outputs import OutputDelta, RequestOutput

pytestmark = pytest.mark.model

PROMPTS = ["The capital of France is", "Once upon a time"]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig.from_kwargs(
        model="smollm2-135m-draft",
        method="ngram",
        max_model_len=512,
        kv_cache_gb=0.05,
        deterministic=True,
    )
    return Engine(build_engine(config))


@pytest.fixture
def server(engine: Engine) -> Iterator[AsyncEngine]:
    server = AsyncEngine(engine=engine)
    yield server
    server.close()
    assert not engine.has_work
    engine.built.loop.scheduler.check_integrity()


async def _collect(stream: AsyncIterator[OutputDelta]) -> tuple[str, RequestOutput]:
    deltas = [delta async for delta in stream]
    return "".join(delta.text for delta in deltas), deltas[-1].output


async def _until_idle(engine: Engine) -> None:
    while engine.has_work:
        await asyncio.sleep(0.01)


def _alone(engine: Engine, prompt: str) -> str:
    """The text of a prompt, stepped by hand as `LLM` does."""
    output = engine.add("alone", prompt, GREEDY)
    while engine.has_work:
        engine.step()
    return output.outputs[0].text


def test_two_streams_at_once_give_the_texts_of_each_alone(engine: Engine) -> None:
    expected = [_alone(engine, prompt) for prompt in PROMPTS]
    server = AsyncEngine(engine=engine)

    async def both() -> list[tuple[str, RequestOutput]]:
        streams = (server.generate(prompt, prompt, GREEDY) for prompt in PROMPTS)
        return await asyncio.gather(*map(_collect, streams))

    try:
        assert [text for text, _ in asyncio.run(both())] == expected
    finally:
        server.close()


def test_an_id_is_free_as_soon_as_a_stop_string_has_ended_its_request(engine: Engine) -> None:
    plain = engine.add("plain", PROMPTS[0], GREEDY)
    while not plain.finished:
        engine.step()
    its_own = plain.outputs[0].text[2:5]
    stopping = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=[its_own])
    before = engine.add("same", PROMPTS[0], stopping)
    while not before.finished:
        engine.step()
    after = engine.add("same", PROMPTS[0], GREEDY)
    while engine.has_work:
        engine.step()
    assert before.outputs[0].finish_reason == "stop"
    assert after.outputs[0].finish_reason == "length"
    assert len(after.outputs[0].token_ids) == 12


def test_the_deltas_together_are_the_output(server: AsyncEngine) -> None:
    text, output = asyncio.run(_collect(server.generate("r", PROMPTS[0], GREEDY)))
    assert text == output.outputs[0].text != ""
    assert output.finished and output.outputs[0].finish_reason == "length"


def test_every_sample_of_a_request_is_streamed(server: AsyncEngine) -> None:
    params = SamplingParams(n=3, max_tokens=6, seed=7, ignore_eos=True)
    _, output = asyncio.run(_collect(server.generate("r", PROMPTS[0], params)))
    assert [len(sample.token_ids) for sample in output.outputs] == [6, 6, 6]


def test_leaving_a_stream_early_cancels_it_and_frees_its_memory(server: AsyncEngine) -> None:
    pool = server.engine.built.loop.scheduler.target_pool
    free = pool.num_free

    async def leave() -> RequestOutput:
        stream: Any = server.generate("r", PROMPTS[0], LONG)
        first: OutputDelta = await anext(stream)
        await stream.aclose()
        await _until_idle(server.engine)
        return first.output

    output = asyncio.run(leave())
    assert output.outputs[0].finish_reason == "cancelled"
    assert len(output.outputs[0].token_ids) < 400
    assert pool.num_free == free


def test_a_request_past_its_deadline_ends_with_what_it_has(server: AsyncEngine) -> None:
    stream = server.generate("r", PROMPTS[0], LONG, timeout_s=0.05)
    _, output = asyncio.run(_collect(stream))
    assert output.outputs[0].finish_reason == "deadline"
    assert len(output.outputs[0].token_ids) < 400


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(server: AsyncEngine) -> None:
    async def twice() -> str:
        first: Any = server.generate("same", PROMPTS[0], GREEDY)
        text: str = (await anext(first)).text
        with pytest.raises(RequestError, match="request id 'same' is in use"):
            await _collect(server.generate("same", PROMPTS[1], GREEDY))
        return text + (await _collect(first))[0]

    assert asyncio.run(twice()) == _collected_alone(server)


def _collected_alone(server: AsyncEngine) -> str:
    return asyncio.run(_collect(server.generate("again", PROMPTS[0], GREEDY)))[0]


def test_an_id_may_be_used_again_after_a_stop_string(server: AsyncEngine) -> None:
    """The scheduler hears of a stop string late; that must not end the next request."""
    text = _collected_alone(server)
    stop = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=[text[3:6]])

    async def one_after_the_other() -> tuple[str, str]:
        stopped, _ = await _collect(server.generate("r", PROMPTS[0], stop))
        return stopped, (await _collect(server.generate("r", PROMPTS[0], GREEDY)))[0]

    stopped, whole = asyncio.run(one_after_the_other())
    assert stopped == text[: text.index(text[3:6])]
    assert whole == text


def test_a_bad_request_is_refused_and_the_engine_goes_on(server: AsyncEngine) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        asyncio.run(_collect(server.generate("bad", "", GREEDY)))
    assert _collected_alone(server) != ""


@pytest.mark.parametrize("request_id", [[], None, 5])
def test_an_id_that_is_no_text_is_refused_and_the_engine_goes_on(
    server: AsyncEngine, request_id: Any
) -> None:
    async def ask() -> None:
        async with asyncio.timeout(10):
            await _collect(server.generate(request_id, PROMPTS[0], GREEDY))

    with pytest.raises(RequestError, match="request_id is .*; it must be text"):
        asyncio.run(ask())
    assert _collected_alone(server) != ""


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 10**400, "x", True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(
    server: AsyncEngine, timeout_s: Any
) -> None:
    with pytest.raises(RequestError, match="timeout_s is .*; it must be a number of seconds"):
        asyncio.run(_collect(server.generate("r", PROMPTS[0], GREEDY, timeout_s=timeout_s)))
    assert _collected_alone(server) != ""


def test_a_closed_engine_refuses_requests(engine: Engine) -> None:
    server = AsyncEngine(engine=engine)
    server.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        asyncio.run(_collect(server.generate("r", PROMPTS[0], GREEDY)))


class BrokenEngine:
    """Takes requests like the engine it stands for, and fails at the first step."""

    def __init__(self, engine: Engine) -> None:
        self.prepare = engine.prepare
        self.has_work = False

    def add_prepared(self, prepared: Any) -> None:
        self.has_work = True

    def step(self) -> list[OutputDelta]:
        raise RuntimeError("out of luck")


@pytest.mark.parametrize("count", [1, 2])
def test_a_failed_step_ends_every_stream_with_an_error(engine: Engine, count: int) -> None:
    broken: Any = BrokenEngine(engine)
    server = AsyncEngine(engine=broken)

    async def all_of_them() -> list[Any]:
        streams = [server.generate(str(i), PROMPTS[0], GREEDY) for i in range(count)]
        return await asyncio.gather(*map(_collect, streams), return_exceptions=True)

    errors = asyncio.run(all_of_them())
    assert [type(error) for error in errors] == [EngineDeadError] * count
    assert "out of luck" in str(errors[0])


def test_after_a_failed_step_new_requests_are_refused(engine: Engine) -> None:
    broken: Any = BrokenEngine(engine)
    server = AsyncEngine(engine=broken)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="out of luck"):
            asyncio.run(_collect(server.generate("r", PROMPTS[0], GREEDY)))


def test_an_engine_is_built_from_the_options_of_llm() -> None:
    server = AsyncEngine("smollm2-135m-draft", max_model_len=64, kv_cache_gb=0.05)
    try:
        assert server.engine.built.config.target.max_model_len == 64
        text, _ = asyncio.run(_collect(server.generate("one", PROMPTS[0])))
        assert text
    finally:
        server.close()


def test_an_engine_and_options_are_not_given_together(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="give either engine or options to AsyncEngine"):
        AsyncEngine("smollm2-135m-draft", engine=engine)
    with pytest.raises(ConfigError, match="give either config or single options to AsyncEngine"):
        AsyncEngine("smollm2-135m-draft", config=EngineConfig())


def test_a_closed_engine_says_so(engine: Engine) -> None:
    server = AsyncEngine(engine=engine)
    server.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        asyncio.run(_collect(server.generate("late", PROMPTS[0])))


def test_arguments_in_another_order_are_told_the_right_one(server: AsyncEngine) -> None:
    arguments: Any = (PROMPTS[0], GREEDY, "an id")
    with pytest.raises(RequestError, match="params is 'an id'; call generate.request_id, prompt"):
        asyncio.run(_collect(server.generate(*arguments)))
