"""Builds the step loop of loaded models: scheduler, proposers and workers over one row table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

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
from outrider.workers.proposers.registry import build_proposers, entries
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode
from outrider.workers.target import LocalTarget

if TYPE_CHECKING:
    from outrider.workers.gpu.step import DeviceStep

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
    built = make_workers(config, placement, target, draft, pools, Runner, head)
    _, worker = built.workers
    costs = None
    if worker.num_captures:  # such passes are timed at every start: it takes a second or two
        with _progress("capturing passes", worker.num_captures) as advance:
            worker.capture(advance)
        costs = _costs_of(built, None)
    elif draft is not None or config.method is not None:  # else there is no depth to choose
        costs = _costs_of(built, kept)
    scheduler = make_scheduler(
        config,
        pools,
        worker.lag,
        worker.max_depth,
        costs=costs,
        head_depth=None if head is None else head.spec.max_depth,
        exclusive=worker.exclusivity,
    )
    return StepLoop(scheduler, *built.workers)


@dataclass(frozen=True, slots=True)
class BuiltWorkers:
    """Workers, and what times the parts of their steps."""

    workers: Workers
    measure_costs: Callable[[], StepCosts]


def make_workers(
    config: EngineConfig,
    placement: Placement,
    target: Decoder,
    draft: Decoder | None,
    pools: PoolSizes,
    runner_type: type[Runner],
    head: Head | None = None,
) -> BuiltWorkers:
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
        ProposerSettings(config.speculation.ngram_min, config.speculation.ngram_max),
        ops,
        verification,
        None if draft is None else runner(draft, pools.draft),
        None if head is None else HeadRunner(head, target_runner),
    )
    proposers = build_proposers(context)
    worker = LocalTarget(rows, target_runner, ops, verification)
    if ops.fused is not None:
        colocated = _colocate(config, context, worker, proposers, pools.max_model_len)
        return BuiltWorkers((colocated, colocated), colocated.measure_costs)

    def measure_costs() -> StepCosts:
        return proposers.measure_costs(target_runner) or measure_step(target_runner, None, ops)

    return BuiltWorkers((proposers, worker), measure_costs)


def _costs_of(built: BuiltWorkers, kept: CostsCache | None) -> StepCosts:
    if kept is not None and (found := kept.read()) is not None and found.is_own:
        return found.costs
    with stage("timing passes"):
        costs = built.measure_costs()
    if kept is not None:
        kept.write(costs)
    return costs


def _colocate(
    config: EngineConfig,
    context: ProposerContext,
    target: LocalTarget,
    proposers: Proposers,
    max_model_len: int,
) -> DeviceStep:
    """All models on one GPU; passes are captured once the final KV is allocated."""
    # These need Triton, which not every machine has.
    from outrider.workers.gpu.plan_buffers import StepSizes
    from outrider.workers.gpu.step import DeviceStep

    found = entries(has_draft_model=context.draft is not None, head=config.head_kind)
    on_device = [entry for entry in found if entry.build_on_device is not None]
    sizes = StepSizes(
        rows=config.scheduler.num_seats,
        tokens=config.scheduler.num_step_tokens,
        depth=default_max_depth(config, target.runner.device.type) if on_device else 0,
        max_len=max_model_len,
    )
    return DeviceStep(context, target, proposers, on_device, sizes)


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
