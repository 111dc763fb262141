"""How long requests may be and how much KV there is: the same rules wherever the models run."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.errors import CapacityError, ConfigError
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.proposers import Place
from outrider.scheduler.scheduler import Scheduler
from outrider.workers.proposers.registry import traits

if TYPE_CHECKING:  # an engine whose models are elsewhere has no tensors
    from outrider.workers.gpu.memory import GpuMemory

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_GB = 1.0
# On a GPU a pass of six tokens costs what a pass of one does; on a CPU half as much again.
DEFAULT_DEPTHS = {"cpu": 2, "cuda": 5}


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a model's positions go, and whether they can be made to go further."""

    max_position: int
    is_extendable: bool


def wanted_len(config: EngineConfig, target: Reach, draft: Reach | None) -> int:
    """The longest request the models allow and the configuration asks for."""
    longest = target.max_position
    if draft is not None and not draft.is_extendable:
        longest = min(longest, draft.max_position)
    wanted = config.target.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len is {wanted} but the model reaches {longest}; lower it to at most that."
        )
    return wanted or longest


def fixed_kv_bytes(config: EngineConfig) -> int:
    """KV of both models together where no device's memory decides."""
    kv_gb = config.cache.kv_cache_gb
    return int((DEFAULT_CPU_KV_GB if kv_gb is None else kv_gb) * 2**30)


def size_pools(
    config: EngineConfig,
    kv_bytes: int,
    bytes_per_block: int,
    length: int,
    memory: GpuMemory | None = None,
) -> tuple[int, int]:
    """Blocks in each pool, given what a block costs in all models, and the longest request they
    can hold. `memory` is what `kv_bytes` was found from, if it was."""
    size = config.cache.block_size
    enough = config.scheduler.max_num_seqs * -(-length // size)
    num_blocks = min(kv_bytes // bytes_per_block, enough)
    held = num_blocks * size
    if num_blocks == 0 or (config.target.max_model_len is not None and held < length):
        needed_gb = -(-length // size) * bytes_per_block / 2**30
        remedy = f"raise kv_cache_gb to at least {needed_gb:.3g} or lower max_model_len."
        if memory is not None:
            remedy = (
                f"{memory.shares(config.cache.gpu_memory_utilization)}, where {needed_gb:.3g} are "
                "needed: raise gpu_memory_utilization, or lower max_model_len, "
                "max_num_batched_tokens or max_num_seqs."
            )
        raise CapacityError(
            f"the KV cache of {kv_bytes / 2**30:.3g} GB holds {held} tokens, too few for one "
            f"request of max_model_len ({length}); {remedy}"
        )
    if held < length:
        logger.warning("the KV cache holds %d tokens; requests are limited to that", held)
    return num_blocks, min(length, held)


def make_scheduler(
    config: EngineConfig,
    num_blocks: int,
    has_draft: bool,
    lag: int,
    max_depth: int | None = None,
    *,
    texts_are_remote: bool = False,
) -> Scheduler:
    """`lag` is what the workers can make use of, `max_depth` the most they can draft. Proposers
    that run where the texts are, in the ranks, may work ahead of verdicts, whatever they are."""
    wanted_lag = config.scheduler.lag
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        lag=lag if wanted_lag is None else wanted_lag,
        priority_aging_s=config.scheduler.priority_aging_s,
        max_waiting=config.scheduler.max_waiting,
        max_depth=max_depth,
    )
    size, caching = config.cache.block_size, config.cache.prefix_caching
    draft_pool = BlockPool(num_blocks, size, caching) if has_draft else None
    proposers = traits(has_draft_model=has_draft)
    if texts_are_remote:
        proposers = tuple(dataclasses.replace(each, place=Place.DEVICE) for each in proposers)
    return Scheduler(
        limits,
        BlockPool(num_blocks, size, caching),
        draft_pool,
        proposers,
        epoch=time.time_ns(),  # higher than that of any engine before it
    )


def depth_of(config: EngineConfig, device: str) -> int:
    depth = config.speculation.num_speculative_tokens
    return DEFAULT_DEPTHS[device] if depth is None else depth
