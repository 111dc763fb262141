"""What an engine says of its load, wherever its models run."""

from __future__ import annotations

from outrider.links.gateway_messages import EngineStatus
from outrider.scheduler.scheduler import Scheduler


def load_of(scheduler: Scheduler, query: int) -> EngineStatus:
    """An answer that names no rank and no model yet."""
    stats, pool = scheduler.stats, scheduler.target_pool
    return EngineStatus(
        query=query,
        ranks=(),
        proposal_backend="",
        proposal_sends=0,
        draft_losses=0,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        kv_blocks_used=pool.num_blocks - pool.num_free,
        kv_blocks=pool.num_blocks,
        steps=stats.steps,
        committed_tokens=stats.committed_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        preemptions=scheduler.num_preemptions,
    )
