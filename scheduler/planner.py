"""What one pass computes: every decode row, its lookahead, then as many prompt tokens as fit."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import CapacityError
from outrider.scheduler.request import NO_BLOCKS, Request, State
from outrider.scheduler.residents import Residents
from outrider.scheduler.types import ProposerKind, RowInit, RowPlan
from outrider.scheduler.waiting import WaitingQueue

_NO_PROPOSER = ProposerKind.NONE


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold in every step."""

    max_num_seqs: int  # rows on the workers
    max_num_batched_tokens: int  # tokens in one target pass, drafts included
    lag: int = 0  # plans in flight beyond the first
    priority_aging_s: float = 10.0  # waiting so long is worth one priority level
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise CapacityError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running request gets a token."
            )


class Step:
    """The plan being made: its rows so far and what is left of its budgets."""

    __slots__ = ("admitted", "draft_tokens", "requests", "rows", "tokens")

    def __init__(self, budget: int) -> None:
        self.tokens = budget
        self.draft_tokens = budget
        self.rows: list[RowPlan] = []
        self.requests: list[Request] = []  # behind the rows
        self.admitted: list[RowInit] = []


class Planner:
    """Fills one step after another; the scheduler turns them into plans."""

    def __init__(
        self, limits: SchedulerLimits, residents: Residents, waiting: WaitingQueue
    ) -> None:
        self._budget = limits.max_num_batched_tokens
        self._residents = residents
        self._waiting = waiting
        self._block_size = residents.target_pool.block_size
        self.has_draft = True  # or its rows are planned as if nobody drafted for them
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def make_step(self) -> Step:
        step = Step(self._budget)
        self._residents.count_spare_blocks()
        prompts = self._plan_decodes(step)
        self._plan_prompts(step, prompts)
        self._admit(step)
        return step

    def _plan_decodes(self, step: Step) -> list[Request]:
        """One token and its drafts for every request past its prompt; returns the others.

        The order is by key, so a request that must make room takes it from requests that come
        later in this step.
        """
        prompts: list[Request] = []
        residents = self._residents
        running, draft_model = State.RUNNING, ProposerKind.DRAFT  # looking these up is slow
        undecided = len(residents.running)  # each of them keeps one token of the budget
        for request in list(residents.running):
            undecided -= 1
            if request.state is not running:
                continue
            if request.in_prompt:
                prompts.append(request)
                continue
            upper = request.upper
            room = request.max_len - upper
            if room <= 0:
                continue  # plans in flight may already reach its limit: wait for their verdict
            depth = draft_tokens = 0
            if request.depth:
                depth = request.depth
                if depth >= room:
                    depth = room - 1
                if depth >= step.tokens - undecided:
                    depth = step.tokens - undecided - 1
                if request.proposer is draft_model and not self.has_draft:
                    depth = 0
                elif depth and request.proposer is draft_model:
                    draft_tokens = upper - request.draft.computed
                    if draft_tokens > step.draft_tokens:  # too far behind: it catches up first
                        draft_tokens, depth = step.draft_tokens, 0
            if not residents.reserve_lookahead(request, upper + depth):
                depth = min(depth, -upper % self._block_size)  # what is left of the last block
                if not residents.reserve(request, upper):
                    continue
            self._append(step, request, 1, depth, draft_tokens, True)
        return prompts

    def _plan_prompts(self, step: Step, prompts: list[Request]) -> None:
        for request in prompts:
            if step.tokens <= 0:
                return
            if request.state is State.RUNNING:
                self._plan_chunk(step, request)

    def _plan_chunk(self, step: Step, request: Request) -> None:
        holding = request.target
        length = len(request.tokens)
        chunk = min(length - holding.planned, step.tokens)
        if not self._residents.reserve(request, holding.planned + chunk):
            return
        draft_tokens = 0
        if request.proposer is ProposerKind.DRAFT and self.has_draft:
            draft_tokens = min(length - request.draft.planned, step.draft_tokens)
        holding.planned += chunk
        request.in_prompt = holding.planned < length
        self._append(step, request, chunk, 0, draft_tokens, not request.in_prompt)

    def _append(
        self,
        step: Step,
        request: Request,
        num_tokens: int,
        depth: int,
        draft_tokens: int,
        samples: bool,
    ) -> None:
        target_start, target_blocks = request.target.announce()
        draft_start, draft_blocks = 0, NO_BLOCKS
        if draft_tokens:
            if self._residents.reserve_draft(request, draft_tokens, depth):
                draft_start, draft_blocks = request.draft.announce()
            else:  # no memory for the draft: this row decodes plainly
                draft_tokens = depth = 0
        step.rows.append(
            RowPlan(
                request.row,
                request.generation,
                num_tokens,
                depth,
                samples,
                request.proposer if depth else _NO_PROPOSER,
                target_start,
                target_blocks,
                draft_start,
                draft_blocks,
                draft_tokens,
            )
        )
        step.requests.append(request)
        step.tokens -= num_tokens + depth
        step.draft_tokens -= draft_tokens
        request.in_flight += 1
        if samples:
            request.upper += depth + 1

    def _admit(self, step: Step) -> None:
        """Start waiting requests in order while rows, budget and memory last.

        The head of the queue is never passed over: that is what makes waiting finite.
        """
        while step.tokens > 0:
            request = self._waiting.peek()
            if request is None or not self._residents.admit(request):
                return
            self._waiting.pop()
            self.num_prompt_tokens += len(request.tokens)
            self.num_cached_tokens += request.num_cached
            step.admitted.append(request.row_init())
            self._plan_chunk(step, request)
