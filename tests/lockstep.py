"""A whole engine whose ranks are threads of this process: real shards, samplers and step loop.

Processes take seconds to start and threads do not, so every family and size can be tried. What
every rank decides is compared in every pass: they must agree without being told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from rank_threads import ThreadGroup, make_groups, same_on_all

from outrider.catalog.proposers import DRAFT, NGRAM
from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine
from outrider.engine.engine import Engine
from outrider.engine.sizing import PoolSizes, make_scheduler, settle_for_device
from outrider.engine.step import StepLoop
from outrider.kernels.ops import select_ops
from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import Proposal, StepPlan, Ticket, Verdict
from outrider.text.outputs import RequestOutput
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Shard
from outrider.workers.proposers.base import Proposer, Proposers
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.proposers.ngram import NgramProposer
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.target import LocalTarget
from outrider.workers.weights.checkpoint import load_spec
from outrider.workers.weights.loader import load_model

NUM_BLOCKS = 64
CPU = torch.device("cpu")

W = TypeVar("W")
R = TypeVar("R")


class Ranks:
    """The same worker on every rank, each with rows of its own."""

    def __init__(self, make: Callable[[ThreadGroup, RowTable], W], size: int, rows: int) -> None:
        self._pool = ThreadPoolExecutor(size)
        self.tables = [RowTable(rows) for _ in range(size)]
        self._workers = list(map(make, make_groups(size), self.tables))

    def call(self, work: Callable[[Any], R]) -> list[R]:
        return list(self._pool.map(work, self._workers))


class LockstepTarget(Ranks):
    lag = 0
    max_depth: int | None = None

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        verdicts: list[Verdict] = self.call(lambda worker: worker.verify(plan, ticket))
        same_on_all([verdict.rows for verdict in verdicts])
        return verdicts[0]


class LockstepDraft(Ranks, Proposer):
    """As a draft group does, follows plans it has no part in."""

    def follow(self, plan: StepPlan) -> None:
        self.call(lambda worker: worker.follow(plan))

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        proposals: list[Mapping[int, Proposal]] = self.call(lambda worker: worker.propose(plan))
        tokens = [{row: p.tokens for row, p in each.items()} for each in proposals]
        same_on_all(tokens)
        return proposals[0]

    def observe(self, verdict: Verdict) -> None:
        self.call(lambda worker: worker.observe(verdict))


def lockstep_engine(
    target: Path, target_size: int, draft: Path | None = None, draft_size: int = 1
) -> Engine:
    """An engine whose target has so many ranks, and its draft so many."""
    config = EngineConfig.from_kwargs(
        model=str(target), draft_model=None if draft is None else str(draft), max_num_seqs=32
    )
    config = settle_for_device(config, "cpu", gpu_bytes=None)
    spec = load_spec(target)
    size, rows = config.cache.block_size, config.scheduler.num_seats
    max_model_len = min(spec.max_position, NUM_BLOCKS * size)
    ops = select_ops(CPU, torch.float32)

    def runner(folder: Path, group: ThreadGroup) -> Runner:
        shard = Shard(group.rank, group.size, group.all_reduce) if group.size > 1 else Shard()
        decoder = load_model(folder, dtype=torch.float32, device=CPU, ops=ops, shard=shard)
        kv = KVCache(decoder.spec, NUM_BLOCKS, size, torch.float32, CPU, shard)
        return Runner(decoder, kv, rows, max_model_len, spec.vocab_size, group)

    targets = LockstepTarget(
        lambda group, table: LocalTarget(table, runner(target, group), ops, "shared"),
        target_size,
        rows,
    )
    # n-gram proposals are made from the first rank's rows: they depend on the text alone.
    proposers: dict[str, Proposer] = {NGRAM: NgramProposer(targets.tables[0], 1, 4)}
    if draft is not None:
        proposers[DRAFT] = LockstepDraft(
            lambda group, table: DraftProposer(table, runner(draft, group), ops, "shared"),
            draft_size,
            rows,
        )
    pools = PoolSizes(NUM_BLOCKS, 0 if draft is None else NUM_BLOCKS, max_model_len)
    scheduler = make_scheduler(config, pools, targets.lag)
    facts = EngineFacts(
        config.to_settings(),
        spec.vocab_size,
        spec.eos_ids,
        max_model_len,
        3,
        draft is not None,
        ops.name,
        NUM_BLOCKS,
    )
    loop = StepLoop(scheduler, Proposers(proposers, DRAFT if draft is not None else None), targets)
    return Engine(BuiltEngine(config, loop, facts, target=spec))


def generate(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """As `LLM.generate` does."""
    outputs = [engine.add(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(asked)]
    while engine.has_work:
        engine.step()
    return outputs
