"""Plans one pass: a token for every decode row, prompts, and drafts in the rest of the budget.

Two phases. First every decode row gets one token, and prompts and new requests what the time limit
of a step leaves. Then the policy chooses each row's depth; lookahead slots are reserved for it, and
drafts that are behind catch up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import CapacityError
from outrider.scheduler.ahead import SEQUENTIAL
from outrider.scheduler.control import DecodeRows, SpeculationControl, StepRecord
from outrider.scheduler.depths import DepthChoice
from outrider.scheduler.proposers import Place, ProposerTraits
from outrider.scheduler.request import NO_BLOCKS, Request, RequestState
from outrider.scheduler.running import RunningRequests
from outrider.scheduler.tenants import Tenants
from outrider.scheduler.turns import Turns
from outrider.scheduler.types import NO_PROPOSER, Exclusive, RowInit, RowPlan
from outrider.scheduler.waiting import WaitingQueue

_new_tuple = tuple.__new__

CATCH_UP_TOKENS = 512
"""Catch-up tokens per step, over all rows; more if the target computes more prompt tokens. Other
rows' drafts wait for it."""
CATCH_UP_OUTPUT = 32
"""Output tokens of one row among these: the shape of the captured pass."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold in every step."""

    max_num_seqs: int  # rows on the workers
    max_num_batched_tokens: int  # tokens in one target pass, drafts included
    lag: int = 0  # plans in flight beyond the first
    priority_aging_s: float = 10.0  # this wait is worth one priority level
    max_waiting: int | None = None
    max_depth: int | None = None  # of proposers on the device; a request may ask for more
    # After this wait a tenant without a row preempts one of a tenant with more than its share; a
    # row runs at least this long before that.
    max_wait_for_row_s: float = 2.0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise CapacityError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running request gets a token."
            )


class Step:
    """The plan being made: its rows so far and what is left of its budgets."""

    __slots__ = (
        "admitted", "ahead", "catch_up", "is_exclusive", "is_typical", "num_caught_up",
        "least_survival", "num_drafts", "num_selected", "prompts", "record", "requests",
        "rows", "short", "token_budget",
    )  # fmt: skip

    def __init__(self, budget: int, is_exclusive: bool = False) -> None:
        self.token_budget = budget
        self.is_exclusive = is_exclusive  # holds only exclusive requests
        self.is_typical = True  # else its time is no sample of step costs
        self.catch_up = 0  # known tokens the draft computes before it can guess
        self.num_caught_up = 0
        self.num_drafts = 0
        self.ahead = SEQUENTIAL
        self.num_selected: int | None = None
        self.least_survival = 0.0
        self.prompts: list[tuple[Request, int]] = []  # with the number of tokens to compute
        self.rows: list[RowPlan] = []
        self.requests: list[Request] = []  # behind the rows
        self.admitted: list[RowInit] = []
        self.short: list[Request] = []  # those that may still need blocks for known tokens
        self.record: StepRecord | None = None


class Planner:
    """Fills one step after another; the scheduler turns them into plans."""

    def __init__(
        self,
        limits: SchedulerLimits,
        running_requests: RunningRequests,
        waiting: WaitingQueue,
        proposers: Mapping[str, ProposerTraits],
        control: SpeculationControl,
        tenants: Tenants,
    ) -> None:
        self._tenants = tenants
        self._wait_s = limits.max_wait_for_row_s
        self._budget = limits.max_num_batched_tokens
        self._max_depths = {name: _max_depth(each, limits) for name, each in proposers.items()}
        self._running_requests = running_requests
        self._waiting = waiting
        self._control = control
        # A proposer on the host needs the verdict before it can draft.
        self._without_lag = {
            name for name, each in proposers.items() if limits.lag and each.place is Place.HOST
        }
        self._max_behind = {  # of proposers with KV
            name: each.max_behind for name, each in proposers.items() if each.keeps_kv
        }
        self._needing_next_token = {
            name for name, each in proposers.items() if each.needs_next_token
        }
        self._block_size = running_requests.target_pool.block_size
        self.has_draft = True  # else its rows are planned without drafts
        self.has_exclusive = False  # whether any request ever needed exclusive steps
        self.turns = Turns()
        self._blocked: Request | None = None  # the head of the queue, if it could not be admitted
        self._unannounced: list[RowInit] = []  # admitted, but not in a plan yet
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_fairness_preemptions = 0

    def make_step(self, number: int) -> Step:
        self._waiting.now_s = self._control.load.now_s
        self._running_requests.preempted.clear()
        if self._blocked is not None:
            self._free_row()
        if not self.has_exclusive:
            return self._fill(Step(self._budget), number)
        running = self._running_requests.running
        num_exclusive = sum(map(_is_exclusive, running))
        num_others = len(running) - num_exclusive
        is_exclusive = self.turns.is_exclusive_next(num_exclusive, num_others)
        for turn in (is_exclusive, not is_exclusive):
            step = Step(self._budget, turn)
            step.is_typical = not (turn and num_others)
            step.admitted += self._unannounced
            self._fill(step, number)
            self._unannounced = [] if step.rows else step.admitted
            if step.rows:
                self.turns.begin(turn)
                break
        return step

    def _fill(self, step: Step, number: int) -> Step:
        decoding, prompts = self._decode_rows(step)
        self._take_prompts(step, prompts, decoding)
        num_prompt_tokens = sum(chunk for _, chunk in step.prompts)
        step.catch_up = min(max(CATCH_UP_TOKENS, num_prompt_tokens), self._budget)
        choice = self._choose(step, number, decoding, num_prompt_tokens)
        self._plan_prompts(step)
        self._plan_decodes(step, decoding, choice)
        step.record = StepRecord(
            number,
            len(decoding.requests),
            num_prompt_tokens,
            len(self._waiting),
            choice,
            step.num_drafts,
            self._budget - step.token_budget,
            step.num_caught_up,
            decoding.context,
            self._control.policy_name,
            step.ahead,
        )
        return step

    def _choose(
        self, step: Step, number: int, decoding: DecodeRows, num_prompt_tokens: int
    ) -> DepthChoice:
        if not any(decoding.max_depths):
            return DepthChoice(decoding.max_depths)
        if not step.is_typical:  # the cost tables do not apply
            drafts = self._control.wants_prompts
            return DepthChoice(decoding.max_depths if drafts else [0] * len(decoding.max_depths))
        choice = self._control.choose(
            number, step.token_budget, num_prompt_tokens, len(self._waiting), decoding
        )
        step.num_selected = choice.num_selected
        step.least_survival = choice.least_survival
        drafting = {
            name for name, depth in zip(decoding.proposers, choice.depths, strict=True) if depth
        }
        if drafting and drafting <= self._max_behind.keys():
            step.ahead = self._control.ahead_plan
        return choice

    def _decode_rows(self, step: Step) -> tuple[DecodeRows, list[Request]]:
        """Requests past their prompt, with a block for the next token; and those in their prompt.

        In order of key, so a request that needs blocks preempts later ones.
        """
        decoding, prompts = DecodeRows(), list[Request]()
        requests, proposers = decoding.requests, decoding.proposers
        max_depths, behind = decoding.max_depths, decoding.behind
        # Attribute lookups are slow.
        running, size, without_lag = RequestState.RUNNING, self._block_size, self._without_lag
        has_exclusive, is_exclusive = self.has_exclusive, step.is_exclusive
        context = 0
        for request in list(self._running_requests.running):
            if request.state is not running:
                continue
            if has_exclusive and _is_exclusive(request) != is_exclusive:
                step.short.append(request)
                continue
            if request.in_prompt:
                prompts.append(request)
                continue
            upper = request.upper
            room = request.max_len - upper
            if room <= 0:
                continue  # plans in flight may already reach its limit: wait for their verdict
            proposer = request.proposer
            if request.in_flight and proposer in without_lag:
                continue
            if len(request.target.blocks) * size < upper and not self._running_requests.reserve(
                request, upper
            ):
                step.short.append(request)
                continue
            depth = request.depth
            if depth:
                depth = self._usable_depth(proposer, depth if depth < room else room - 1)
            requests.append(request)
            proposers.append(proposer)
            max_depths.append(depth)
            context += upper
            behind.append(
                request.behind if request.drafts_in_flight else upper - request.draft.planned
            )
        decoding.context = context
        step.token_budget -= len(requests)
        step.short += prompts
        return decoding, prompts

    def _usable_depth(self, proposer: str, depth: int) -> int:
        depth = min(depth, self._max_depths[proposer])
        limit = self._control.max_depth
        if limit is not None and depth > limit:
            depth = limit
        return depth if self.has_draft or proposer not in self._max_behind else 0

    def _plan_decodes(self, step: Step, decoding: DecodeRows, choice: DepthChoice) -> None:
        running_requests, max_behind, running = (
            self._running_requests,
            self._max_behind,
            RequestState.RUNNING,
        )
        size, append = self._block_size, self._append
        running_requests.count_spare_blocks(step.short)
        probed = self._control.probes(decoding) if self.has_draft else ()
        room = step.token_budget if step.num_selected is None else sys.maxsize
        rows = zip(
            decoding.requests, decoding.max_depths, decoding.behind, choice.depths, strict=True
        )
        for index, (request, max_depth, behind, depth) in enumerate(rows):
            if request.state is not running:
                continue  # preempted for a prompt
            draft_tokens = 0
            if depth:
                if depth > max_depth or depth > room:  # a policy may ask for more
                    depth = min(max_depth, room)
                keeps_kv = request.proposer in max_behind
                end = request.upper + depth
                if keeps_kv and behind > max_behind[request.proposer]:
                    depth, draft_tokens = 0, self._catch_up(step, request)
                elif len(
                    request.target.blocks
                ) * size < end and not running_requests.reserve_lookahead(request, end):
                    # Without a new block: the free slots of the last one.
                    depth = min(depth, -request.upper % size)
                if depth and keeps_kv:
                    draft_tokens = behind
            elif index in probed:
                draft_tokens = self._catch_up(step, request)
            room -= append(step, request, 1, depth, draft_tokens, True)
        self._settle_selection(step)

    def _settle_selection(self, step: Step) -> None:
        """Cuts may have left no more drafts than would be selected: then verify them all."""
        if step.num_selected is not None and step.num_selected >= step.num_drafts:
            step.num_selected = None
        num_verified = step.num_drafts if step.num_selected is None else step.num_selected
        step.token_budget -= num_verified

    def _catch_up(self, step: Step, request: Request) -> int:
        """How many applied tokens the draft computes in this step: of the prompt, then of the
        output."""
        if request.drafts_in_flight or request.is_draft_given_up:
            return 0  # the draft's position is not known yet
        start = request.draft.planned
        missing = request.prompt_len - start
        if missing <= 0:
            missing = min(len(request.tokens) - start, CATCH_UP_OUTPUT)
        count = min(missing, step.catch_up)
        step.catch_up -= count
        step.num_caught_up += count
        return count

    # -- prompts ----------------------------------------------------------------------------

    def _take_prompts(self, step: Step, prompts: list[Request], decoding: DecodeRows) -> None:
        """Started prompts, then new ones, within the step's time limit and the budget that drafts
        leave; at least half of the budget is for prompts."""
        if not prompts and not self._waiting:
            return
        share = max(step.token_budget - self._draft_room(decoding), step.token_budget // 2)
        room = self._control.prompt_room(len(decoding.requests), share)
        left, step.token_budget = step.token_budget - room, room
        for request in prompts:
            if step.token_budget <= 0:
                break
            if request.state is RequestState.RUNNING:
                self._take_chunk(step, request)
        self._admit(step, decoding)
        step.token_budget += left

    def _draft_room(self, decoding: DecodeRows) -> int:
        """What decode rows will draft, if a policy that may choose chooses as in the last step."""
        deepest = self._control.last_chosen_depth
        if deepest is None:
            return sum(decoding.max_depths)
        rows = zip(decoding.requests, decoding.max_depths, strict=True)
        return sum(
            depth if request.is_depth_fixed else min(depth, deepest) for request, depth in rows
        )

    def _take_chunk(self, step: Step, request: Request) -> None:
        table = request.target
        chunk = min(len(request.tokens) - table.planned, step.token_budget)
        if self._running_requests.reserve(request, table.planned + chunk):
            step.prompts.append((request, chunk))
            step.token_budget -= chunk

    def _plan_prompts(self, step: Step) -> None:
        """The draft computes them as well, if their rows will draft."""
        drafts = self.has_draft and self._control.wants_prompts
        for request, chunk in step.prompts:
            if request.state is not RequestState.RUNNING:
                continue  # preempted for an earlier prompt
            draft_tokens = 0
            if drafts and request.proposer in self._max_behind:
                draft_tokens = self._catch_up(step, request)
            table = request.target
            table.planned += chunk
            request.in_prompt = table.planned < len(request.tokens)
            self._append(step, request, chunk, 0, draft_tokens, not request.in_prompt)

    def _append(
        self,
        step: Step,
        request: Request,
        num_tokens: int,
        depth: int,
        draft_tokens: int,
        samples: bool,
    ) -> int:
        """Returns the planned depth."""
        table = request.target
        target_start, target_blocks = table.announced, NO_BLOCKS
        if target_start < len(table.blocks):
            target_start, target_blocks = table.announce()
        draft_start, draft_blocks = 0, NO_BLOCKS
        if draft_tokens:
            if self._running_requests.reserve_draft(request, draft_tokens, depth):
                draft_start, draft_blocks = request.draft.announce()
                request.draft_plans_in_flight += 1
            else:  # no draft blocks: this row decodes plainly
                if not depth:
                    step.catch_up += draft_tokens
                    step.num_caught_up -= draft_tokens
                draft_tokens = depth = 0
        step.rows.append(
            _new_tuple(  # like `RowPlan(...)`, in half the time
                RowPlan,
                (
                    request.row,
                    request.generation,
                    num_tokens,
                    depth,
                    depth,
                    samples,
                    request.proposer if depth else NO_PROPOSER,
                    target_start,
                    target_blocks,
                    draft_start,
                    draft_blocks,
                    draft_tokens,
                ),
            )
        )
        step.requests.append(request)
        request.in_flight += 1
        if samples:
            request.upper += depth + 1
        if depth:
            step.num_drafts += depth
            if draft_tokens:
                request.drafts_in_flight += 1
                request.behind = self._max_behind[request.proposer]
                return depth
        request.behind += samples
        return depth

    def _free_row(self) -> None:
        """Preempt for a tenant that has waited too long without a row."""
        first = self._waiting.peek()
        if first is None or first is not self._blocked or first.tenant.num_running:
            return
        wait_s, waited_s = self._wait_s, self._waiting.now_s - first.tenant.without_row_s
        if waited_s < wait_s or self._running_requests.leaving:
            return  # a leaving request may free a row
        num_tenants = len(self._tenants.active)
        self.num_fairness_preemptions += self._running_requests.preempt_for(
            first, wait_s, num_tenants
        )

    def _is_in(self, step: Step, request: Request, decoding: DecodeRows) -> bool:
        """Whether the step already holds tokens of a request that it then preempted."""
        return request in self._running_requests.preempted and (
            request in decoding.requests or any(request is each for each, _ in step.prompts)
        )

    def _admit(self, step: Step, decoding: DecodeRows) -> None:
        """Start waiting requests in order while rows, budget and memory last.

        The head of the queue is never skipped, so waiting is finite. A request preempted in this
        step is not admitted if the step still holds tokens of it.
        """
        while step.token_budget > 0:
            request = self._blocked = self._waiting.peek()
            if request is None or self._is_in(step, request, decoding):
                return
            if request.spec.proposer in self._needing_next_token:
                request.allow_drafts(self._control.allows_drafts(request))
            if not self._running_requests.admit(request):
                return
            self._waiting.pop(request)
            self._blocked = None
            request.tenant.num_waiting -= 1
            request.started_s = self._control.load.now_s
            self.num_prompt_tokens += len(request.tokens)
            self.num_cached_tokens += request.num_cached
            if request.queued_s is None:  # recomputation is not charged
                request.tenant.service += len(request.tokens) - request.num_cached
                request.queued_s = max(self._control.load.now_s - request.arrival_s, 0.0)
            step.admitted.append(request.row_init())
            step.short.append(request)
            if _is_exclusive(request) == step.is_exclusive:
                self._take_chunk(step, request)


def _max_depth(proposer: ProposerTraits, limits: SchedulerLimits) -> int:
    on_device = limits.max_depth if proposer.place is Place.DEVICE else None
    return min(
        (each for each in (on_device, proposer.max_depth) if each is not None), default=sys.maxsize
    )


def _is_exclusive(request: Request) -> bool:
    """Whether its next tokens need an exclusive step."""
    exclusive = request.exclusive
    return exclusive is not Exclusive.NEVER and (exclusive is Exclusive.ALWAYS or request.in_prompt)
