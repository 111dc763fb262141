"""The step loop: one screen that every way of running Outrider goes through."""

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


class TargetWorker(Protocol):
    """Runs one pass and decides; see `outrider.workers.target`."""

    @property
    def lag(self) -> int:
        """How many passes it can be given ahead of the verdict of the last, to any use."""
        ...

    @property
    def max_depth(self) -> int | None:
        """The most that proposers on its device can draft for a row; None: whatever is asked."""
        ...

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome: ...


class ProposalSource(Protocol):
    """Drafts for a plan and learns from verdicts; see `outrider.workers.proposers`."""

    def events(self) -> Sequence[DraftEvent]:
        """What became of a draft model since the last call, in order."""
        ...

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """A draft model that joined: these are the rows, with no KV of it."""
        ...

    def needs_verdicts(self, plan: StepPlan) -> bool:
        """Whether it can do its part of the plan only once all verdicts before it are observed."""
        ...

    def propose(self, plan: StepPlan) -> Ticket: ...

    def observe(self, verdict: Verdict) -> None: ...


class StepLoop:
    """Plans, drafts, verifies, applies. Up to `lag` outcomes wait while the next pass is planned,
    so that the host works while the device, or another process, does. Nobody else changes the
    scheduler in a step."""

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
            while self._unapplied and self._proposers.needs_verdicts(plan):
                self._apply_oldest()
            ticket = self._proposers.propose(plan)
            self._unapplied.append(self._target.verify(plan, ticket))
        if self._unapplied and (plan is None or len(self._unapplied) > self.scheduler.limits.lag):
            self._apply_oldest()
        return self.scheduler.take_updates()

    def follow_draft(self) -> None:
        """Tell the scheduler of a draft that left or came back, and a new one of the rows."""
        for event in self._proposers.events():
            if event is DraftEvent.LOST:
                self.scheduler.lose_draft()
            else:
                self._proposers.adopt(self.scheduler.epoch, self.scheduler.regain_draft())

    def _apply_oldest(self) -> None:
        start_s = time.perf_counter()
        verdict = self._unapplied.popleft().wait()
        self.wait_s += time.perf_counter() - start_s
        self.draft_s += verdict.draft_s
        self.verify_s += verdict.verify_s
        self._proposers.observe(verdict)
        self.scheduler.apply(verdict)
