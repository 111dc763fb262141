"""What is left of a GPU for KV, and the steps that decide how much is not."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_model
from head_checkpoints import save_head

from outrider.catalog.heads import HeadKind
from outrider.config import EngineConfig
from outrider.engine import inline
from outrider.engine.sizing import BlockBytes, PoolSizes, settle_for_device, size_pools
from outrider.engine.wiring import make_workers
from outrider.errors import CapacityError
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.workers.gpu.memory import (
    MARGIN_BYTES,
    SEGMENT_BYTES,
    CostlyStep,
    FlatHead,
    FlatRunner,
    GpuMemory,
    StepLimits,
    costliest_steps,
    hold,
    measure,
    profile_run,
    run_step,
)
from outrider.workers.weights.checkpoint import load_spec

GB = 2**30
LIMITS = [
    StepLimits(rows=4, tokens=64, depth=3, max_len=40, has_draft=True),
    StepLimits(rows=4, tokens=64, depth=3, max_len=40, has_draft=False),
    StepLimits(rows=1, tokens=1, depth=8, max_len=2, has_draft=True),
    StepLimits(rows=4, tokens=64, depth=3, max_len=40, has_draft=False, head="eagle3"),
    StepLimits(rows=1, tokens=1, depth=8, max_len=2, has_draft=False, head="medusa"),
    StepLimits(rows=300, tokens=900, depth=2, max_len=30, has_draft=True),
]


def test_kv_gets_what_weights_and_passes_leave() -> None:
    memory = GpuMemory(total=80 * GB, loaded=16 * GB, standing=18 * GB, step=2 * GB)
    expected = 72 * GB - 20 * GB - MARGIN_BYTES - 64 * SEGMENT_BYTES
    assert memory.kv_bytes(0.9, 64) == expected
    assert GpuMemory(24 * GB, 20 * GB, 23 * GB, 2 * GB).kv_bytes(0.9, 64) == 0


def test_too_little_memory_is_refused_with_its_figures_and_remedies() -> None:
    config = EngineConfig.from_kwargs(model="m", max_model_len=4096)
    config = settle_for_device(config, "cuda", 24 * GB)
    memory = GpuMemory(total=24 * GB, loaded=16 * GB, standing=19 * GB, step=2 * GB)
    with pytest.raises(CapacityError) as caught:
        size_pools(config, memory.kv_bytes(0.9, 64), BlockBytes(2**21), 4096, memory)
    message = str(caught.value)
    for part in ("24.0 GB", "21.6 may be used", "16.0 are taken by weights", "5.5 by passes"):
        assert part in message
    assert "raise gpu_memory_utilization" in message and "max_num_batched_tokens" in message


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_costly_steps_keep_the_limits_and_reach_them(limits: StepLimits) -> None:
    steps = costliest_steps(limits)
    for step in steps:
        rows = step.plan.rows
        assert 1 <= len(rows) <= limits.rows
        assert sum(row.num_tokens + row.depth for row in rows) <= limits.tokens
        for init in step.plan.admitted:
            assert len(init.token_ids) < max(limits.max_len, 2)
    longest = steps[0].plan.rows
    reachable = min(limits.tokens, limits.rows * limits.prompt_len)
    assert sum(row.num_tokens for row in longest) == reachable


@pytest.mark.model
@pytest.mark.parametrize("has_draft", [True, False])
def test_costly_steps_run_on_a_single_block(tmp_path: Path, has_draft: bool) -> None:
    """The models need no more: every table is zero. Whatever sampling can be asked for is run."""
    random_model("llama").save_pretrained(tmp_path)
    options = {"draft_model": str(tmp_path)} if has_draft else {}
    config = EngineConfig.from_kwargs(
        model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=4, **options
    )
    config = settle_for_device(config, "cpu", gpu_bytes=None)
    placement = inline.place_models(config)
    target = inline.load_decoder(str(tmp_path), placement)
    draft = inline.load_decoder(str(tmp_path), placement) if has_draft else None
    length = min(40, load_spec(tmp_path).max_position)
    workers = make_workers(
        config, placement, target, draft, PoolSizes(1, 1, length), FlatRunner
    ).workers
    limits = StepLimits(rows=4, tokens=64, depth=3, max_len=length, has_draft=has_draft)
    steps: list[CostlyStep] = costliest_steps(limits)
    for step in steps:
        run_step(workers, step)


@pytest.mark.model
@pytest.mark.parametrize("kind", HeadKind)
def test_a_head_drafts_in_a_costly_step_of_its_own(tmp_path: Path, kind: str) -> None:
    """It has seen what the rows wrote in the step before."""
    model = random_model("llama", num_hidden_layers=3)
    model.save_pretrained(tmp_path / "target")
    head_model = str(save_head(kind, tmp_path / "head", model))
    config = EngineConfig.from_kwargs(
        model=str(tmp_path / "target"),
        head_model=head_model,
        head_method=kind,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
    )
    config = settle_for_device(config, "cpu", gpu_bytes=None)
    placement = inline.place_models(config)
    target = inline.load_decoder(config.target.model, placement)
    head = inline.load_own_head(config, placement, target, 40)
    assert head is not None
    workers = make_workers(
        config, placement, target, None, PoolSizes(1, 1, 40), FlatRunner, FlatHead(head)
    ).workers
    limits = StepLimits(rows=4, tokens=64, depth=3, max_len=40, has_draft=False, head=kind)
    *others, last = costliest_steps(limits)
    for step in others:
        run_step(workers, step)
    proposals = workers[0].propose(last.plan).proposals
    assert [len(each.tokens) for each in proposals.values()] == [
        row.depth for row in last.plan.rows if row.depth
    ]
    run_step(workers, last)


# -- measuring ----------------------------------------------------------------------------------


class FakeGpu:
    """Memory as the driver and torch's allocator report it."""

    total = 100_000
    others = 10_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = 5000  # weights
        self.cached = 700  # left over from loading them
        self._peak = 0
        fakes = {
            "mem_get_info": lambda _: (self.total - self.others - self._reserved, self.total),
            "memory_reserved": lambda _: self._reserved,
            "max_memory_reserved": lambda _: self._peak,
            "reset_peak_memory_stats": lambda _: setattr(self, "_peak", self._reserved),
            "empty_cache": lambda: setattr(self, "cached", 0),
            "synchronize": lambda _: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @property
    def _reserved(self) -> int:
        return self.live + self.cached

    def use(self, size: int) -> None:
        """Allocate and free: the allocator keeps it for the next one."""
        self.cached = max(self.cached, size)
        self._peak = max(self._peak, self._reserved)


class FakeWorkers:
    """Use so many bytes a token, and hold 3000 as long as they live."""

    def __init__(self, gpu: FakeGpu, per_token: int) -> None:
        gpu.live += 3000
        weakref.finalize(self, lambda: setattr(gpu, "live", gpu.live - 3000))
        self._gpu = gpu
        self._per_token = per_token
        self._self = self  # like recorded passes they go only when they are collected

    def capture_largest(self) -> int:
        return 0  # nothing is recorded

    def propose(self, plan: StepPlan) -> Ticket:
        return Ticket(plan.step)

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        size = self._per_token * sum(row.num_tokens + row.depth for row in plan.rows)
        if size > 50_000:
            raise torch.OutOfMemoryError("out of memory")
        self._gpu.use(size)
        return Verdict(plan.epoch, plan.step, ())

    def observe(self, outcome: object) -> None:
        pass


def _measured(gpu: FakeGpu, per_token: int) -> GpuMemory:
    def build_workers() -> Any:
        workers: Any = FakeWorkers(gpu, per_token)
        return profile_run((workers, workers))

    return measure(torch.device("cuda"), build_workers, LIMITS[0])


def test_measuring_tells_what_stands_from_what_a_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch)
    memory = _measured(gpu, per_token=10)
    assert memory == GpuMemory(total=100_000, loaded=15_000, standing=18_000, step=640)
    assert (gpu.live, gpu.cached) == (5000, 0), "the workers and all they took are gone"


def test_steps_that_do_not_fit_beside_the_weights_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CapacityError, match="lower max_num_batched_tokens or max_num_seqs"):
        _measured(FakeGpu(monkeypatch), per_token=1000)


def test_what_is_held_stays_with_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda size, **_: gpu.use(size))
        hold(torch.device("cuda"), 4321)
    assert gpu.cached == 4321
