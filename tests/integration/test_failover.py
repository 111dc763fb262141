"""Real gateways before a real engine service whose model is a hash: under load, and when it is
lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import pytest
from cut_connections import way_to
from fake_engine import SECRET, fake_facts, fake_tokenizer_source, running_server
from waits import wait_until

from outrider.catalog.proposers import traits
from outrider.client import Client, Stream, prompt_request
from outrider.engine.service import EngineService
from outrider.engine.step import StepLoop
from outrider.errors import CapacityError
from outrider.kernels.seeds import sample_seed
from outrider.links.listener import Listener
from outrider.proto.generation_pb2_grpc import GenerationStub
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.scheduler import Scheduler
from outrider.testing.fake_kv import text_hashes
from outrider.testing.fake_model import FakeModel
from outrider.testing.fake_workers import FakeWorkers

pytestmark = [pytest.mark.thorough]

BLOCKS, BLOCK_SIZE, BUDGET = 512, 4, 256
PROMPT = [10, 11, 12, 13]
NUM_STREAMS, NUM_TOKENS = 6, 120


class Engine:
    """One life of an engine at an address. It steps from `start` on."""

    def __init__(
        self, address: str, *, max_num_seqs: int, max_waiting: int, **settings: Any
    ) -> None:
        """`settings` are those of the server."""
        limits = SchedulerLimits(max_num_seqs, BUDGET, 0, max_waiting=max_waiting)
        target, draft = (BlockPool(BLOCKS, BLOCK_SIZE) for _ in range(2))
        self.scheduler = Scheduler(limits, target, draft, traits(has_draft_model=True))
        workers: Any = FakeWorkers(
            BLOCKS, BLOCKS, BLOCK_SIZE, max_num_batched_tokens=BUDGET, verify_s=0.002
        )
        facts = fake_facts()
        facts.settings.update({f"server.{name}": value for name, value in settings.items()})
        engine: Any = SimpleNamespace(
            loop=StepLoop(self.scheduler, workers, workers),
            facts=facts,
            check=lambda: None,
        )
        self._listener = Listener([address], SECRET, {})
        self.service = EngineService(engine, self._listener)
        self._thread = threading.Thread(target=self.service.run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.service.stop()
        if self._thread.ident is not None:
            self._thread.join(60)
            assert not self._thread.is_alive()
        self._listener.close()
        self.service.close()


@contextmanager
def life(address: str, **limits: Any) -> Iterator[Engine]:
    engine = Engine(address, **limits)
    try:
        yield engine
    finally:
        engine.end()


@contextmanager
def clients(address: str) -> Iterator[Client]:
    engine: Any = SimpleNamespace(address=address)
    with (
        mock.patch("outrider.gateway.served_model.load_tokenizer", fake_tokenizer_source),
        running_server(engine) as server,
        Client(server.grpc_address) as client,
    ):
        client.wait_ready(20)
        yield client


def started(client: Client, seed: int) -> Stream:
    """A stream that has its first token, so that nothing of it waits any more."""
    stream = client.stream(PROMPT, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    next(stream)
    return stream


def expected(seed: int, index: int = 0) -> list[int]:
    text = text_hashes(PROMPT)[-1]
    return FakeModel().continuation(text, sample_seed(seed, index), NUM_TOKENS)


def test_streams_that_ran_are_not_cut_by_an_engine_in_which_fewer_may_wait(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with life(address, max_num_seqs=NUM_STREAMS, max_waiting=1) as first:
        first.start()
        with clients(address) as client:
            streams = [started(client, seed) for seed in range(NUM_STREAMS)]
            assert first.scheduler.num_running == NUM_STREAMS
            first.end()
            with life(address, max_num_seqs=1, max_waiting=1) as second:
                # All of them are there before the first step.
                wait_until(lambda: second.service._commands.qsize() == NUM_STREAMS)
                second.start()
                done = [stream.result() for stream in streams]
                assert second.scheduler.stats.finished == NUM_STREAMS
    for seed, each in enumerate(done):
        assert each.samples[0].token_ids == expected(seed)
        assert each.resubmissions == 1


def test_a_new_request_is_refused_while_as_many_wait_as_may(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with life(address, max_num_seqs=1, max_waiting=1) as engine, clients(address) as client:
        waiting = client.stream(PROMPT, max_tokens=3, ignore_eos=True)
        wait_until(lambda: engine.service._commands.qsize() == 1)
        refused = client.stream(PROMPT, max_tokens=3, request_id="mine")
        wait_until(lambda: engine.service._commands.qsize() == 2)
        engine.start()
        with pytest.raises(CapacityError) as caught:
            refused.result()
        assert str(caught.value) == "1 requests are waiting already (max_waiting); retry later."
        assert len(waiting.result().samples[0].token_ids) == 3


def test_a_request_with_a_sample_too_many_is_refused_whole(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with life(address, max_num_seqs=1, max_waiting=2) as engine, clients(address) as client:
        engine.start()
        with pytest.raises(CapacityError, match="2 requests are waiting already"):
            client.generate(PROMPT, n=4, max_tokens=NUM_TOKENS)
        wait_until(lambda: not engine.scheduler.has_work)


def test_gateways_that_give_the_same_handles_get_their_own_samples(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with (
        life(address, max_num_seqs=4, max_waiting=4) as engine,
        clients(address) as one,
        clients(address) as other,
    ):
        engine.start()
        options: dict[str, Any] = {"n": 2, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        streams = [
            client.stream(PROMPT, seed=seed, **options) for seed, client in enumerate((one, other))
        ]
        for seed, stream in enumerate(streams):
            samples = stream.result().samples
            assert [each.token_ids for each in samples] == [expected(seed, i) for i in range(2)]


@pytest.mark.parametrize("n", [1, 3])
def test_a_resumable_request_goes_on_in_the_engine_for_a_reader_at_another_gateway(
    tmp_path: Path, n: int
) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with (
        life(address, max_num_seqs=4, max_waiting=4) as engine,
        clients(address) as one,
        clients(address) as other,
        way_to(one.address) as way,
        Client(way.address) as client,
    ):
        engine.start()
        stream = client.stream(
            PROMPT, seed=3, n=n, max_tokens=NUM_TOKENS, ignore_eos=True, resumable=True
        )
        next(stream)
        way.target = other.address
        way.cut()
        done = stream.result()
        assert [each.token_ids for each in done.samples] == [expected(3, i) for i in range(n)]
        assert done.resumptions == 1
        assert engine.scheduler.stats.committed_tokens == n * NUM_TOKENS  # none of them twice
        wait_until(lambda: engine.service._resumable.num_samples == 0)


def test_a_resumable_request_that_is_cancelled_frees_the_engine(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with life(address, max_num_seqs=4, max_waiting=4) as engine, clients(address) as client:
        engine.start()
        options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "resumable": True}
        stream = client.stream(PROMPT, **options)
        next(stream)
        stream.cancel()
        wait_until(lambda: not engine.scheduler.has_work)
        assert engine.service._resumable.num_samples == 0


@pytest.mark.parametrize("settings", [{"resume_window_s": 0.2}, {"max_resumable": 0}])
def test_a_request_nobody_comes_back_for_is_ended_as_the_server_is_configured(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with (
        life(address, max_num_seqs=4, max_waiting=4, **settings) as engine,
        clients(address) as client,
        grpc.insecure_channel(client.address) as channel,
    ):
        engine.start()
        request = prompt_request(PROMPT, max_tokens=400, ignore_eos=True, resumable=True)
        call = GenerationStub(channel).Generate(request)
        next(call)
        assert engine.service._resumable.num_samples == 1
        call.cancel()
        wait_until(lambda: engine.service._resumable.num_samples == 0)
        wait_until(lambda: not engine.scheduler.has_work)
