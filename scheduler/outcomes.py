"""Outcomes of steps: counters, and updates for requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from outrider.scheduler.request import Request
from outrider.scheduler.types import (
    STEP_TOKENS,
    FinishReason,
    RequestUpdate,
    RowVerdict,
    SampleId,
    StepPlan,
    TokenLogprobs,
)

_ANY = 1 << 30  # more than any depth


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; gauges are properties of the scheduler."""

    steps: int = 0
    committed_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    # Rounds that committed tokens, by proposer and numbers drafted, verified and accepted.
    rounds: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    # By proposer: output tokens compared with what it would have drafted, and those that agreed.
    checked: Counter[str] = field(default_factory=Counter)
    agreed: Counter[str] = field(default_factory=Counter)
    # Prompt tokens computed plus output tokens: total, and a histogram by step.
    step_tokens: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Committed, verified, accepted."""
        return self.committed_tokens, self.verified_tokens, self.accepted_tokens

    def count_step(self, num_tokens: int) -> None:
        self.steps += 1
        self.step_tokens += num_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1


class Outcomes:
    """Counts what steps committed, and keeps updates of requests until they are taken."""

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        self._updates: list[RequestUpdate] = []
        self._rounds: list[tuple[str, int, int, int]] = []  # of the verdict being applied

    def take_updates(self) -> list[RequestUpdate]:
        """What happened to requests since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    def end(self, sample_id: SampleId, reason: FinishReason) -> None:
        """A request ended without a verdict."""
        self._updates.append(RequestUpdate(sample_id, finish_reason=reason))

    def report(
        self,
        request: Request,
        row: RowVerdict,
        new: tuple[int, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason | None,
    ) -> None:
        _, _, _, num_drafted, num_verified, num_accepted, _, logprobs, _, _ = row
        num_new = len(new)
        if num_accepted > num_new:
            num_accepted = num_new
        stats = self.stats
        stats.committed_tokens += num_new
        stats.drafted_tokens += num_drafted
        stats.verified_tokens += num_verified
        stats.accepted_tokens += num_accepted
        if num_new:
            self._rounds.append((request.proposer, num_drafted, num_verified, num_accepted))
        self._updates.append(
            RequestUpdate(
                request.sample_id,
                new,
                num_accepted,
                num_drafted,
                num_verified,
                logprobs[:num_new],
                prompt_logprobs,
                finish,
                new[-1] if finish is not None and finish is FinishReason.STOP else None,
                request.num_cached,
                request.queued_s or 0.0,
            )
        )

    def count_rounds(self) -> None:
        """Count the rounds of the applied verdict: cheaper at once than row by row."""
        self.stats.rounds.update(self._rounds)
        self._rounds.clear()


def num_unbiased_drafts(plan: StepPlan) -> int:
    """How many verified drafts of a row are an unbiased sample of acceptance: not those selected,
    or drafted, because the ones before them were likely."""
    if plan.num_selected is not None:
        return 0
    return 1 if plan.least_survival else _ANY


def unsent(request: Request, row: RowVerdict) -> tuple[TokenLogprobs, ...]:
    """Prompt logprobs not reported yet: after a preemption the prompt is computed again."""
    start = request.target.computed
    fresh = row.prompt_logprobs[max(0, request.prompt_logprobs_sent - start) :]
    end = start + len(row.prompt_logprobs)
    request.prompt_logprobs_sent = max(request.prompt_logprobs_sent, end)
    return fresh
