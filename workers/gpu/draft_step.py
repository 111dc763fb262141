"""A draft model in a rank of its own: its device follows the target's outcomes, and drafts.

Texts are on the device, as at the target. What the host needs of an outcome it computes while the
device drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.catalog.proposers import DRAFT, kv_rule_of
from outrider.kernels.gpu.accept import follow_outcomes, outcome_width
from outrider.kernels.gpu.adjust import count_tokens
from outrider.kernels.ops import Ops
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.proposers import KvRule
from outrider.scheduler.types import Exclusive, RowInit, StepPlan
from outrider.workers.cuda_graphs.captured_passes import (
    CapturedPasses,
    capture_all,
    capture_largest,
    row_sizes,
)
from outrider.workers.gpu.costs import measure_drafting_costs
from outrider.workers.gpu.draft_catch_up import CatchUpReadback
from outrider.workers.gpu.drafting import DraftPasses
from outrider.workers.gpu.exclusive import exclusivity
from outrider.workers.gpu.link_rings import LinkRings, RingShape, in_plan_order
from outrider.workers.gpu.plan_buffers import StepPlanBuffers, StepSizes, order_by_depth
from outrider.workers.gpu.proposing import DeviceContext
from outrider.workers.gpu.readback import PinnedRing, StreamEvent, record_event
from outrider.workers.gpu.state import MAX_TABLE_UPDATES, DeviceRows
from outrider.workers.gpu.stream_counter import can_wait
from outrider.workers.proposers.base import ProposerSettings
from outrider.workers.ranks.packed_outcome import Int64s, OutcomeRecord, PackedOutcome
from outrider.workers.ranks.packed_round import Drafts, drafted_rows
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.rows import RowSampler
from outrider.workers.sampling.verify import VerificationMode

_PADDING = -1


class FollowPasses:
    """Brings the texts up to date with an outcome, which may be enqueued before it has come."""

    def __init__(self, rows: DeviceRows, sizes: StepSizes, kv_rule: KvRule) -> None:
        self._rows = rows
        self._kv_rule = kv_rule
        self._num_rows, self._width = sizes.rows, outcome_width(max(sizes.depth, 1))
        device = rows.text.tokens.device
        # Row numbers, then how many drafts each has, then the outcomes: one copy fills all.
        size = sizes.rows * (2 + self._width)
        self._whole = torch.full((size,), _PADDING, dtype=torch.int32, device=device)
        split = 2 * sizes.rows
        self._heads = self._whole[:split]
        self._numbers, self._drafted = self._heads.view(2, sizes.rows)
        self.outcomes = self._whole[split:].view(sizes.rows, self._width)
        self._staged = PinnedRing(self._heads)
        self.captured = CapturedPasses(self._follow, row_sizes(sizes.rows), device)

    def run(self, rows: Sequence[int], drafted: Int64s) -> None:
        """Enqueue the pass for what `outcomes` will hold, of these rows; `drafted` were drafted
        here. Those with a negative number are left as they are."""
        staged = self._staged.take()
        numbers, counts = staged.view(2, self._num_rows).numpy()
        counts[:] = _PADDING
        numbers[: len(rows)], counts[: len(rows)] = rows, drafted
        self._heads.copy_(staged, non_blocking=True)
        self.captured.run(max(len(rows), 1))

    def enqueue(self, records: Int64s, drafted: Int64s) -> None:
        """The pass for an outcome that has come."""
        if not len(records):
            return
        count, num_rows = len(records), self._num_rows
        host = torch.empty(self._whole.shape, dtype=torch.int32, pin_memory=self._whole.is_cuda)
        values = host.numpy()
        values[num_rows : 2 * num_rows] = _PADDING
        values[:count] = records[:, OutcomeRecord.ROW]
        values[num_rows : num_rows + count] = drafted
        outcomes = records[:, OutcomeRecord.BASE_LEN :]
        places = values[2 * num_rows :].reshape(num_rows, self._width)
        places[:count, : outcomes.shape[1]] = outcomes
        self._whole.copy_(host, non_blocking=True)
        self.captured.run(count)

    def _follow(self, size: int) -> None:
        rows, drafted, outcomes = (
            part[:size] for part in (self._numbers, self._drafted, self.outcomes)
        )
        follow_outcomes(outcomes, drafted, rows, self._rows.text, self._kv_rule)
        count_tokens(outcomes, drafted, rows, self._rows.adjustments)


class _Observed(NamedTuple):
    """An outcome that the device has and the host has not."""

    outcome: PackedOutcome
    drafted: Int64s | None  # by row


class EnqueuedRound(NamedTuple):
    """A round on the device."""

    rows: list[int]
    drafts: Tensor  # on the host, of all rows: tokens and confidences
    end: StreamEvent

    def wait(self) -> Drafts:
        self.end.synchronize()
        drafts = self.drafts.numpy()
        return Drafts(drafts[0, self.rows], drafts[1, self.rows].view(np.float32))


class DraftStep:
    """Rows begin with plans, texts grow with outcomes; a plan's round is enqueued whole."""

    def __init__(
        self,
        runner: Runner,
        ops: Ops,
        settings: ProposerSettings,
        verification: VerificationMode,
        sizes: StepSizes,
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self.device = runner.device
        self._rows = RowTable(sizes.rows)
        self._samplers: dict[int, RowSampler] = {}
        self._computed: dict[int, int] = {}
        self._kv_rule = kv_rule_of(DRAFT)
        self._state = DeviceRows(
            *(sizes.rows, sizes.max_len, sizes.depth),
            *(runner.kv.block_size, runner.vocab_size, self.device),
        )
        self._plan = StepPlanBuffers(sizes.rows, 1, self.device)
        context = DeviceContext(
            rows=self._rows,
            settings=settings,
            ops=ops,
            verification=verification,
            draft=runner,
            samplers=self._samplers,
            computed=self._computed,
            state=self._state,
            entries=self._plan.drafting[0],
            catch_up=self._plan.catch_up,
            sizes=sizes,
        )
        self._passes = DraftPasses(runner, context)
        self._host_drafts = PinnedRing(self._state.drafted)
        self._follow = FollowPasses(self._state, sizes, self._kv_rule)
        # By row, as the host counts them ahead of `RowTable`.
        self._generations = np.full(sizes.rows, _PADDING, dtype=np.int64)
        self._lengths = np.zeros(sizes.rows, dtype=np.int64)
        self._rounds: dict[int, Int64s] = {}  # drafts by row, by step
        self._observed: deque[_Observed] = deque()
        self.ring_shape = RingShape(sizes.rows, sizes.depth)
        self._own_rings = self._rings = LinkRings.own(self.ring_shape, self.device)
        self._plan_before: StepPlan | None = None
        self._prepared: EnqueuedRound | None = None
        self._expected: StepPlan | None = None  # whose outcome the prepared round waits for

    # -- following the target -----------------------------------------------------------------

    def connect(self, rings: LinkRings | None) -> None:
        """Exchange outcomes and rounds through these, if any, from the next step on."""
        self._rings = rings or self._own_rings

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """Start over with these rows; all KV is invalid."""
        self._rows.adopt(epoch, rows)
        assert self._prepared is None
        self._plan_before = None
        self._rounds.clear()
        self._observed.clear()
        self._generations[:] = _PADDING
        for init in rows:
            self._admit(init)

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's row changes, unless it was prepared."""
        if self._prepared is None:
            self._begin(plan)

    def _begin(self, plan: StepPlan) -> None:
        """A row that changes hands, or whose KV is void, is left out of outcomes to come."""
        self._plan_before = plan
        if plan.admitted or plan.draft_released:
            self._commit_observed()
        self._rows.begin(plan)
        for row in plan.draft_released:
            self._computed[row] = 0
            self._state.set_draft_computed(row, 0)
            for drafted in self._rounds.values():
                drafted[row] = 0
        for init in plan.admitted:
            self._admit(init)

    def prepare(self, plan: StepPlan) -> None:
        """The next outcome is that of the last plan, and the only one that is missing: enqueue the
        step behind it, if the device can wait."""
        before = self._plan_before
        if before is None or not can_wait(self.device) or self._lacks_text(plan):
            return
        if not plan.has_round:
            return  # the target does not wait for it, and may be many outcomes ahead
        # What is enqueued while the target computes interrupts it on a GPU that both share by time
        # slices, so the wait comes first; but allocating memory might wait for the device.
        outcomes, waits_first = self._rings.outcomes, not _allocates(plan)
        if waits_first:
            outcomes.expect(before.step, self._follow.outcomes)
        self._begin(plan)
        counts = self._upload(plan)
        if not waits_first:
            outcomes.expect(before.step, self._follow.outcomes)
        self._follow.run(*self._to_follow(before))
        self._expected, self._prepared = before, self._enqueue_round(plan, counts)

    def _to_follow(self, before: StepPlan) -> tuple[list[int], Int64s]:
        """The rows of a plan, and what of each was drafted here; negative: it does not change."""
        rows = [row.row for row in before.rows]
        samples = np.array([row.samples for row in before.rows], dtype=bool)
        is_current = self._generations[rows] == [row.generation for row in before.rows]
        drafted = self._rounds[before.step][rows] if before.step in self._rounds else 0
        return rows, np.where(samples & is_current, drafted, _PADDING)

    def _lacks_text(self, plan: StepPlan) -> bool:
        """Whether the plan catches up on text that the host does not have yet. Plans made ahead
        know no more text than the host has here."""
        new = {init.row for init in plan.admitted}
        return any(
            row.draft_tokens
            and not row.depth
            and row.row not in new
            and self._computed[row.row] + row.draft_tokens > len(self._rows[row.row].tokens)
            for row in plan.rows
        )

    def observe(self, outcome: PackedOutcome) -> None:
        """Bring the device up to date with an outcome."""
        records, drafted = outcome.records, self._rounds.pop(outcome.step, None)
        numbers = records[:, OutcomeRecord.ROW]
        is_current = self._generations[numbers] == records[:, OutcomeRecord.GENERATION]
        if self._expected is None:
            num_drafted = 0 if drafted is None else drafted[numbers]
            self._follow.enqueue(records, np.where(is_current, num_drafted, _PADDING))
        elif not self._rings.outcomes.has(outcome.step):
            self._rings.outcomes.fill(outcome.step, in_plan_order(self._expected, records))
        ends = records[:, OutcomeRecord.BASE_LEN] + records[:, OutcomeRecord.NUM_ACCEPTED] + 1
        self._lengths[numbers[is_current]] = ends[is_current]
        self._observed.append(_Observed(outcome, drafted))

    def _admit(self, init: RowInit) -> None:
        runner, row = self._runner, init.row
        sampler = RowSampler.from_init(init, runner.vocab_size, self.device, runner.vocab.held)
        self._samplers[row] = sampler
        self._computed[row] = init.draft_cached
        self._generations[row], self._lengths[row] = init.generation, len(init.token_ids)
        # What no table can express costs acceptance only: the target chooses the text.
        fits = exclusivity(init, self._sizes.max_len, is_shared_noise=True) is not Exclusive.ALWAYS
        self._state.admit(init, sampler, is_adjusted=fits and sampler.changes_logits)

    def _commit_observed(self, num_kept: int = 0) -> None:
        """Extend the host's texts by all observed outcomes but the last `num_kept`."""
        while len(self._observed) > num_kept:
            outcome, drafted = self._observed.popleft()
            verdict = outcome.verdict()
            self._rows.commit(verdict)
            for row in verdict.rows:
                count = 0 if drafted is None else int(drafted[row.row])
                if count and self._rows.is_current(row.row, row.generation):
                    known = self._computed[row.row]
                    terms = (known, row.base_len - known, count, row.num_accepted, row.base_len)
                    self._computed[row.row] = self._kv_rule(*terms)

    # -- a step -------------------------------------------------------------------------------

    def propose(self, plan: StepPlan) -> EnqueuedRound:
        """Draft. What catches up is computed by `catch_up`, afterwards."""
        started, self._prepared, self._expected = self._prepared, None, None
        if started is None:
            started = self._enqueue_round(plan, self._upload(plan))
        self._commit_observed()
        return started

    def base_lens(self, rows: Sequence[int]) -> Int64s:
        """How long the rows' texts are, without drafts."""
        return self._lengths[list(rows)]

    def _upload(self, plan: StepPlan) -> list[int]:
        """Enqueue the copy of the plan; returns how many rows want each draft token."""
        self._commit_observed(num_kept=1)
        if self._lacks_text(plan):
            self._commit_observed()
        for row in plan.rows:
            if row.draft_blocks:
                self._passes.extend_table(row.row, row.draft_start, row.draft_blocks)
        self._state.flush_tables()
        planned = drafted_rows(plan)
        entries: list[tuple[int, ...]] = [(row.row, 0, 0, row.depth, 0, 0, 0, 0) for row in planned]
        counts = order_by_depth(entries)
        share = self._passes.plan_catch_up(plan)
        self._plan.fill((), [entries], (0, 0, 0), catch_up=share)
        return counts

    def _enqueue_round(self, plan: StepPlan, counts: Sequence[int]) -> EnqueuedRound:
        if counts:
            self._passes.draft(counts)
        rounds = self._rings.rounds
        if self._rings.is_shared and plan.has_round:
            rounds.send(plan.step, self._state.drafted)
            drafts = rounds.values(plan.step)
        else:
            drafts = self._host_drafts.take()
            drafts.copy_(self._state.drafted, non_blocking=True)
        end, planned = record_event(self.device), drafted_rows(plan)
        rows = [row.row for row in planned]
        if rows:
            depths = self._rounds[plan.step] = np.zeros(self._sizes.rows, dtype=np.int64)
            depths[rows] = [row.depth for row in planned]
        return EnqueuedRound(rows, drafts, end)

    def catch_up(self) -> Sequence[CatchUpReadback]:
        """Enqueue what `propose` left to catch up; what comes of it can be waited for."""
        self._passes.catch_up()
        return self._passes.take_late_results()

    # -- starting -----------------------------------------------------------------------------

    @property
    def _captured_passes(self) -> Sequence[CapturedPasses]:
        return [*self._passes.captured_passes, self._follow.captured]

    def capture(self, on_size: Callable[[], None]) -> None:
        capture_all(self._captured_passes, on_size)

    def capture_largest(self) -> int:
        return capture_largest(self._captured_passes, self.device)

    def dummy_run(self, plan: StepPlan) -> None:
        """Run a step whose outcome is never observed."""
        self.follow(plan)
        self.propose(plan).wait()
        for each in self.catch_up():
            each.wait()

    def measure_costs(self) -> StepCosts:
        """Of drafting and catching up."""
        self._plan.fill((), ((),), (0, 0, 0))
        return measure_drafting_costs(self._runner, self._passes)

    def release(self) -> None:
        """Destroy the graphs; a group must not end before them."""
        self._rings.unblock()
        for passes in self._captured_passes:
            passes.release()


def _allocates(plan: StepPlan) -> bool:
    """Whether uploading the plan may take device memory."""
    num_blocks = sum(len(row.draft_blocks) for row in plan.rows)
    return bool(plan.admitted or plan.draft_released) or num_blocks > MAX_TABLE_UPDATES
