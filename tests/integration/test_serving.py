"""Clients, gateway, engine and ranks as they are in service: real processes, real models."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_engine import running_server
from same_text import TEMPERATURES

from outrider import LLM, SamplingParams
from outrider.client import Client, DeadlineError
from outrider.config import EngineConfig
from outrider.engine.build import build_served
from outrider.engine.launch.ranks import SpawnedRanks
from outrider.engine.over_ranks import group_sizes
from outrider.engine.service import EngineService
from outrider.errors import CapacityError, RequestError
from outrider.links.listener import Listener

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-draft"
NUM_CLIENTS = 16
PROMPTS = ["The sky is", "Once upon a time", "def add(a, b):", "The capital of France is"]


@dataclass
class Serving:
    """A client, and the engine behind its server with what happened there step by step."""

    client: Client
    service: EngineService
    scheduler: Any
    cancelled_at: list[int] = field(default_factory=list)  # steps done when a cancel came in
    freed_at: list[int] = field(default_factory=list)  # steps done when all KV was free again

    def watch(self) -> None:
        """Note cancels and the freeing of memory on the engine's own thread."""
        scheduler, loop = self.scheduler, self.service._loop
        cancel, step = scheduler.cancel, loop.step

        def watched_cancel(*arguments: Any) -> None:
            self.cancelled_at.append(scheduler.stats.steps)
            cancel(*arguments)

        def watched_step(now_s: float) -> Any:
            updates = step(now_s)
            pool = scheduler.target_pool
            if pool.num_free == pool.num_blocks:
                self.freed_at.append(scheduler.stats.steps)
            return updates

        vars(scheduler)["cancel"], vars(loop)["step"] = watched_cancel, watched_step


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    config = EngineConfig.from_kwargs(
        model=MODEL,
        draft_model=MODEL,
        tensor_parallel_size=2,
        num_speculative_tokens=3,
        speculation_policy="fixed",
        kv_cache_gb=0.05,
        max_model_len=512,
        deterministic=True,
        num_threads=1,
        log_level="error",
    )
    sizes = group_sizes(config)
    ranks = SpawnedRanks(sizes, "cpu")
    listener = Listener([ranks.address], ranks.secret, sizes)
    engine = build_served(config, listener, ranks, print)
    service = EngineService(engine, listener)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        with running_server(ranks, ranks.secret) as server, Client(server.grpc_address) as client:  # type: ignore[arg-type]
            client.wait_ready(30)
            yield Serving(client, service, engine.loop.scheduler)
        service.stop()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        engine.close()
        ranks.close()


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(MODEL, deterministic=True, kv_cache_gb=0.05, max_model_len=512, log_level="error")


def wait_idle(serving: Serving) -> Any:
    deadline_s = time.monotonic() + 60
    while True:
        engine = serving.client.status().engine
        assert engine is not None
        if engine.running == engine.waiting == engine.kv_blocks_used == 0:
            return engine
        assert time.monotonic() < deadline_s, f"still running: {engine}"
        time.sleep(0.02)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_stream_adds_up_to_the_text_of_one_process(
    serving: Serving, alone: LLM, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=40, ignore_eos=True)
    [expected] = alone.generate([PROMPTS[0]], params)
    stream = serving.client.stream(PROMPTS[0], params)
    chunks = list(stream)
    sample = stream.completion.samples[0]
    assert "".join(chunk.text for chunk in chunks) == expected.outputs[0].text
    assert list(sample.token_ids) == expected.outputs[0].token_ids
    assert len(chunks) > 1, "it is no stream"
    assert stream.completion.seed == 11
    assert stream.completion.usage.completion_tokens == 40
    assert stream.completion.speculation.accepted_tokens > 0


def test_sixteen_clients_at_once_get_the_texts_they_get_alone(serving: Serving, alone: LLM) -> None:
    asked = [
        (
            PROMPTS[i % len(PROMPTS)],
            SamplingParams(temperature=0.8, seed=i, max_tokens=24, top_p=0.95, ignore_eos=True),
        )
        for i in range(NUM_CLIENTS)
    ]

    def ask(prompt: str, params: SamplingParams) -> list[int]:
        with Client(serving.client.address) as client:
            return list(client.generate(prompt, params).samples[0].token_ids)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(ask, *zip(*asked, strict=True)))
    expected = alone.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert answers == [output.outputs[0].token_ids for output in expected]


def test_a_cancelled_stream_frees_its_memory_within_two_steps(serving: Serving) -> None:
    wait_idle(serving)
    serving.watch()
    stream = serving.client.stream(PROMPTS[1], max_tokens=400, ignore_eos=True)
    for _ in zip(range(5), stream, strict=False):
        pass
    serving.cancelled_at.clear()
    serving.freed_at.clear()
    stream.cancel()
    wait_idle(serving)
    assert len(serving.cancelled_at) == 1
    assert serving.freed_at[0] <= serving.cancelled_at[0] + 2


def test_a_deadline_ends_the_stream_and_frees_the_engine(serving: Serving) -> None:
    tokens = 0
    with pytest.raises(DeadlineError):
        for chunk in serving.client.stream(
            PROMPTS[1], max_tokens=480, ignore_eos=True, speculation="off", timeout_s=1.0
        ):
            tokens += len(chunk.token_ids)
    assert 0 < tokens < 480
    wait_idle(serving)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [10**6]}, "token ids must be from 0 to"),
        ({"prompt": [5] * 600}, "max_model_len"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"n": 0}, "n "),
    ],
)
def test_a_bad_request_gets_a_sentence_and_the_server_goes_on(
    serving: Serving, bad: dict[str, Any], sentence: str
) -> None:
    arguments: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 4} | bad
    with pytest.raises((RequestError, CapacityError), match=sentence):
        serving.client.generate(**arguments)
    assert serving.client.generate(PROMPTS[0], max_tokens=2).usage.completion_tokens <= 2


def test_status_shows_every_rank_with_a_pid_of_its_own(serving: Serving) -> None:
    engine = wait_idle(serving)
    shown = [(rank.role, rank.rank, rank.state) for rank in engine.ranks]
    assert shown == [("target", 0, "ready"), ("target", 1, "ready"), ("draft", 0, "ready")]
    assert len({rank.pid for rank in engine.ranks}) == 3
    assert engine.proposal_backend == "tcp"
