"""Clients of one head at once, one of whom wants what is bad for the others: their texts stay."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_engine import running_server
from head_checkpoints import save_spelling
from waits import wait_until

from outrider.client import Client
from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine, build_served
from outrider.engine.launch.ranks import SpawnedRanks
from outrider.engine.over_ranks import group_sizes
from outrider.engine.service import EngineService
from outrider.links.listener import Listener
from outrider.scheduler.types import NO_PROPOSER, StepPlan

pytestmark = pytest.mark.model

HEAD = "eagle3"
NUM_TOKENS = 120
MAX_LEN = 256
LIMIT_S = 60.0
SHARED = "the same beginning of many a request, which is cached "
ASKED: list[dict[str, Any]] = [
    {"prompt": SHARED + "and goes on", "temperature": 0.0},
    {"prompt": SHARED + "or does not", "temperature": 1.0, "seed": 1, "n": 2},
    {"prompt": "once", "temperature": 0.7, "seed": 2, "top_k": 9, "presence_penalty": 0.5},
    {"prompt": "twice", "temperature": 0.9, "seed": 3, "top_p": 0.9, "logprobs": 2},
]
# What each of them asks for, round after round.
WAYS: list[dict[str, Any]] = [
    {},
    {"speculation": "off"},
    {"speculation": "ngram"},
    {"speculation": HEAD, "num_speculative_tokens": 7, "fix_depth": True},
    {"num_speculative_tokens": 0},
]
REFUSED: list[dict[str, Any]] = [
    {"num_speculative_tokens": 33},
    {"num_speculative_tokens": 32, "fix_depth": True},
    {"num_speculative_tokens": -1},
    {"fix_depth": True},
    {"speculation": "draft"},
    {"speculation": "medusa"},
    {"speculation": "no such thing"},
    {"prompt": "x" * 2 * MAX_LEN},
    {"temperature": -1.0},
]
GREEDY_FOR_WORK: list[dict[str, Any]] = [
    {"num_speculative_tokens": 32},
    {"num_speculative_tokens": 8, "fix_depth": True, "n": 4},
    {"speculation": "off", "n": 4},
    {"speculation": "ngram", "num_speculative_tokens": 32, "prompt": "ab" * 60},
    {"speculation": HEAD, "num_speculative_tokens": 1, "prompt_logprobs": 2},
]
SETTINGS: list[tuple[str, int | None]] = [
    ("off", None),
    ("fixed", 0),
    ("goodput", 3),
    ("fixed", None),
]


class Serving:
    """A server with ranks of their own, and who drafted for its rows so far."""

    def __init__(self, address: str, http_address: str, engine: BuiltEngine) -> None:
        self.address = address
        self.http_address = http_address
        self.scheduler = engine.loop.scheduler
        self.drafted_by: set[str] = set()
        make_plan = self.scheduler.plan

        def watched(now_s: float) -> StepPlan | None:
            plan = make_plan(now_s)
            self.drafted_by |= {row.proposer for row in (plan.rows if plan is not None else ())}
            return plan

        vars(self.scheduler)["plan"] = watched

    def is_idle(self) -> bool:
        pool = self.scheduler.target_pool
        return not self.scheduler.has_work and pool.num_free == pool.num_blocks


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    save_spelling(folder, HEAD)
    config = EngineConfig.from_kwargs(
        model=str(folder / "target"),
        head_model=str(folder / "head"),
        head_method=HEAD,
        tensor_parallel_size=request.param,
        num_speculative_tokens=3,
        speculation_policy="fixed",
        kv_cache_gb=0.002,  # some have to wait, or to make room
        block_size=8,
        max_model_len=MAX_LEN,
        max_num_seqs=8,
        deterministic=True,
        num_threads=1,
        log_level="error",
    )
    sizes = group_sizes(config)
    ranks = SpawnedRanks(sizes, "cpu")
    listener = Listener([ranks.address], ranks.secret, sizes)
    engine = build_served(config, listener, ranks, lambda told: None)
    service = EngineService(engine, listener)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        with running_server(ranks, ranks.secret) as server:  # type: ignore[arg-type]
            with Client(server.grpc_address) as client:
                client.wait_ready(LIMIT_S)
            yield Serving(server.grpc_address, server.http_address, engine)
        service.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    finally:
        engine.close()
        ranks.close()


def _texts(client: Client, asked: dict[str, Any], **own: Any) -> list[tuple[Any, ...]]:
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout_s": LIMIT_S}
    done = client.generate(**(common | asked | own))
    return [(each.text, each.token_ids, each.finish_reason) for each in done.samples]


def _status_of(http_address: str, wanted: dict[str, Any]) -> int:
    """As it is: a client of ours would not send what is wrong."""
    connection = http.client.HTTPConnection(http_address, timeout=LIMIT_S)
    try:
        body = json.dumps({"prompt": "hello", "max_tokens": 4} | wanted)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def _misbehave(address: str, http_address: str, is_over: threading.Event) -> int:
    """Until it is over; how many requests were refused, each with a sentence."""
    num_refused = 0
    with Client(address) as client:
        for number in itertools.count():
            if is_over.is_set() and number >= max(len(REFUSED), len(GREEDY_FOR_WORK)):
                return num_refused
            assert _status_of(http_address, REFUSED[number % len(REFUSED)]) == 400
            num_refused += 1
            policy, max_depth = SETTINGS[number % len(SETTINGS)]
            client.set_speculation(policy, max_depth, lift_max_depth=max_depth is None)
            wanted = GREEDY_FOR_WORK[number % len(GREEDY_FOR_WORK)]
            common: dict[str, Any] = {"prompt": SHARED, "max_tokens": 60, "ignore_eos": True}
            stream = client.stream(**(common | wanted), timeout_s=LIMIT_S)
            for _ in itertools.islice(stream, 3 + number % 5):
                pass
            stream.cancel()
    raise AssertionError("counting ends nowhere")


def _well_behaved(
    address: str, asked: dict[str, Any], first: int, meet: Callable[[], Any]
) -> list[Any]:
    with Client(address) as client:
        meet()
        ways = WAYS[first:] + WAYS[:first]
        return [_texts(client, asked, **way) for way in ways]


def test_a_hostile_client_changes_no_text_of_its_neighbours(serving: Serving) -> None:
    with Client(serving.address) as client:
        expected = [_texts(client, asked, speculation="off") for asked in ASKED]
    assert serving.drafted_by == {NO_PROPOSER}
    is_over, barrier = threading.Event(), threading.Barrier(len(ASKED), timeout=LIMIT_S)
    with ThreadPoolExecutor(len(ASKED) + 1) as pool:
        hostile = pool.submit(_misbehave, serving.address, serving.http_address, is_over)
        try:
            told = [
                pool.submit(_well_behaved, serving.address, asked, first, barrier.wait)
                for first, asked in enumerate(ASKED)
            ]
            found = [each.result(LIMIT_S) for each in told]
        finally:
            is_over.set()
        assert hostile.result(LIMIT_S) >= len(REFUSED)
    assert found == [[texts] * len(WAYS) for texts in expected]
    assert {HEAD, "ngram"} <= serving.drafted_by
    wait_until(serving.is_idle, LIMIT_S)
    serving.scheduler.check_integrity()
    with Client(serving.address) as client:
        client.set_speculation("fixed", lift_max_depth=True)
        done = client.generate(**ASKED[0], max_tokens=NUM_TOKENS, ignore_eos=True)
    assert done.token_ids == expected[0][0][1]
    assert done.speculation.accepted_tokens > 0
