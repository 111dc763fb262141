"""Sizes of requests, steps and KV pools: the same rules wherever the models run."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.catalog.proposers import traits
from outrider.config import EngineConfig
from outrider.config.bundled import AUTO, proposer_without_model
from outrider.errors import CapacityError, ConfigError
from outrider.links.rank_messages import WeightsLoaded
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.policies import FIXED_DEPTH_POLICIES
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.proposers import Place
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Exclusive, RequestSpec

if TYPE_CHECKING:  # an engine whose models are elsewhere has no tensors
    from outrider.workers.gpu.memory import GpuMemory

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_GB = 1.0
# (GPU memory in 2**30 bytes, max_num_seqs, max_num_batched_tokens); CPUs get the last. More rows
# cost a large GPU little, and a small one lacks the KV to fill them.
STEP_SIZES = ((60, 256, 2048), (30, 128, 1024), (0, 64, 512))
STEP_LIMITS_MS = {"cpu": 500.0, "cuda": 50.0}
# Prompt and output of most requests: the draft's KV holds this many tokens per row.
USUAL_TOKENS = 768
# On a GPU a pass of six tokens costs as much as one of one token; on a CPU half as much again.
# Policies that choose a depth per step may choose among more.
FIXED_DEPTHS = {"cpu": 2, "cuda": 5}
ADAPTIVE_DEPTHS = {"cpu": 4, "cuda": 5}


def settle_for_device(config: EngineConfig, device: str, gpu_bytes: int | None) -> EngineConfig:
    """The configuration with the device's defaults for the unset fields of `scheduler` and for the
    proposer. `gpu_bytes` is the memory of the target's smallest GPU; None on CPUs."""
    given = config.scheduler
    gb = 0.0 if gpu_bytes is None else gpu_bytes / 2**30
    seats, tokens = next(each[1:] for each in STEP_SIZES if gb >= each[0])
    if given.max_num_seqs is not None:
        seats, tokens = given.max_num_seqs, max(tokens, given.max_num_seqs)
    if given.max_num_batched_tokens is not None:
        tokens = given.max_num_batched_tokens
        seats = min(seats, tokens)
    limit_ms = STEP_LIMITS_MS[device] if given.step_limit_ms is None else given.step_limit_ms
    scheduler = dataclasses.replace(
        given, max_num_seqs=seats, max_num_batched_tokens=tokens, step_limit_ms=limit_ms
    )
    speculation = config.speculation
    if config.method is None and speculation.method == AUTO:
        method = proposer_without_model(speculation.policy, device) or AUTO
        speculation = dataclasses.replace(speculation, method=method)
    return dataclasses.replace(config, scheduler=scheduler, speculation=speculation)


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """A model's maximum position, and whether it can be extended."""

    max_position: int
    is_extendable: bool


def resolve_max_model_len(
    config: EngineConfig, target: ContextLimit, draft: ContextLimit | None
) -> int:
    """The length of the longest request: the configured one, else the longest the models allow."""
    longest = target.max_position
    if draft is not None and not draft.is_extendable:
        longest = min(longest, draft.max_position)
    length = config.target.max_model_len
    if length is not None and length > longest:
        raise ConfigError(
            f"max_model_len is {length} but the model reaches {longest}; lower it to at most that."
        )
    return length or longest


def fixed_kv_bytes(config: EngineConfig) -> int:
    """KV bytes of both models together, where device memory does not limit them."""
    kv_gb = config.cache.kv_cache_gb
    return int((DEFAULT_CPU_KV_GB if kv_gb is None else kv_gb) * 2**30)


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of one KV block, over all ranks of a model or in the rank with the least memory."""

    target: int
    draft: int = 0  # also 0 if the draft has its own memory


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """KV blocks of each model, and the longest request that the target's pool holds."""

    target: int
    draft: int  # 0 without a draft model
    max_model_len: int


def size_pools(
    config: EngineConfig,
    kv_bytes: int,
    block_bytes: BlockBytes,
    length: int,
    memory: GpuMemory | None = None,
) -> PoolSizes:
    """Split `kv_bytes`: the draft gets what it needs, the target the rest, but never less than the
    draft. `memory` is the measurement that `kv_bytes` came from, if any."""
    size = config.cache.block_size
    draft = _draft_need(config, length) if block_bytes.draft else 0
    target = (kv_bytes - draft * block_bytes.draft) // block_bytes.target
    if target < draft:
        target = draft = kv_bytes // (block_bytes.target + block_bytes.draft)
    target = min(target, config.scheduler.num_seats * -(-length // size))
    held = target * size
    if target == 0 or (config.target.max_model_len is not None and held < length):
        both = block_bytes.target + block_bytes.draft
        needed_gb = -(-length // size) * both / 2**30
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
    return PoolSizes(target, draft, min(length, held))


def size_pools_of_ranks(
    config: EngineConfig,
    target: Sequence[WeightsLoaded],
    draft: Sequence[WeightsLoaded],
    length: int,
    *,
    share_gpu: bool = False,
) -> PoolSizes:
    """All ranks of a group hold the same number of blocks, so the one with the least memory
    decides. On GPUs each group has its own memory, unless they `share_gpu`; else both share the
    configured size."""
    limits = tightest_target, tightest_draft = _tightest(target), _tightest(draft)
    fixed = fixed_kv_bytes(config)
    per_target, per_draft = (sum(each.bytes_per_block for each in g) for g in (target, draft))
    if limits == (None, None):
        return size_pools(config, fixed, BlockBytes(per_target, per_draft), length)
    if any(each is not None and not _num_blocks(each) for each in limits):
        raise CapacityError("a GPU has no memory left for KV; use more ranks or a smaller model.")
    if share_gpu and tightest_target is not None and tightest_draft is not None:
        kv_bytes = min(tightest_target.kv_bytes or 0, tightest_draft.kv_bytes or 0)
        both = BlockBytes(tightest_target.bytes_per_block, tightest_draft.bytes_per_block)
        return size_pools(config, kv_bytes, both, length)
    kv_bytes = fixed
    if tightest_target is not None:
        kv_bytes, per_target = tightest_target.kv_bytes or 0, tightest_target.bytes_per_block
    sizes = size_pools(config, kv_bytes, BlockBytes(per_target), length)
    if not draft:
        return sizes
    num_draft_blocks = min(_draft_need(config, sizes.max_model_len), sizes.target)
    if tightest_draft is not None:
        num_draft_blocks = min(num_draft_blocks, _num_blocks(tightest_draft))
    held = num_draft_blocks * config.cache.block_size
    if held < sizes.max_model_len:
        logger.warning("the draft's KV cache holds %d tokens; longer texts go without it", held)
    return dataclasses.replace(sizes, draft=num_draft_blocks)


def size_replacement_draft(
    config: EngineConfig,
    pools: PoolSizes,
    target: Sequence[WeightsLoaded],
    draft: Sequence[WeightsLoaded],
) -> int:
    """KV blocks of a draft that replaces another: what it needs, out of the memory that the
    target's unchanged pool leaves."""
    tightest = _tightest(draft)
    if tightest is not None:
        max_blocks = _num_blocks(tightest)
    elif _tightest(target) is not None:  # the target has device memory of its own
        max_blocks = pools.target
    else:
        taken = pools.target * sum(each.bytes_per_block for each in target)
        left = fixed_kv_bytes(config) - taken
        max_blocks = left // sum(each.bytes_per_block for each in draft)
    num_blocks = min(_draft_need(config, pools.max_model_len), pools.target, max_blocks)
    if num_blocks <= 0:
        raise CapacityError(
            "there is no memory left for the KV of this draft; raise kv_cache_gb, or take a "
            "smaller one."
        )
    return num_blocks


def _draft_need(config: EngineConfig, length: int) -> int:
    """The draft's KV blocks: enough for the longest request, and for a usual one per row. Fewer
    than the target's, because a row without draft KV decodes plainly."""
    size = config.cache.block_size
    usual = -(-min(length, USUAL_TOKENS) // size)
    return max(-(-length // size), config.scheduler.num_seats * usual)


def _tightest(ranks: Sequence[WeightsLoaded]) -> WeightsLoaded | None:
    """The rank whose device holds the fewest blocks; None if no rank is limited by its device."""
    limited = [each for each in ranks if each.kv_bytes is not None]
    return min(limited, key=_num_blocks, default=None)


def _num_blocks(rank: WeightsLoaded) -> int:
    return (rank.kv_bytes or 0) // rank.bytes_per_block


def make_scheduler(
    config: EngineConfig,
    pools: PoolSizes,
    lag: int,
    max_depth: int | None = None,
    *,
    costs: StepCosts | None = None,
    head_depth: int | None = None,
    texts_are_remote: bool = False,
    exclusive: Callable[[RequestSpec], Exclusive] | None = None,
) -> Scheduler:
    """`lag` and `max_depth` are bounds of the workers, `head_depth` is the head's, `costs` are
    measured pass times. `exclusive` says which requests need exclusive steps. With
    `texts_are_remote` the proposers run in the ranks and may run ahead of verdicts."""
    configured_lag = config.scheduler.lag
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.num_seats,
        max_num_batched_tokens=config.scheduler.num_step_tokens,
        lag=lag if configured_lag is None else min(lag, configured_lag),
        priority_aging_s=config.scheduler.priority_aging_s,
        max_waiting=config.scheduler.max_waiting,
        max_depth=max_depth,
    )
    size, caching = config.cache.block_size, config.cache.prefix_caching
    has_draft = pools.draft > 0
    proposers = tuple(
        dataclasses.replace(each, max_depth=head_depth) if each.name == config.head_kind else each
        for each in traits(has_draft_model=has_draft, head=config.head_kind)
    )
    if texts_are_remote:
        proposers = tuple(dataclasses.replace(each, place=Place.DEVICE) for each in proposers)
    return Scheduler(
        limits,
        BlockPool(pools.target, size, caching),
        BlockPool(pools.draft, size, caching) if has_draft else None,
        proposers,
        _control(config, costs),
        epoch=time.time_ns(),  # higher than any earlier engine's
        exclusive=exclusive,
    )


def _control(config: EngineConfig, costs: StepCosts | None) -> SpeculationControl:
    limit_ms = config.scheduler.step_limit_ms
    return SpeculationControl(
        config.speculation.policy,
        costs,
        seats=config.scheduler.num_seats,
        step_limit_s=None if limit_ms is None else limit_ms / 1e3,
        can_select=config.speculation.verification == "shared",
        draft_ahead=config.speculation.draft_ahead,
    )


def default_max_depth(config: EngineConfig, device: str) -> int:
    """The maximum depth of requests that set none; with a fixed-depth policy, their depth."""
    depth = config.speculation.num_speculative_tokens
    if depth is not None:
        return depth
    is_fixed = config.speculation.policy in FIXED_DEPTH_POLICIES
    return (FIXED_DEPTHS if is_fixed else ADAPTIVE_DEPTHS)[device]
