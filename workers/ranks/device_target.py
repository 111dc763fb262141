"""What a target rank computes on a GPU: `DeviceStep` over drafts that another rank sends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.catalog.proposers import DRAFT
from outrider.kernels.ops import Ops
from outrider.links.rank_messages import RankSettings, StepBounds
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.workers.gpu.link_rings import LinkRings, RingShape, in_plan_order
from outrider.workers.gpu.mailed_drafts import MailedDrafts
from outrider.workers.gpu.plan_buffers import StepSizes
from outrider.workers.gpu.step import DeviceStep, EnqueuedStep
from outrider.workers.gpu.stream_counter import can_wait
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.proposers.registry import build_proposers, entries
from outrider.workers.ranks.host_target import VerifiedStep, target_context
from outrider.workers.ranks.mailbox import ReceivedRound
from outrider.workers.ranks.packed_outcome import OutcomeRecord, PackedOutcome
from outrider.workers.ranks.packed_round import unpack_arrays
from outrider.workers.ranks.target import StartedStep
from outrider.workers.runner import Runner
from outrider.workers.target import LocalTarget


def step_sizes(bounds: StepBounds) -> StepSizes:
    return StepSizes(bounds.rows, bounds.tokens, bounds.depth, bounds.max_len)


def build_step(
    runner: Runner,
    head: HeadRunner | None,
    ops: Ops,
    settings: RankSettings,
    bounds: StepBounds,
) -> DeviceStep:
    """The step of a target rank; its passes are not captured yet."""
    context = target_context(runner, head, ops, settings)
    target = LocalTarget(context.rows, runner, ops, context.verification)
    kind = None if head is None else head.head.spec.kind
    found = entries(has_draft_model=settings.has_draft, head=kind)
    on_device = [entry for entry in found if entry.build_on_device is not None]
    sizes = step_sizes(bounds)
    return DeviceStep(context, target, build_proposers(context), on_device, sizes)


class _RunningStep(NamedTuple):
    enqueued: EnqueuedStep

    @property
    def is_done(self) -> bool:
        return self.enqueued.is_done

    def outcome(self) -> PackedOutcome:
        plan, offered = self.enqueued.plan, self.enqueued.offered
        sampled = [index for index, row in enumerate(plan.rows) if row.samples]
        rows = (plan.rows[index] for index in sampled)
        known = [(row.row, row.generation, offered.get(row.row, row.depth)) for row in rows]
        heads = np.array(known, dtype=np.int64).reshape(-1, OutcomeRecord.BASE_LEN)
        found = self.enqueued.records().numpy()[sampled]
        return PackedOutcome(plan.epoch, plan.step, np.hstack((heads, found)))

    def verdict(self) -> Verdict:
        return self.enqueued.wait()


class DeviceTarget:
    """Steps that need the host (see `outrider.workers.gpu.exclusive`) end within `verify`. Others
    are enqueued before their rounds have come, if the rank is alone."""

    def __init__(self, step: DeviceStep, *, is_alone: bool) -> None:
        """Ranks of a group share a round in a collective, behind what is enqueued: they cannot
        wait on the device."""
        self._step = step
        drafts = step.device_proposer(DRAFT)
        self._drafts = drafts if isinstance(drafts, MailedDrafts) else None
        self._waits_on_device = is_alone and can_wait(step.device)
        shape = RingShape(step.sizes.rows, step.sizes.depth)
        self.ring_shape = shape if self._drafts is not None and self._waits_on_device else None
        self._own_rings = self._rings = LinkRings.own(shape, step.device)
        self._waiting: EnqueuedStep | None = None

    def connect(self, rings: LinkRings | None) -> None:
        self._rings = rings or self._own_rings

    def begin(self, plan: StepPlan) -> Ticket:
        ticket = self._step.propose(plan)
        drafts = self._receives(plan)
        if drafts is not None and self._waits_on_device and self._step.can_wait(plan):
            drafts.expect(plan, self._rings)
            self._waiting = self._enqueue(plan)
        return ticket

    def verify(self, plan: StepPlan, own: Ticket, drafted: ReceivedRound) -> StartedStep:
        step, drafts = self._step, self._receives(plan)
        if not step.is_on_device:
            verified = VerifiedStep(step.verify(plan, drafted.joined_with(own, plan)).wait())
            if self._rings.is_shared:
                records = verified.outcome().records
                self._rings.outcomes.fill(plan.step, in_plan_order(plan, records))
            return verified
        if drafts is None:
            return _RunningStep(self._enqueue(plan))
        message = drafted.message
        fewer = drafts.put(plan, None if message is None else unpack_arrays(plan, message))
        enqueued, self._waiting = self._waiting or self._enqueue(plan), None
        enqueued.offered = fewer
        return _RunningStep(enqueued)

    def _enqueue(self, plan: StepPlan) -> EnqueuedStep:
        enqueued = self._step.enqueue(plan)
        if self._rings.is_shared:
            self._rings.outcomes.send(plan.step, self._step.outcomes[: len(plan.rows)])
        return enqueued

    def observe(self, verdict: Verdict) -> None:
        self._step.observe(verdict)

    def _receives(self, plan: StepPlan) -> MailedDrafts | None:
        """Where the plan's round goes; None if it has none on the device."""
        return self._drafts if self._step.is_on_device and plan.has_round else None

    def release(self) -> None:
        self._rings.unblock()
        self._step.release()
