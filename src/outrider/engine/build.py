"""From a configuration to a running engine in this process."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from outrider.config import EngineConfig
from outrider.engine.messages import EngineFacts
from outrider.engine.step import StepLoop
from outrider.errors import CapacityError, ConfigError, ModelError
from outrider.kernels.ops import KernelUnavailableError, Ops, select_ops
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import ProposerKind
from outrider.workers.draft import DraftProposer
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache, bytes_per_block
from outrider.workers.models.spec import ModelSpec
from outrider.workers.ngram import NgramProposer
from outrider.workers.proposers import Proposer, Proposers
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import VerificationMode
from outrider.workers.target import TargetWorker
from outrider.workers.weights.loader import load_model, load_spec
from outrider.workers.weights.tokenizer import Tokenizer, check_same_tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_GB = 1.0
# On a GPU a pass of six tokens costs what a pass of one does; on a CPU half as much again.
DEFAULT_DEPTHS = {"cpu": 2, "cuda": 5}
_ACTIVATION_BYTES = 2**30  # left free on a GPU beside weights and KV


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an engine and what was found out while building it."""

    config: EngineConfig
    loop: StepLoop
    tokenizer: Tokenizer | None
    target: ModelSpec
    draft: ModelSpec | None
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class _Placement:
    device: torch.device
    dtype: torch.dtype
    ops: Ops


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Load models and tokenizer, size the KV pools, and wire scheduler and workers."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    _refuse_several_ranks(config)
    place = _place(config)
    target_spec = load_spec(config.target.model, revision=config.target.revision)
    draft_spec = load_spec(config.draft.model) if config.draft.model is not None else None
    tokenizer = _tokenizer(config, target_spec, draft_spec)
    target = load_model(
        config.target.model,
        dtype=place.dtype,
        device=place.device,
        ops=place.ops,
        revision=config.target.revision,
    )
    wanted_len = _wanted_len(config, target_spec, draft_spec)
    draft = None
    if config.draft.model is not None and draft_spec is not None:
        is_short = draft_spec.max_position < wanted_len
        draft = load_model(
            config.draft.model,
            dtype=place.dtype,
            device=place.device,
            ops=place.ops,
            max_position=wanted_len if is_short else None,
        )
    num_blocks, max_model_len = _size_pools(config, place, target_spec, draft_spec, wanted_len)
    loop = _wire(config, place, target, draft, num_blocks, max_model_len)
    depth = config.speculation.num_speculative_tokens
    facts = EngineFacts(
        settings=config.to_settings(),
        vocab_size=target_spec.vocab_size,
        eos_ids=target_spec.eos_ids,
        max_model_len=max_model_len,
        depth=DEFAULT_DEPTHS[place.device.type] if depth is None else depth,
        has_draft=draft is not None,
        kernels=place.ops.name,
        num_blocks=num_blocks,
    )
    return BuiltEngine(config, loop, tokenizer, target_spec, draft_spec, facts)


def _refuse_several_ranks(config: EngineConfig) -> None:
    for name, size in (
        ("target.tensor_parallel", config.target.tensor_parallel),
        ("draft.tensor_parallel", config.draft.tensor_parallel),
    ):
        if size > 1:
            raise ConfigError(f"{name} is {size}; one process runs 1, so set it to 1.")


def _place(config: EngineConfig) -> _Placement:
    """Device, dtype and kernels. In one process both models share them (colocated)."""
    name = config.target.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"target.device is {name!r} but there is no CUDA device; set it to cpu.")
    dtype_name = config.target.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if device.type == "cuda" else "float32"
    for field, value, shared in (
        ("draft.device", config.draft.device, name),
        ("draft.dtype", config.draft.dtype, dtype_name),
    ):
        if value not in ("auto", shared):
            raise ConfigError(
                f"{field} is {value!r} but the target's is {shared!r}; in one process they are "
                "the same, so leave it at auto."
            )
    dtype: torch.dtype = getattr(torch, dtype_name)
    backend = None if config.cpu_kernels == "auto" else config.cpu_kernels
    try:
        ops = select_ops(device, dtype, config.deterministic, backend)
    except KernelUnavailableError as error:
        raise ConfigError(f"cpu_kernels is {config.cpu_kernels!r}: {error}") from error
    return _Placement(device, dtype, ops)


def _tokenizer(
    config: EngineConfig, target: ModelSpec, draft: ModelSpec | None
) -> Tokenizer | None:
    """The target's tokenizer, once it is known that the draft means the same by every token."""
    tokenizer = _load_tokenizer(config.target.model, config.target.revision)
    if config.draft.model is None or draft is None:
        return tokenizer
    other = _load_tokenizer(config.draft.model, None)
    if tokenizer is not None and other is not None:
        check_same_tokenizer(
            tokenizer,
            other,
            target_vocab_size=target.vocab_size,
            draft_vocab_size=draft.vocab_size,
        )
    elif target.vocab_size != draft.vocab_size:
        raise ModelError(
            f"the draft's vocabulary has {draft.vocab_size} tokens and the target's "
            f"{target.vocab_size}; use a draft of the same family."
        )
    return tokenizer


def _load_tokenizer(source: str, revision: str | None) -> Tokenizer | None:
    try:
        return load_tokenizer(source, revision=revision)
    except ModelError as error:
        logger.warning("%s Prompts must be token ids.", error)
        return None


def _wanted_len(config: EngineConfig, target: ModelSpec, draft: ModelSpec | None) -> int:
    longest = target.max_position
    if draft is not None and draft.rope is None:
        longest = min(longest, draft.max_position)  # learned positions cannot be extended
    wanted = config.target.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len is {wanted} but the model reaches {longest}; lower it to at most that."
        )
    return wanted or longest


def _size_pools(
    config: EngineConfig,
    place: _Placement,
    target: ModelSpec,
    draft: ModelSpec | None,
    wanted_len: int,
) -> tuple[int, int]:
    """Blocks in each pool and the longest request they can hold."""
    size = config.cache.block_size
    per_block = bytes_per_block(target, size, place.dtype)
    if draft is not None:
        per_block += bytes_per_block(draft, size, place.dtype)
    available = _kv_bytes(config, place.device)
    enough = config.scheduler.max_num_seqs * -(-wanted_len // size)
    num_blocks = min(available // per_block, enough)
    held = num_blocks * size
    if num_blocks == 0 or (config.target.max_model_len is not None and held < wanted_len):
        raise CapacityError(
            f"the KV cache of {available / 2**30:.3g} GB holds {held} tokens, too few for one "
            f"request of max_model_len ({wanted_len}); raise kv_cache_gb to at least "
            f"{-(-wanted_len // size) * per_block / 2**30:.3g} or lower max_model_len."
        )
    if held < wanted_len:
        logger.warning("the KV cache holds %d tokens; requests are limited to that", held)
    return num_blocks, min(wanted_len, held)


def _kv_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.cache.kv_cache_gb is not None:
        return int(config.cache.kv_cache_gb * 2**30)
    if device.type == "cpu":
        return int(DEFAULT_CPU_KV_GB * 2**30)
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return max(int(total * config.cache.gpu_memory_utilization) - used - _ACTIVATION_BYTES, 0)


def _wire(
    config: EngineConfig,
    place: _Placement,
    target: Decoder,
    draft: Decoder | None,
    num_blocks: int,
    max_model_len: int,
) -> StepLoop:
    block_size, num_rows = config.cache.block_size, config.scheduler.max_num_seqs
    rows = RowTable(num_rows)

    def runner(decoder: Decoder) -> Runner:
        kv = KVCache(decoder.spec, num_blocks, block_size, place.dtype, place.device)
        return Runner(decoder, kv, num_rows, max_model_len, target.spec.vocab_size)

    verification: VerificationMode = "shared"
    if config.speculation.verification == "rejection":
        verification = "rejection"
    proposers: dict[ProposerKind, Proposer] = {
        ProposerKind.NGRAM: NgramProposer(
            rows, config.speculation.ngram_min, config.speculation.ngram_max
        )
    }
    draft_pool = None
    if draft is not None:
        proposers[ProposerKind.DRAFT] = DraftProposer(rows, runner(draft), place.ops, verification)
        draft_pool = BlockPool(num_blocks, block_size, config.cache.prefix_caching)
    lag = config.scheduler.lag
    limits = SchedulerLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        lag=lag if lag is not None else int(place.device.type == "cuda"),
        priority_aging_s=config.scheduler.priority_aging_s,
        max_waiting=config.scheduler.max_waiting,
    )
    target_pool = BlockPool(num_blocks, block_size, config.cache.prefix_caching)
    scheduler = Scheduler(limits, target_pool, draft_pool)
    worker = TargetWorker(rows, runner(target), place.ops, verification)
    return StepLoop(scheduler, Proposers(proposers), worker)
