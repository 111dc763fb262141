"""Models in this process: loads them and sizes their KV pools."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_SPECULATIVE_TOKENS, EngineConfig
from outrider.engine.preflight import CheckedModels, check_models
from outrider.engine.rank_group import Report
from outrider.engine.sizing import (
    BlockBytes,
    ContextLimit,
    PoolSizes,
    default_max_depth,
    fixed_kv_bytes,
    resolve_max_model_len,
    settle_for_device,
    size_pools,
)
from outrider.engine.step import StepLoop
from outrider.engine.wiring import make_workers, wire
from outrider.errors import ConfigError
from outrider.links.gateway_messages import EngineFacts, EngineStatus, ModelStatus
from outrider.links.rank_messages import Role
from outrider.progress_stages import stage
from outrider.workers.costs_cache import CostsCache
from outrider.workers.device import Placement, gpu_bytes, place
from outrider.workers.gpu.memory import (
    FlatHead,
    FlatRunner,
    GpuMemory,
    ProfileRun,
    StepLimits,
    hold,
    measure,
    profile_run,
)
from outrider.workers.heads.base import Head
from outrider.workers.heads.kv import head_bytes_per_block
from outrider.workers.heads.loader import load_head
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import bytes_per_block
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.generation import load_sampling_defaults
from outrider.workers.weights.loader import load_model

if TYPE_CHECKING:
    from outrider.engine.build import ServerContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InlineModels:
    """The models and the step loop over them, without ranks: an error ends the whole engine."""

    config: EngineConfig  # settled for the device
    loop: StepLoop
    facts: EngineFacts
    checked: CheckedModels
    device: str

    def name_models(self, status: EngineStatus) -> EngineStatus:
        """The status with the models and where they run."""
        pid, host = os.getpid(), socket.gethostname()
        roles = _roles(has_draft=self.facts.has_draft)
        models = tuple(ModelStatus(role, pid, host, self.device) for role in roles)
        return dataclasses.replace(status, models=models)


def load_models(
    config: EngineConfig, report: Report, server: ServerContext | None = None
) -> InlineModels:
    """Load models and tokenizer, size the KV pools, and wire scheduler and workers."""
    start_s = time.monotonic()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    checked = check_models(config, has_text=server is None or not server.is_checked)
    placement = place_models(config)
    config = settle_for_device(checked.config, placement.device.type, gpu_bytes(placement.device))
    names = " and ".join(_roles(has_draft=checked.draft is not None))
    where = f"on {placement.device} in the engine's process (pid {os.getpid()})"
    report(f"{names}: loading {where}")
    draft_reach = None if checked.draft is None else _reach(checked.draft)
    length = resolve_max_model_len(config, _reach(checked.target), draft_reach)
    target, draft = _load_both(config, placement, checked, length, cache_packed=server is not None)
    head = load_own_head(config, placement, target, length)
    memory = None
    if placement.device.type != "cpu" and config.cache.kv_cache_gb is None:
        memory = _measure(config, placement, target, draft, head, length)
    pools = _size_pools(config, placement, target, draft, head, length, memory)
    kept = None
    if server is not None:
        kept = CostsCache(server.secret, config, placement.ops.name, torch.get_num_threads())
    loop = wire(config, placement, target, draft, pools, kept, head)
    if memory is not None:
        hold(placement.device, memory.step)
    facts = EngineFacts(
        settings=config.without_secrets().to_settings(),
        vocab_size=checked.target.vocab_size,
        eos_ids=checked.target.eos_ids,
        max_model_len=pools.max_model_len,
        depth=default_max_depth(config, placement.device.type),
        has_draft=draft is not None,
        kernels=placement.ops.name,
        num_blocks=pools.target,
        num_draft_blocks=pools.draft,
        sampling_defaults=load_sampling_defaults(
            config.target.model, revision=config.target.revision
        ),
    )
    report(f"{names}: ready to run after {time.monotonic() - start_s:.1f} s")
    return InlineModels(config, loop, facts, checked, str(placement.device))


def place_models(config: EngineConfig) -> Placement:
    """Colocated models share device, dtype and kernels."""
    target = config.target
    placement = place(
        target.device, target.dtype, config.cpu_kernels, config.deterministic, "target"
    )
    for field, value, shared in (
        ("draft.device", config.draft.device, str(placement.device)),
        ("draft.dtype", config.draft.dtype, str(placement.dtype).removeprefix("torch.")),
    ):
        if value not in ("auto", shared):
            raise ConfigError(
                f"{field} is {value!r} but the target's is {shared!r}; in one process they are "
                "the same, so leave it at auto."
            )
    return placement


def _roles(*, has_draft: bool) -> list[str]:
    return [Role.TARGET, Role.DRAFT] if has_draft else [Role.TARGET]


def _reach(spec: ModelSpec) -> ContextLimit:
    return ContextLimit(spec.max_position, spec.rope is not None)


def _load_both(
    config: EngineConfig,
    placement: Placement,
    checked: CheckedModels,
    length: int,
    *,
    cache_packed: bool,
) -> tuple[Decoder, Decoder | None]:
    target = load_decoder(
        config.target.model,
        placement,
        revision=config.target.revision,
        quantization=config.target.quantization,
        cache_packed=cache_packed,
    )
    if config.draft.model is None or checked.draft is None:
        return target, None
    is_short = checked.draft.max_position < length
    draft = load_decoder(
        config.draft.model,
        placement,
        max_position=length if is_short else None,
        revision=config.draft.revision,
        quantization=config.draft.quantization,
        cache_packed=cache_packed,
        narrow=config.draft.dtype == "auto",
    )
    return target, draft


def load_decoder(
    model: str,
    placement: Placement,
    *,
    max_position: int | None = None,
    revision: str | None = None,
    quantization: str | None = None,
    cache_packed: bool = False,
    narrow: bool = False,
) -> Decoder:
    return load_model(
        model,
        dtype=placement.dtype,
        device=placement.device,
        ops=placement.ops,
        max_position=max_position,
        revision=revision,
        quantization=quantization,
        cache_packed=cache_packed,
        keeps_stored_format=placement.keeps_stored_format,
        narrow=narrow,
    )


def load_own_head(
    config: EngineConfig, placement: Placement, target: Decoder, length: int
) -> Head | None:
    own = config.head
    if own.model is None:
        return None
    return load_head(
        own.model,
        target.spec,
        config.target.model,
        dtype=placement.dtype,
        device=placement.device,
        ops=placement.ops,
        max_position=length,
        revision=own.revision,
        target_revision=config.target.revision,
        target_embedding=target.whole_embedding,
    )


def _measure(
    config: EngineConfig,
    placement: Placement,
    target: Decoder,
    draft: Decoder | None,
    head: Head | None,
    length: int,
) -> GpuMemory:
    """The GPU's peak memory besides KV, for the largest steps."""
    limits = StepLimits(
        rows=config.scheduler.num_seats,
        tokens=config.scheduler.num_step_tokens,
        depth=MAX_SPECULATIVE_TOKENS,
        max_len=length,
        has_draft=draft is not None,
        head=None if head is None else head.spec.kind,
    )
    flat = None if head is None else FlatHead(head)

    def workers_of_one_block() -> ProfileRun:
        sizes = PoolSizes(1, 1, length)
        built = make_workers(config, placement, target, draft, sizes, FlatRunner, flat)
        return profile_run(built.workers)

    with stage("measuring the memory that steps take"):
        return measure(placement.device, workers_of_one_block, limits)


def _size_pools(
    config: EngineConfig,
    placement: Placement,
    target: Decoder,
    draft: Decoder | None,
    head: Head | None,
    length: int,
    memory: GpuMemory | None,
) -> PoolSizes:
    size, utilization = config.cache.block_size, config.cache.gpu_memory_utilization
    specs = [model.spec for model in (target, draft) if model is not None]
    block_bytes = BlockBytes(*(bytes_per_block(spec, size, placement.dtype) for spec in specs))
    if head is not None:
        beside = head_bytes_per_block(head.spec, size, placement.dtype)
        block_bytes = dataclasses.replace(block_bytes, target=block_bytes.target + beside)
    if memory is None:
        return size_pools(config, fixed_kv_bytes(config), block_bytes, length)
    num_tensors = 2 * sum(spec.num_layers for spec in specs)  # keys and values
    kv_bytes = memory.kv_bytes(utilization, num_tensors)
    pools = size_pools(config, kv_bytes, block_bytes, length, memory)
    logger.info(
        "%s, %.1f by the KV cache of %d tokens and %.1f by the draft's of %d",
        memory.shares(utilization),
        pools.target * block_bytes.target / 2**30,
        pools.target * size,
        pools.draft * block_bytes.draft / 2**30,
        pools.draft * size,
    )
    return pools
