"""A GPU's memory given to KV but for what was measured: no step may then run out of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import damp, random_model, random_prompt, shorten
from gpu_tools import DEVICE, GPU_MARKS, HAS_CUDA
from head_checkpoints import save_head
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider import LLM, SamplingParams
from outrider.config import MAX_SPECULATIVE_TOKENS, EngineConfig
from outrider.engine import inline
from outrider.engine.sizing import PoolSizes
from outrider.engine.wiring import make_workers
from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.reference import ReferenceOps
from outrider.workers import target
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses
from outrider.workers.device import Placement
from outrider.workers.gpu import memory
from outrider.workers.gpu.memory import (
    MARGIN_BYTES,
    FlatHead,
    FlatRunner,
    StepLimits,
    Workers,
    costliest_steps,
    run_step,
)
from outrider.workers.gpu.step import DeviceStep
from outrider.workers.models.kv import bytes_per_block

pytestmark = [pytest.mark.model, *GPU_MARKS]

SMALL = {
    "num_hidden_layers": 3,  # the fewest that a head finds its three in
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 700,
}
# What takes the most, and what makes the rows of one step differ.
KINDS: list[dict[str, Any]] = [
    {"temperature": 5.0, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 50},
    {"temperature": 8.0, "top_p": 0.99, "logit_bias": {5: 1.0}, "num_speculative_tokens": 16},
    {"temperature": 5.0, "top_p": 0.95, "min_p": 1e-4, "frequency_penalty": 0.3},
    {"temperature": 3.0, "top_k": 600},
    {"temperature": 1.0, "prompt_logprobs": 50, "logprobs": 3},
    {"temperature": 0.0},
]


def params_of(kinds: list[dict[str, Any]], max_tokens: int) -> list[SamplingParams]:
    deep = {"num_speculative_tokens": MAX_SPECULATIVE_TOKENS, "ignore_eos": True}
    return [
        SamplingParams(seed=i, max_tokens=max_tokens, **(deep | kind))
        for i, kind in enumerate(kinds)
    ]


class Pair:
    def __init__(self, folder: Path, **sizes: Any) -> None:
        target = random_model("llama", **sizes)
        damp(target, 1, 0.3)
        self.target, self.draft = folder / "target", folder / "draft"
        target.save_pretrained(self.target)
        shorten(target, 1).save_pretrained(self.draft)
        self.head = save_head("eagle3", folder / "head", target)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("memory"), **SMALL)


def measured_workers(
    pair: Pair, placement: Placement, limits: StepLimits, verification: str
) -> Workers:
    """Workers as the engine builds them to measure."""
    named = {} if limits.head is None else {"head_model": str(pair.head), "head_method": "eagle3"}
    config = EngineConfig.from_kwargs(
        model=str(pair.target),
        **named,
        verification=verification,
        device=placement.device.type,
        max_num_seqs=limits.rows,
        max_num_batched_tokens=limits.tokens,
        num_speculative_tokens=3,
    )
    target = inline.load_decoder(str(pair.target), placement)
    draft = inline.load_decoder(str(pair.draft), placement) if limits.has_draft else None
    pools = PoolSizes(1, 1, limits.max_len)
    head = inline.load_own_head(config, placement, target, limits.max_len)
    flat = None if head is None else FlatHead(head)
    return make_workers(config, placement, target, draft, pools, FlatRunner, flat).workers


@pytest.mark.parametrize(
    ("has_draft", "verification", "head"),
    [
        pytest.param(True, "shared", None, marks=pytest.mark.slow),
        (False, "rejection", None),
        pytest.param(False, "shared", "eagle3", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_costly_steps_run_over_one_block_with_kernels_of_a_gpu(
    small: Pair, has_draft: bool, verification: str, head: str | None
) -> None:
    limits = StepLimits(4, 10, MAX_SPECULATIVE_TOKENS, 48, has_draft=has_draft, head=head)
    placement = Placement(DEVICE, torch.float32, GpuOps())
    worker, _ = measured_workers(small, placement, limits, verification)
    assert isinstance(worker, DeviceStep)
    for step in costliest_steps(limits):
        run_step((worker, worker), step)
    verifier, state = worker._target, worker._state
    assert verifier.runner.kv.num_blocks == 1
    assert not any(any(table) for table in verifier.runner._tables)
    assert not (state.target_tables.any() or state.draft_tables.any())
    if has_draft or head:  # with the same noise on equal logits all drafts stand
        row, planned = verifier._rows[2], step.plan.rows[2]
        written = planned.depth + 1 + bool(head)  # a head's rows wrote one before
        assert len(row.tokens) == len(row.init.token_ids) + written


# -- nothing takes more -------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return, as long as these live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            key = storage._cdata
            if key not in self._sizes and key not in given:
                self._sizes[key] = storage.nbytes()
                self._live += storage.nbytes()
                weakref.finalize(storage, self._forget, key)
        self.peak = max(self.peak, self._live)
        return out

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            yield value.untyped_storage()


@pytest.mark.parametrize(
    ("rows", "tokens", "logit_rows", "verification"),
    [(6, 44, 256, "shared"), (6, 44, 256, "rejection"), (12, 256, 16, "rejection")],
    ids=str,
)
@pytest.mark.slow
def test_no_step_takes_more_than_the_costliest(
    small: Pair,
    rows: int,
    tokens: int,
    logit_rows: int,
    verification: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, where every allocation can be watched; the code is the same on a GPU."""
    for module in (memory, target):
        monkeypatch.setattr(module, "LOGIT_ROWS", logit_rows)
    max_len = 96
    limits = StepLimits(rows, tokens, MAX_SPECULATIVE_TOKENS, max_len, has_draft=True)
    placement = Placement(torch.device("cpu"), torch.float32, ReferenceOps())
    workers = measured_workers(small, placement, limits, verification)
    most = 0
    for step in costliest_steps(limits):
        with LiveBytes() as live:
            run_step(workers, step)
        most = max(most, live.peak)

    llm = LLM(
        str(small.target),
        draft_model=str(small.draft),
        speculation_policy="fixed",
        verification=verification,
        device="cpu",
        cpu_kernels="torch",
        kv_cache_gb=0.02,
        max_model_len=max_len,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        log_level="error",
    )
    taken = []
    for kinds in (KINDS[:1] * (rows - 3) + KINDS[3:], KINDS[1:2] * (rows // 2) + KINDS):
        lengths = [(7, 60, 30, 55, 1, 41)[i % 6] for i in range(len(kinds))]
        prompts = [
            random_prompt(length, i, SMALL["vocab_size"]) for i, length in enumerate(lengths)
        ]
        with LiveBytes() as live:
            llm.generate(prompts, params_of(kinds, max_tokens=34))
        taken.append(live.peak)
    assert most / 2 < max(taken) <= most


# -- on a GPU -----------------------------------------------------------------------------------


@contextmanager
def allocator_limit(limit: int) -> Iterator[None]:
    """Inside, torch's allocator may not take the GPU beyond `limit`, whoever else uses it."""
    total = torch.cuda.mem_get_info()[1]
    beside = used_bytes() - torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((limit - beside) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_the_costliest_requests_stay_inside_the_limit(tmp_path: Path) -> None:
    """Logits are large, and the cache could use more than there is."""
    vocab_size, budget, num_requests = 32_768, 6 * 2**30, 32
    pair = Pair(
        tmp_path,
        num_hidden_layers=8,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=vocab_size,
        max_position_embeddings=8192,
    )
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    utilization = (used_bytes() + budget) / total
    limit = int(total * utilization)
    llm = LLM(
        str(pair.target),
        draft_model=str(pair.draft),
        verification="rejection",
        device="cuda",
        gpu_memory_utilization=utilization,
        max_num_seqs=num_requests,
        max_num_batched_tokens=1024,  # beyond what is recorded
        log_level="error",
    )
    built = llm.engine.built
    assert built.target is not None and built.draft is not None
    specs = (built.target, built.draft)
    per_block = sum(bytes_per_block(spec, 16, torch.bfloat16) for spec in specs)
    assert budget // 3 < built.facts.num_blocks * per_block < num_requests * 8192 // 16 * per_block
    assert limit - 2 * MARGIN_BYTES <= used_bytes() <= limit, "all but the margin is taken"

    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    with allocator_limit(limit):
        for kinds, length in ((KINDS[:1] * 28 + KINDS[3:], 900), (KINDS[4:] * 16, 1500)):
            prompts = [random_prompt(length, i, vocab_size) for i in range(len(kinds))]
            outputs = llm.generate(prompts, params_of(kinds, max_tokens=3), use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
    assert used_bytes() <= limit


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_only_the_largest_passes_are_recorded_to_measure(
    small: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others once, over the cache they work on."""
    made: list[tuple[CapturedPasses, int]] = []
    record_size = CapturedPasses.capture

    def noted(passes: CapturedPasses, size: int, pool: Any) -> None:
        made.append((passes, size))
        record_size(passes, size, pool)

    monkeypatch.setattr(CapturedPasses, "capture", noted)
    llm = LLM(
        str(small.target),
        draft_model=str(small.draft),
        device="cuda",
        max_model_len=96,
        max_num_seqs=20,
        max_num_batched_tokens=64,
        log_level="error",
    )
    worker = llm.engine.built.loop._target
    assert isinstance(worker, DeviceStep)
    kinds = [each for each in worker._captured_passes() if each.sizes]
    again = 1  # the first once more: what any recording takes is not the others' as well
    to_measure, kept = made[: again + len(kinds)], made[again + len(kinds) :]
    assert [size for _, size in to_measure[again:]] == [each.largest for each in kinds]
    assert to_measure[0] == to_measure[again]
    assert len(kept) == len(set(kept)) == worker.num_captures
    assert {each for each, _ in kept} == set(kinds)
