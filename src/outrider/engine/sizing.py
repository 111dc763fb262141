"""How long requests may be and how much KV there is: the same rules wherever the models run."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.config.bundled import AUTO, proposer_without_model
from outrider.errors import CapacityError, ConfigError
from outrider.links.rank_messages import Loaded
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.policies import FIXED_DEPTH_POLICIES
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.proposers import Place
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Apart, RequestSpec
from outrider.workers.proposers.registry import traits

if TYPE_CHECKING:  # an engine whose models are elsewhere has no tensors
    from outrider.workers.gpu.memory import GpuMemory

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_GB = 1.0
# Seats and tokens of a step, by the gigabytes (2**30 bytes) a GPU must have for them; CPUs get the
# last. More rows cost a large GPU little, and a small one the KV to fill them.
STEP_SIZES = ((60, 256, 2048), (30, 128, 1024), (0, 64, 512))
STEP_LIMITS_MS = {"cpu": 500.0, "cuda": 50.0}
# Prompt and output of most requests: what a draft's KV holds for every seat.
USUAL_TOKENS = 768
# On a GPU a pass of six tokens costs what a pass of one does; on a CPU half as much again. Who
# chooses a depth for each step may choose among more.
FIXED_DEPTHS = {"cpu": 2, "cuda": 5}
MOST_DEPTHS = {"cpu": 4, "cuda": 5}


def settle_for_device(config: EngineConfig, device: str, gpu_bytes: int | None) -> EngineConfig:
    """With what was left unset in `scheduler`, and who proposes, as this kind of device has it.
    `gpu_bytes` is all the memory of the target's GPU, of the smallest if there are several; None on
    CPUs."""
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


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What one KV block takes in all ranks of a model together, or in the tightest of them."""

    target: int
    draft: int = 0  # where there is none, or its memory is its own


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """KV blocks of each model, and the longest request that the target's can hold."""

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
    """Share `kv_bytes`: the draft gets what it needs, the target the rest, but never less than the
    draft. `memory` is what `kv_bytes` was found from, if it was."""
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
    config: EngineConfig, target: Sequence[Loaded], draft: Sequence[Loaded], length: int
) -> PoolSizes:
    """Every rank of a group holds as many blocks as every other, so the tightest decides. Where
    devices limit them, each group has memory of its own; else they share what is configured."""
    limits = tightest_target, tightest_draft = _tightest(target), _tightest(draft)
    fixed = fixed_kv_bytes(config)
    per_target, per_draft = (sum(each.bytes_per_block for each in g) for g in (target, draft))
    if limits == (None, None):
        return size_pools(config, fixed, BlockBytes(per_target, per_draft), length)
    if any(each is not None and not _num_blocks(each) for each in limits):
        raise CapacityError("a GPU has no memory left for KV; use more ranks or a smaller model.")
    kv_bytes = fixed
    if tightest_target is not None:
        kv_bytes, per_target = tightest_target.kv_bytes or 0, tightest_target.bytes_per_block
    sizes = size_pools(config, kv_bytes, BlockBytes(per_target), length)
    if not draft:
        return sizes
    num_drafted = min(_draft_need(config, sizes.max_model_len), sizes.target)
    if tightest_draft is not None:
        num_drafted = min(num_drafted, _num_blocks(tightest_draft))
    held = num_drafted * config.cache.block_size
    if held < sizes.max_model_len:
        logger.warning("the draft's KV cache holds %d tokens; longer texts go without it", held)
    return dataclasses.replace(sizes, draft=num_drafted)


def size_another_draft(
    config: EngineConfig, pools: PoolSizes, target: Sequence[Loaded], draft: Sequence[Loaded]
) -> int:
    """Blocks of a draft that takes another's place: what it needs of the memory the target, which
    keeps its own, leaves to it."""
    tightest = _tightest(draft)
    if tightest is not None:
        most = _num_blocks(tightest)
    elif _tightest(target) is not None:  # the target's memory is the device's own
        most = pools.target
    else:
        taken = pools.target * sum(each.bytes_per_block for each in target)
        left = fixed_kv_bytes(config) - taken
        most = left // sum(each.bytes_per_block for each in draft)
    num_blocks = min(_draft_need(config, pools.max_model_len), pools.target, most)
    if num_blocks <= 0:
        raise CapacityError(
            "there is no memory left for the KV of this draft; raise kv_cache_gb, or take a "
            "smaller one."
        )
    return num_blocks


def _draft_need(config: EngineConfig, length: int) -> int:
    """Blocks that are enough for a draft. A row that gets none decodes plainly, so they hold the
    longest request, and usual ones in every seat, but not all that the target may keep."""
    size = config.cache.block_size
    usual = -(-min(length, USUAL_TOKENS) // size)
    return max(-(-length // size), config.scheduler.num_seats * usual)


def _tightest(ranks: Sequence[Loaded]) -> Loaded | None:
    """The rank whose device has room for the fewest blocks, of those whose device decides."""
    limited = [each for each in ranks if each.kv_bytes is not None]
    return min(limited, key=_num_blocks, default=None)


def _num_blocks(rank: Loaded) -> int:
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
    apart: Callable[[RequestSpec], Apart] | None = None,
) -> Scheduler:
    """`lag` is what the workers can make use of, `max_depth` the most they can draft and
    `head_depth` the most that the head can, `costs` what their passes take, if that was measured,
    `apart` when a request needs steps of its own there. Proposers that run where the texts are, in
    the ranks, may work ahead of verdicts, whatever they are."""
    wanted_lag = config.scheduler.lag
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.num_seats,
        max_num_batched_tokens=config.scheduler.num_step_tokens,
        lag=lag if wanted_lag is None else wanted_lag,
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
        epoch=time.time_ns(),  # higher than that of any engine before it
        apart=apart,
    )


def _control(config: EngineConfig, costs: StepCosts | None) -> SpeculationControl:
    limit_ms = config.scheduler.step_limit_ms
    return SpeculationControl(
        config.speculation.policy,
        costs,
        seats=config.scheduler.num_seats,
        step_limit_s=None if limit_ms is None else limit_ms / 1e3,
        can_select=config.speculation.verification == "shared",
    )


def depth_of(config: EngineConfig, device: str) -> int:
    """The most that is drafted a round, or with a policy of fixed depth what always is, for
    requests that ask for nothing else."""
    depth = config.speculation.num_speculative_tokens
    if depth is not None:
        return depth
    is_fixed = config.speculation.policy in FIXED_DEPTH_POLICIES
    return (FIXED_DEPTHS if is_fixed else MOST_DEPTHS)[device]
