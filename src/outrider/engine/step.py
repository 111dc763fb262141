"""The step loop: one screen that every way of running Outrider goes through."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Outcome, RequestUpdate, StepPlan, Verdict
from outrider.workers.proposers.base import Ticket


class TargetWorker(Protocol):
    """Runs one pass and decides; see `outrider.workers.target`."""

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome: ...


class ProposalSource(Protocol):
    """Drafts for a plan and learns from verdicts; see `outrider.workers.proposers.base`."""

    def sync(self, scheduler: Scheduler) -> None:
        """Before a plan is made: tell the scheduler of a draft that left or came back."""
        ...

    def propose(self, plan: StepPlan) -> Ticket: ...

    def observe(self, outcome: Outcome) -> None: ...


class StepLoop:
    """Plans, drafts, verifies, applies. Up to `lag` outcomes wait while the next pass is planned,
    so that on a GPU the host works while the device does."""

    def __init__(
        self, scheduler: Scheduler, proposers: ProposalSource, target: TargetWorker
    ) -> None:
        self.scheduler = scheduler
        self._proposers = proposers
        self._target = target
        self._unapplied: deque[Outcome] = deque()
        self.draft_s = 0.0
        self.verify_s = 0.0

    def step(self, now_s: float) -> list[RequestUpdate]:
        self._proposers.sync(self.scheduler)
        plan = self.scheduler.plan(now_s)
        if plan is not None:
            ticket = self._proposers.propose(plan)
            outcome = self._target.verify(plan, ticket)
            self._proposers.observe(outcome)
            self._unapplied.append(outcome)
        if self._unapplied and (plan is None or len(self._unapplied) > self.scheduler.limits.lag):
            self._apply(self._unapplied.popleft().wait())
        return self.scheduler.take_updates()

    def _apply(self, verdict: Verdict) -> None:
        self.draft_s += verdict.draft_s
        self.verify_s += verdict.verify_s
        self.scheduler.apply(verdict)
