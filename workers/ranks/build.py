"""Builds what a loaded rank computes: on a GPU with steps enqueued whole, else on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from outrider.kernels.ops import Ops
from outrider.links.rank_messages import RankSettings, Ready, Role, StepBounds
from outrider.progress_stages import stage
from outrider.scheduler.costs import StepCosts
from outrider.workers.cuda_graphs.runner_passes import cuda_graph_bytes
from outrider.workers.device import Placement, free_kv_bytes
from outrider.workers.groups.collective import Collective
from outrider.workers.groups.process_group import can_capture
from outrider.workers.heads.base import Head
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.draft_ahead import DraftAhead
from outrider.workers.ranks.costs import RankCosts
from outrider.workers.ranks.draft import DraftRankWorker
from outrider.workers.ranks.host_draft import HostDraft
from outrider.workers.ranks.host_target import HostTarget
from outrider.workers.ranks.target import TargetRankWorker
from outrider.workers.runner import Runner
from outrider.workers.scratch_rows import ScratchRows

# Tokens a row usually has in a pass: a span verified at the default depth; what a draft lacks after
# full acceptance.
_QUERY_LENS = {Role.TARGET: 6, Role.DRAFT: 2}
_LARGEST_BLOCK = 32  # of scratch rows, whose KV comes on top of the configured size
_DEEPEST_AHEAD = 8  # the depth that scratch rows have blocks for


class BuiltTarget(NamedTuple):
    worker: TargetRankWorker
    ready: Ready


class BuiltDraft(NamedTuple):
    worker: DraftRankWorker
    ready: Ready


Hold = Callable[[Callable[[], None]], None]
"""Gets what destroys the CUDA graphs, before there are any: NCCL waits forever while one holds its
collectives."""


@dataclass(frozen=True, slots=True)
class RankBuilder:
    """The loaded model of a rank, and what its workers are built from."""

    role: Role
    settings: RankSettings
    placement: Placement
    group: Collective
    decoder: Decoder
    head: Head | None
    bounds: StepBounds

    @property
    def is_on_device(self) -> bool:
        """Whether steps are enqueued whole. Rejection sampling needs distributions on the host."""
        if self._ops.fused is None or self.settings.verification != "shared":
            return False
        return self.placement.device.type != "cuda" or can_capture(self.group)

    def with_sizes(self, num_rows: int, max_len: int) -> RankBuilder:
        return replace(self, bounds=replace(self.bounds, rows=num_rows, max_len=max_len))

    def kv_bytes(self) -> int | None:
        """Memory left for KV beside the passes; None if only the configuration limits it."""
        device, settings = self.placement.device, self.settings
        if device.type != "cuda" or settings.has_fixed_kv:
            return None
        if self.is_on_device:
            return self._measured_kv_bytes()
        free = free_kv_bytes(device, settings.gpu_memory_utilization)
        return max(free - cuda_graph_bytes(self.decoder), 0) if can_capture(self.group) else free

    @property
    def _scratch(self) -> tuple[int, int] | None:
        """The number of scratch rows to draft ahead on, and of blocks of each; None: it cannot."""
        is_alone_on_cpu = self.group.size == 1 and self.placement.device.type == "cpu"
        if self.role != Role.DRAFT or not is_alone_on_cpu or self.is_on_device:
            return None
        if self.settings.verification != "shared" or self.settings.block_size > _LARGEST_BLOCK:
            return None
        num_tokens = 2 * min(self.bounds.depth, _DEEPEST_AHEAD)  # of a round, and of the next
        blocks_each = -(-num_tokens // self.settings.block_size) + 1
        return 2 * DraftAhead.max_branches, blocks_each

    def runner(self, num_blocks: int, vocab_size: int, kind: type[Runner] = Runner) -> Runner:
        placement, decoder, bounds = self.placement, self.decoder, self.bounds
        if self._scratch is not None:
            num_blocks += prod(self._scratch)
        kv = KVCache(
            decoder.spec,
            num_blocks,
            self.settings.block_size,
            placement.dtype,
            placement.device,
            decoder.shard,
            is_interleaved=placement.ops.supports_strided_blocks,
        )
        return kind(decoder, kv, bounds.rows, bounds.max_len, vocab_size, self.group)

    def target(self, runner: Runner, secret: str, hold: Hold) -> BuiltTarget:
        head = None if self.head is None else HeadRunner(self.head, runner)
        if not self.is_on_device:
            hold(runner.release_graphs)
            ready = self._prepare_on_host(runner, head, secret)
            return BuiltTarget(HostTarget.build(runner, head, self._ops, self.settings), ready)
        from outrider.workers.ranks.device_target import DeviceTarget, build_step

        step = build_step(runner, head, self._ops, self.settings, self.bounds)
        worker = DeviceTarget(step, is_alone=self.group.size == 1)
        hold(worker.release)
        with stage("capturing CUDA graphs"):
            step.capture(lambda: None)
        with stage("timing passes"):
            return BuiltTarget(worker, self._ready(step.measure_costs()))

    def draft(self, runner: Runner, secret: str, hold: Hold) -> BuiltDraft:
        if not self.is_on_device:
            hold(runner.release_graphs)
            ready = self._prepare_on_host(runner, None, secret)
            scratch = ScratchRows(runner, *self._scratch) if self._scratch else None
            ready = replace(ready, max_branches=DraftAhead.max_branches if scratch else 0)
            return BuiltDraft(HostDraft.build(runner, self._ops, self.settings, scratch), ready)
        from outrider.workers.ranks.device_draft import DeviceDraft, build_draft_step

        step = build_draft_step(runner, self._ops, self.settings, self.bounds)
        hold(step.release)
        with stage("capturing CUDA graphs"):
            step.capture(lambda: None)
        with stage("timing passes"):
            ready = replace(self._ready(step.measure_costs()), verify=None)
        return BuiltDraft(DeviceDraft(step, is_alone=self.group.size == 1), ready)

    @property
    def _ops(self) -> Ops:
        return self.placement.ops

    def _prepare_on_host(self, runner: Runner, head: HeadRunner | None, secret: str) -> Ready:
        if can_capture(self.group):
            with stage("capturing CUDA graphs"):
                runner.capture(_QUERY_LENS[self.role])
        costs = RankCosts(self.role, self.group, runner, self._ops, head)
        return costs.measure(secret, self.settings)

    def _ready(self, costs: StepCosts) -> Ready:
        return Ready(
            costs.verify,
            costs.first_draft,
            costs.next_draft,
            costs.prefill_s,
            costs.context_s,
            costs.tile_tokens,
            max_depth=self.bounds.depth,
        )

    def _measured_kv_bytes(self) -> int:
        from outrider.workers.gpu import memory

        bounds, vocab_size = self.bounds, self.decoder.spec.vocab_size
        limits = memory.StepLimits(
            rows=bounds.rows,
            tokens=bounds.tokens,
            depth=bounds.depth,
            max_len=bounds.max_len,
            has_draft=self.role == Role.DRAFT,
            head=None if self.head is None else self.head.spec.kind,
        )

        def workers_of_one_block() -> memory.ProfileRun:
            runner = self.runner(1, vocab_size, memory.FlatRunner)
            if self.role == Role.DRAFT:
                from outrider.workers.ranks.device_draft import build_draft_step

                draft = build_draft_step(runner, self._ops, self.settings, bounds)
                return memory.ProfileRun(
                    draft.capture_largest, lambda step: draft.dummy_run(step.plan)
                )
            from outrider.workers.ranks.device_target import build_step

            head = None if self.head is None else HeadRunner(memory.FlatHead(self.head), runner)
            target = build_step(runner, head, self._ops, self.settings, bounds)
            return memory.profile_run((target, target))

        with stage("measuring the memory that steps take"):
            found = memory.measure(self.placement.device, workers_of_one_block, limits)
        num_tensors = 2 * self.decoder.spec.num_layers
        return found.kv_bytes(self.settings.gpu_memory_utilization, num_tensors)
