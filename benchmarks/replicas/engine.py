"""An engine without tensors: the real scheduler, caches, step loop and link, and workers whose
steps only sleep."""

from __future__ import annotations

import argparse
import threading
from typing import Any

from outrider.catalog.proposers import traits
from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine
from outrider.engine.service import EngineService
from outrider.engine.step import StepLoop
from outrider.links.gateway_messages import EngineFacts
from outrider.links.listener import Listener
from outrider.links.secret import secret_from_environment
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.scheduler import Scheduler
from outrider.testing.fake_workers import FakeWorkers

CONFIG = EngineConfig.from_kwargs(
    model="smollm2-135m-instruct", draft_model="smollm2-135m-draft", block_size=16
)
BLOCK_SIZE = CONFIG.cache.block_size
VOCAB_SIZE = 49152
MAX_LEN = 8192
BUDGET = 2048  # tokens of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--seats", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    given = parser.parse_args()
    target, draft = (BlockPool(given.blocks, BLOCK_SIZE, True) for _ in range(2))
    limits = SchedulerLimits(given.seats, BUDGET)
    scheduler = Scheduler(limits, target, draft, traits(has_draft_model=True))
    workers: Any = FakeWorkers(
        given.blocks,
        given.blocks,
        BLOCK_SIZE,
        max_num_batched_tokens=BUDGET,
        verify_s=given.step_ms / 1000,
    )
    facts = EngineFacts(
        CONFIG.to_settings(), VOCAB_SIZE, (2,), MAX_LEN, 3, True, "fake", given.blocks
    )
    listener = Listener([given.listen], secret_from_environment(), {})
    built = BuiltEngine(CONFIG, StepLoop(scheduler, workers, workers), facts)
    service = EngineService(built, listener)
    print(f"listening on {listener.addresses[0]}", flush=True)
    threading.Thread(target=service.run, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
