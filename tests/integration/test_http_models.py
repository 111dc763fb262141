"""Texts of the bundled models over HTTP: the same streamed, whole, by gRPC and without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from fake_engine import SECRET, running_server
from http_tools import TIMEOUT_S
from waits import wait_until

from outrider import LLM, SamplingParams
from outrider.client import Client
from outrider.config import EngineConfig
from outrider.engine.build import build_engine
from outrider.engine.service import EngineService
from outrider.links.listener import Listener

pytestmark = [pytest.mark.model]

TARGET, DRAFT = "smollm2-135m-instruct", "smollm2-135m-draft"
OPTIONS: dict[str, Any] = {
    "deterministic": True,
    "kv_cache_gb": 0.1,
    "max_model_len": 256,
    "log_level": "error",
}
PROMPT = "The three primary colours are"
MESSAGES: Any = [{"role": "user", "content": "Name a river."}]
NUM_TOKENS = 10


@dataclass(frozen=True)
class Serving:
    """Both kinds of clients of one server, and the engine behind it."""

    http: openai.OpenAI
    grpc: Client
    loop: Any


@dataclass
class _Address:
    address: str


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    address = f"unix:{tmp_path_factory.mktemp('http')}/engine.sock"
    config = EngineConfig.from_kwargs(
        model=TARGET, draft_model=DRAFT, speculation_policy="fixed", **OPTIONS
    )
    listener = Listener([address], SECRET, {})
    engine = build_engine(config)
    service = EngineService(engine, listener)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        source: Any = _Address(address)
        with running_server(source) as server, Client(server.grpc_address) as client:
            client.wait_ready(30)
            address = f"http://{server.http_address}/v1"
            with openai.OpenAI(base_url=address, api_key="x", timeout=TIMEOUT_S) as http:
                yield Serving(http, client, engine.loop)
        service.stop()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        listener.close()
        engine.close()


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, float], str]:
    """What the target writes alone and without a server."""
    with LLM(TARGET, draft_model=None, **OPTIONS) as llm:
        found = {}
        for temperature in (0.0, 0.9):
            params = SamplingParams(temperature=temperature, seed=5, max_tokens=NUM_TOKENS)
            [done] = llm.generate([PROMPT], params)
            [answer] = llm.chat(MESSAGES, params)
            found["text", temperature] = done.outputs[0].text
            found["chat", temperature] = answer.outputs[0].text
        return found


@pytest.mark.parametrize(("method", "temperature"), [("draft", 0.0), ("draft", 0.9), ("off", 0.9)])
def test_every_way_to_ask_gives_the_text_of_the_target_alone(
    serving: Serving, expected: dict[tuple[str, float], str], method: str, temperature: float
) -> None:
    asked: Any = {"temperature": temperature, "top_p": 1.0, "seed": 5, "max_tokens": NUM_TOKENS}
    of_openai: Any = {"model": TARGET, "extra_body": {"speculation": method}, **asked}
    text = expected["text", temperature]
    whole: Any = serving.http.completions.create(prompt=PROMPT, **of_openai)
    assert whole.choices[0].text == text
    drafted = whole.speculation_stats["drafted_tokens"]  # how many were right is the draft's luck
    assert (drafted > 0) is (method == "draft")
    parts = serving.http.completions.create(prompt=PROMPT, stream=True, **of_openai)
    assert "".join(part.choices[0].text for part in parts) == text
    assert serving.grpc.generate(PROMPT, speculation=method, **asked).text == text

    text = expected["chat", temperature]
    answer = serving.http.chat.completions.create(messages=MESSAGES, **of_openai)
    assert answer.choices[0].message.content == text
    said: Any = serving.http.chat.completions.create(messages=MESSAGES, stream=True, **of_openai)
    assert "".join(part.choices[0].delta.content or "" for part in said) == text
    assert serving.grpc.chat(MESSAGES, speculation=method, **asked).text == text


def test_a_client_that_leaves_frees_its_memory_within_two_steps(serving: Serving) -> None:
    scheduler = serving.loop.scheduler
    pool, stats = scheduler.target_pool, scheduler.stats
    wait_until(lambda: pool.num_free == pool.num_blocks)
    seen: list[tuple[int, bool]] = []  # steps done, and whether all memory was free
    cancelled_at: list[int] = []
    cancel, step = scheduler.cancel, serving.loop.step

    def watched_cancel(*arguments: Any) -> None:
        cancelled_at.append(stats.steps)
        cancel(*arguments)

    def watched_step(now_s: float) -> Any:
        updates = step(now_s)
        seen.append((stats.steps, pool.num_free == pool.num_blocks))
        return updates

    vars(scheduler)["cancel"], vars(serving.loop)["step"] = watched_cancel, watched_step
    try:
        more = {"ignore_eos": True}
        stream = serving.http.completions.create(
            model=TARGET, prompt=PROMPT, max_tokens=200, stream=True, extra_body=more
        )
        next(iter(stream))
        stream.close()
        deadline_s = time.monotonic() + 60
        while not (cancelled_at and seen[-1][1]):
            assert time.monotonic() < deadline_s, "the request goes on"
            time.sleep(0.01)
    finally:
        del vars(scheduler)["cancel"], vars(serving.loop)["step"]
    free_at = next(steps for steps, is_free in seen if is_free and steps >= cancelled_at[0])
    assert free_at <= cancelled_at[0] + 2
