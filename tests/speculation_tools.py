"""A real scheduler with a controller that knows costs, on workers without a model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from fake_engine import MODEL, SECRET, fake_facts, fake_tokenizer_source, running_server
from scheduler_tools import make_request

from outrider.catalog.proposers import DRAFT, traits
from outrider.client import Client
from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine
from outrider.engine.service import EngineService
from outrider.engine.step import StepLoop
from outrider.links.listener import Listener
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.costs import CostTable, StepCosts
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.scheduler import Scheduler
from outrider.testing.fake_workers import FakeWorkers

BLOCKS, BLOCK_SIZE, BUDGET, SEATS = 512, 4, 64, 8
VERIFY_S, DRAFT_S = 0.001, 0.0001
# A pass costs the same for any number of tokens, so drafts that are right pay.
CHEAP = StepCosts(
    CostTable((1, 64), (VERIFY_S, VERIFY_S)),
    CostTable((1, 8), (DRAFT_S, DRAFT_S)),
    CostTable((1, 8), (DRAFT_S, DRAFT_S)),
)
# Drafting one token takes as long as three passes.
DEAR = StepCosts(
    CostTable((1, 64), (VERIFY_S, VERIFY_S)),
    CostTable((1, 8), (3 * VERIFY_S, 3 * VERIFY_S)),
    CostTable((1, 8), (3 * VERIFY_S, 3 * VERIFY_S)),
)


def speculating_loop(
    policy: str = "goodput",
    costs: StepCosts | None = CHEAP,
    *,
    acceptance: float = 0.8,
    draft_s: float = DRAFT_S,
) -> StepLoop:
    """Workers that take as long as `CHEAP` says, unless told otherwise."""
    scheduler = Scheduler(
        SchedulerLimits(SEATS, BUDGET),
        BlockPool(BLOCKS, BLOCK_SIZE, True),
        BlockPool(BLOCKS, BLOCK_SIZE, True),
        traits(has_draft_model=True),
        SpeculationControl(policy, costs, seats=SEATS),
    )
    workers = FakeWorkers(
        BLOCKS,
        BLOCKS,
        BLOCK_SIZE,
        max_num_batched_tokens=BUDGET,
        acceptance=acceptance,
        propose_s=draft_s,
        verify_s=VERIFY_S,
    )
    return StepLoop(scheduler, workers, workers)


_names = itertools.count()


def add_requests(loop: StepLoop, count: int = 2, *, depth: int = 3, max_tokens: int = 60) -> None:
    for _ in range(count):
        name = f"r{next(_names)}"
        loop.scheduler.add(
            make_request(name, [1, 2, 3], max_tokens, proposer=DRAFT if depth else "", depth=depth)
        )


def run(loop: StepLoop, steps: int) -> None:
    for number in range(steps):
        loop.step(float(number))


@dataclass
class ServedEngines:
    """An address, and the engine that listens there now; the last can be replaced by another."""

    address: str
    loops: list[StepLoop] = field(default_factory=list)
    _service: EngineService | None = None
    _listener: Listener | None = None
    _thread: threading.Thread | None = None

    def start(self, loop: StepLoop) -> None:
        config = EngineConfig.from_kwargs(model=MODEL, draft_model=MODEL)
        self._listener = Listener([self.address], SECRET, {})
        built = BuiltEngine(config, loop, fake_facts())
        self._service = EngineService(built, self._listener)
        self._thread = threading.Thread(target=self._service.run, daemon=True)
        self._thread.start()
        self.loops.append(loop)

    def stop(self) -> None:
        if self._service is None or self._listener is None or self._thread is None:
            return
        self._service.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()
        self._service.close()
        self._service = None


@contextmanager
def served_engines(folder: Path, loop: StepLoop) -> Iterator[tuple[ServedEngines, Client]]:
    """A real gateway and client before a real engine whose models are fakes."""
    engines = ServedEngines(f"unix:{folder}/engine.sock")
    engines.start(loop)
    try:
        with (
            mock.patch("outrider.gateway.served_model.load_tokenizer", fake_tokenizer_source),
            running_server(engines) as server,  # type: ignore[arg-type]  # it has an address
            Client(server.grpc_address) as client,
        ):
            client.wait_ready(20)
            yield engines, client
    finally:
        engines.stop()
