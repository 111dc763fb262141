"""The step loop, shared by every way of running Outrider."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import (
    DraftEvent,
    Outcome,
    RequestUpdate,
    RowInit,
    StepPlan,
    Ticket,
    Verdict,
)
from outrider.trace import TracedMethod


class TargetWorker(Protocol):
    """Runs the target's pass and verifies; see `outrider.workers.target`."""

    @property
    def lag(self) -> int:
        """How many plans beyond the first may usefully be in flight."""
        ...

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome: ...


class ProposalSource(Protocol):
    """Drafts for plans and observes verdicts; see `outrider.workers.proposers`."""

    def events(self) -> Sequence[DraftEvent]:
        """Losses and joins of the draft model since the last call, in order."""
        ...

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """Pass the rows to a draft model that joined; it has no KV for them yet."""
        ...

    def propose(self, plan: StepPlan) -> Ticket: ...

    def observe(self, verdict: Verdict) -> None: ...


class StepLoop:
    """Plans, drafts, verifies, applies. Up to `lag` outcomes are pending while the next pass is
    planned, so that host and device, or processes, overlap. During a step nothing else changes the
    scheduler."""

    def __init__(
        self, scheduler: Scheduler, proposers: ProposalSource, target: TargetWorker
    ) -> None:
        self.scheduler = scheduler
        self._proposers = proposers
        self._target = target
        self._unapplied: deque[Outcome] = deque()
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.wait_s = 0.0  # for verdicts

    def step(self, now_s: float) -> list[RequestUpdate]:
        self.follow_draft()
        plan = self.scheduler.plan(now_s)
        if plan is not None:
            ticket = self._proposers.propose(plan)
            self._unapplied.append(self._target.verify(plan, ticket))
        if self._unapplied and (plan is None or len(self._unapplied) > self.scheduler.limits.lag):
            self._apply_oldest()
        return self.scheduler.take_updates()

    def traced_methods(self) -> list[TracedMethod]:
        return [
            TracedMethod(self.scheduler, "plan", "plan"),
            TracedMethod(self._proposers, "propose", "send to draft"),
            TracedMethod(self._target, "verify", "send to target"),
            TracedMethod(self.scheduler, "apply", "apply"),
        ]

    def follow_draft(self) -> None:
        """Report a lost or joined draft to the scheduler, and the rows to a joined one, which sees
        no outcome of earlier plans."""
        for event in self._proposers.events():
            if event is DraftEvent.LOST:
                self.scheduler.lose_draft()
            else:
                while self._unapplied:
                    self._apply_oldest()
                self._proposers.adopt(self.scheduler.epoch, self.scheduler.regain_draft())

    def _apply_oldest(self) -> None:
        start_s = time.perf_counter()
        verdict = self._unapplied.popleft().wait()
        self.wait_s += time.perf_counter() - start_s
        self.draft_s += verdict.draft_s
        self.verify_s += verdict.verify_s
        self._proposers.observe(verdict)
        self.scheduler.apply(verdict)
