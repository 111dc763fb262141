"""Builds the step loop of loaded models: scheduler, proposers and workers over one row table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from outrider.catalog.proposers import DRAFT
from outrider.config import EngineConfig
from outrider.engine.sizing import PoolSizes, default_max_depth, make_scheduler
from outrider.engine.step import StepLoop
from outrider.progress_stages import stage
from outrider.scheduler.costs import StepCosts
from outrider.workers.costs import measure_step
from outrider.workers.costs_cache import CostsCache
from outrider.workers.device import Placement
from outrider.workers.gpu.memory import Workers
from outrider.workers.heads.base import Head
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.base import ProposerContext, Proposers, ProposerSettings
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.proposers.head import HeadProposer
from outrider.workers.proposers.registry import build_proposers, entries
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode
from outrider.workers.target import LocalTarget

if TYPE_CHECKING:
    from outrider.workers.gpu.colocated import ColocatedWorker

logger = logging.getLogger(__name__)


def wire(
    config: EngineConfig,
    placement: Placement,
    target: Decoder,
    draft: Decoder | None,
    pools: PoolSizes,
    kept: CostsCache | None = None,
    head: Head | None = None,
) -> StepLoop:
    """Scheduler and workers of loaded models, for a settled configuration. Captures every pass
    that can be captured. On CPUs, costs in the cache `kept` are not measured again."""
    workers = make_workers(config, placement, target, draft, pools, Runner, head)
    proposers, worker = workers
    if isinstance(worker, LocalTarget):
        assert isinstance(proposers, Proposers)
        costs = _costs_of(config, worker, proposers, placement, kept)
    else:
        with _progress("capturing passes", worker.num_captures) as advance:
            worker.capture(advance)
        with stage("timing passes"):
            costs = worker.measure_costs()
    scheduler = make_scheduler(
        config,
        pools,
        worker.lag,
        worker.max_depth,
        costs=costs,
        head_depth=None if head is None else head.spec.max_depth,
        exclusive=worker.exclusivity,
    )
    return StepLoop(scheduler, *workers)


def _costs_of(
    config: EngineConfig,
    target: LocalTarget,
    proposers: Proposers,
    placement: Placement,
    kept: CostsCache | None,
) -> StepCosts | None:
    """Measured only with a proposer: without one there is no depth to choose."""
    drafter = proposers.of(DRAFT)
    if drafter is None and config.method is None:
        return None
    if kept is not None and (found := kept.read()) is not None and found.is_own:
        return found.costs
    draft = drafter.runner if isinstance(drafter, DraftProposer) else None
    heading = proposers.of(config.head_kind or "")
    head = heading.runner if isinstance(heading, HeadProposer) else None
    with stage("timing passes"):
        costs = measure_step(target.runner, draft, placement.ops, head)
    if kept is not None:
        kept.write(costs)
    return costs


def make_workers(
    config: EngineConfig,
    placement: Placement,
    target: Decoder,
    draft: Decoder | None,
    pools: PoolSizes,
    runner_type: type[Runner],
    head: Head | None = None,
) -> Workers:
    """The proposers and the verifying worker."""
    block_size, num_rows = config.cache.block_size, config.scheduler.num_seats
    rows = RowTable(num_rows)

    def runner(decoder: Decoder, num_blocks: int) -> Runner:
        kv = KVCache(decoder.spec, num_blocks, block_size, placement.dtype, placement.device)
        return runner_type(decoder, kv, num_rows, pools.max_model_len, target.spec.vocab_size)

    verification = verification_mode(config.speculation.verification)
    ops = placement.ops
    target_runner = runner(target, pools.target)
    context = ProposerContext(
        rows,
        _proposer_settings(config),
        ops,
        verification,
        None if draft is None else runner(draft, pools.draft),
        None if head is None else HeadRunner(head, target_runner),
    )
    proposers = build_proposers(context)
    worker = LocalTarget(rows, target_runner, ops, verification)
    if ops.fused is None:
        return proposers, worker
    colocated = _colocate(config, rows, worker, proposers, pools.max_model_len)
    return colocated, colocated


def _colocate(
    config: EngineConfig,
    rows: RowTable,
    target: LocalTarget,
    proposers: Proposers,
    max_model_len: int,
) -> ColocatedWorker:
    """All models on one GPU; passes are captured once the final KV is allocated."""
    # These need Triton, which not every machine has.
    from outrider.workers.gpu.colocated import ColocatedWorker
    from outrider.workers.gpu.plan_buffers import StepSizes

    has_draft = DRAFT in proposers
    found = entries(has_draft_model=has_draft, head=config.head_kind)
    on_device = [entry for entry in found if entry.build_on_device is not None]
    draft, head = proposers.of(DRAFT), proposers.of(config.head_kind or "")
    assert draft is None or isinstance(draft, DraftProposer)
    assert head is None or isinstance(head, HeadProposer)
    sizes = StepSizes(
        rows=config.scheduler.num_seats,
        tokens=config.scheduler.num_step_tokens,
        depth=default_max_depth(config, target.runner.device.type) if on_device else 0,
        max_len=max_model_len,
    )
    is_shared = config.speculation.verification == "shared"
    settings = _proposer_settings(config)
    return ColocatedWorker(
        rows, target, draft, head, proposers, on_device, sizes, settings, is_shared
    )


def _proposer_settings(config: EngineConfig) -> ProposerSettings:
    return ProposerSettings(config.speculation.ngram_min, config.speculation.ngram_max)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` parts. Terminals show a bar, which is removed
    at the end; the log keeps the time it took."""
    start_s = time.perf_counter()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal and total > 0
    num_done = 0
    with (
        stage(what) as update,
        Progress(*columns, console=console, transient=True, disable=not shown) as bar,
    ):
        task = bar.add_task(what, total=total)

        def advance() -> None:
            nonlocal num_done
            num_done += 1
            update(f"{what} ({num_done} of {total})")
            bar.advance(task)

        yield advance
    logger.info("%s: %d in %.1f s", what, total, time.perf_counter() - start_s)
