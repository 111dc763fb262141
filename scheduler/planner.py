"""What one pass computes: a token for every decode row, prompts, and drafts in what is left.

In two phases. First whoever decodes gets one token, and prompts and new requests what the time
limit of a step leaves them. Then the policy says how far each row is drafted; lookahead is reserved
for that, and drafts that are behind catch up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import CapacityError
from outrider.scheduler.control import Candidates, SpeculationControl, StepRecord
from outrider.scheduler.depths import Choice
from outrider.scheduler.proposers import MOST_BEHIND, Place, ProposerTraits
from outrider.scheduler.request import NO_BLOCKS, Request, State
from outrider.scheduler.residents import Residents
from outrider.scheduler.tenants import Tenants
from outrider.scheduler.turns import Turns
from outrider.scheduler.types import NOBODY, Apart, RowInit, RowPlan
from outrider.scheduler.waiting import WaitingQueue

_new_tuple = tuple.__new__

CATCH_UP_TOKENS = 512
"""The most that drafts catch up on in one step, of all rows together, or as much as the target
computes of prompts: what is drafted for others waits behind it."""
CATCH_UP_OUTPUT = 32
"""The most output of one row among these: the shape of the recorded pass."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold in every step."""

    max_num_seqs: int  # rows on the workers
    max_num_batched_tokens: int  # tokens in one target pass, drafts included
    lag: int = 0  # plans in flight beyond the first
    priority_aging_s: float = 10.0  # waiting so long is worth one priority level
    max_waiting: int | None = None
    max_depth: int | None = None  # of proposers on the device; a request may want more
    # Seconds after which a tenant without a row takes one from a tenant with more than its share,
    # and that a row runs at least before it is taken.
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
        "admitted", "catch_up", "is_apart", "is_typical", "num_caught_up",
        "least_survival", "num_drafts", "num_selected", "prompts", "record", "requests",
        "rows", "short", "tokens",
    )  # fmt: skip

    def __init__(self, budget: int, is_apart: bool = False) -> None:
        self.tokens = budget
        self.is_apart = is_apart  # of those who share no step with others, and only of them
        self.is_typical = True  # or it says nothing of what steps cost
        self.catch_up = 0  # known tokens the draft computes before it can guess
        self.num_caught_up = 0
        self.num_drafts = 0
        self.num_selected: int | None = None
        self.least_survival = 0.0
        self.prompts: list[tuple[Request, int]] = []  # with the tokens of each to compute
        self.rows: list[RowPlan] = []
        self.requests: list[Request] = []  # behind the rows
        self.admitted: list[RowInit] = []
        self.short: list[Request] = []  # those that may still need blocks for what is known
        self.record: StepRecord | None = None


class Planner:
    """Fills one step after another; the scheduler turns them into plans."""

    def __init__(
        self,
        limits: SchedulerLimits,
        residents: Residents,
        waiting: WaitingQueue,
        proposers: Mapping[str, ProposerTraits],
        control: SpeculationControl,
        tenants: Tenants,
    ) -> None:
        self._tenants = tenants
        self._wait_s = limits.max_wait_for_row_s
        self._budget = limits.max_num_batched_tokens
        self._max_depths = {name: _max_depth(each, limits) for name, each in proposers.items()}
        self._residents = residents
        self._waiting = waiting
        self._control = control
        # Ahead of the verdict nobody on the host knows what a row has come to.
        self._without_lag = {
            name for name, each in proposers.items() if limits.lag and each.place is Place.HOST
        }
        self._with_kv = {name for name, each in proposers.items() if each.keeps_kv}
        self._looking_ahead = {name for name, each in proposers.items() if each.looks_ahead}
        self._block_size = residents.target_pool.block_size
        self.has_draft = True  # or its rows are planned as if nobody drafted for them
        self.has_apart = False  # anybody, ever, who shares no step with others
        self.turns = Turns()
        self._blocked: Request | None = None  # the first that waits, if it could not be admitted
        self._unannounced: list[RowInit] = []  # admitted, but by no plan yet
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_fairness_preemptions = 0

    def make_step(self, number: int) -> Step:
        self._waiting.now_s = self._control.now_s
        self._residents.preempted.clear()
        if self._blocked is not None:
            self._free_row()
        if not self.has_apart:
            return self._fill(Step(self._budget), number)
        running = self._residents.running
        num_apart = sum(map(_is_apart, running))
        num_others = len(running) - num_apart
        is_apart = self.turns.is_apart_next(num_apart, num_others)
        for turn in (is_apart, not is_apart):
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
            self._budget - step.tokens,
            step.num_caught_up,
            decoding.context,
            self._control.policy_name,
        )
        return step

    def _choose(
        self, step: Step, number: int, decoding: Candidates, num_prompt_tokens: int
    ) -> Choice:
        if not any(decoding.wanted):
            return Choice(decoding.wanted)
        if not step.is_typical:  # no table tells what it costs
            drafts = self._control.wants_prompts
            return Choice(decoding.wanted if drafts else [0] * len(decoding.wanted))
        choice = self._control.choose(
            number, step.tokens, num_prompt_tokens, len(self._waiting), decoding
        )
        step.num_selected = choice.num_selected
        step.least_survival = choice.least_survival
        return choice

    def _decode_rows(self, step: Step) -> tuple[Candidates, list[Request]]:
        """Every request past its prompt, with room for its next token; and the others.

        The order is by key, so a request that must make room takes it from later ones.
        """
        decoding, prompts = Candidates(), list[Request]()
        requests, proposers = decoding.requests, decoding.proposers
        wanted, behind = decoding.wanted, decoding.behind
        # Looking these up is slow.
        running, size, without_lag = State.RUNNING, self._block_size, self._without_lag
        has_apart, is_apart = self.has_apart, step.is_apart
        context = 0
        for request in list(self._residents.running):
            if request.state is not running:
                continue
            if has_apart and _is_apart(request) != is_apart:
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
            if len(request.target.blocks) * size < upper and not self._residents.reserve(
                request, upper
            ):
                step.short.append(request)
                continue
            depth = request.depth
            if depth:
                depth = self._usable_depth(proposer, depth if depth < room else room - 1)
            requests.append(request)
            proposers.append(proposer)
            wanted.append(depth)
            context += upper
            behind.append(
                request.behind if request.drafts_in_flight else upper - request.draft.planned
            )
        decoding.context = context
        step.tokens -= len(requests)
        step.short += prompts
        return decoding, prompts

    def _usable_depth(self, proposer: str, depth: int) -> int:
        depth = min(depth, self._max_depths[proposer])
        most = self._control.max_depth
        if most is not None and depth > most:
            depth = most
        return depth if self.has_draft or proposer not in self._with_kv else 0

    def _plan_decodes(self, step: Step, decoding: Candidates, choice: Choice) -> None:
        residents, with_kv, running = self._residents, self._with_kv, State.RUNNING
        size, append = self._block_size, self._append
        residents.count_spare_blocks(step.short)
        probed = self._control.probes(decoding) if self.has_draft else ()
        room = step.tokens if step.num_selected is None else sys.maxsize
        rows = zip(decoding.requests, decoding.wanted, decoding.behind, choice.depths, strict=True)
        for index, (request, most, behind, depth) in enumerate(rows):
            if request.state is not running:
                continue  # a prompt before it needed its memory
            draft_tokens = 0
            if depth:
                if depth > most or depth > room:  # whatever a policy may say
                    depth = min(most, room)
                keeps_kv = request.proposer in with_kv
                reach = request.upper + depth
                if keeps_kv and behind > MOST_BEHIND:
                    depth, draft_tokens = 0, self._catch_up(step, request)
                elif len(request.target.blocks) * size < reach and not residents.reserve_lookahead(
                    request, reach
                ):
                    # What is left of the last block.
                    depth = min(depth, -request.upper % size)
                if depth and keeps_kv:
                    draft_tokens = behind
            elif index in probed:
                draft_tokens = self._catch_up(step, request)
            room -= append(step, request, 1, depth, draft_tokens, True)
        self._settle_selection(step)

    def _settle_selection(self, step: Step) -> None:
        """Rows may have been cut: then there is less to select from, or nothing to leave out."""
        if step.num_selected is not None and step.num_selected >= step.num_drafts:
            step.num_selected = None
        num_verified = step.num_drafts if step.num_selected is None else step.num_selected
        step.tokens -= num_verified

    def _catch_up(self, step: Step, request: Request) -> int:
        """Applied tokens that the draft is to compute now, which the workers therefore know: of the
        prompt, or else of the output."""
        if request.drafts_in_flight or request.is_draft_given_up:
            return 0  # nobody knows yet where it stands
        start = request.draft.planned
        missing = request.prompt_len - start
        if missing <= 0:
            missing = min(len(request.tokens) - start, CATCH_UP_OUTPUT)
        count = min(missing, step.catch_up)
        step.catch_up -= count
        step.num_caught_up += count
        return count

    # -- prompts ----------------------------------------------------------------------------

    def _take_prompts(self, step: Step, prompts: list[Request], decoding: Candidates) -> None:
        """Prompts under way, then new ones, up to what the step has time for, and what drafts want
        of its room leaves; at least half of that is theirs."""
        if not prompts and not self._waiting:
            return
        share = max(step.tokens - sum(decoding.wanted), step.tokens // 2)
        room = self._control.prompt_room(len(decoding.requests), share)
        left, step.tokens = step.tokens - room, room
        for request in prompts:
            if step.tokens <= 0:
                break
            if request.state is State.RUNNING:
                self._take_chunk(step, request)
        self._admit(step, decoding)
        step.tokens += left

    def _take_chunk(self, step: Step, request: Request) -> None:
        holding = request.target
        chunk = min(len(request.tokens) - holding.planned, step.tokens)
        if self._residents.reserve(request, holding.planned + chunk):
            step.prompts.append((request, chunk))
            step.tokens -= chunk

    def _plan_prompts(self, step: Step) -> None:
        """The draft computes them as well, if their rows are to draft."""
        drafts = self.has_draft and self._control.wants_prompts
        for request, chunk in step.prompts:
            if request.state is not State.RUNNING:
                continue  # one before it needed its memory
            draft_tokens = 0
            if drafts and request.proposer in self._with_kv:
                draft_tokens = self._catch_up(step, request)
            holding = request.target
            holding.planned += chunk
            request.in_prompt = holding.planned < len(request.tokens)
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
        """Returns the depth it is planned with."""
        holding = request.target
        target_start, target_blocks = holding.announced, NO_BLOCKS
        if target_start < len(holding.blocks):
            target_start, target_blocks = holding.announce()
        draft_start, draft_blocks = 0, NO_BLOCKS
        if draft_tokens:
            if self._residents.reserve_draft(request, draft_tokens, depth):
                draft_start, draft_blocks = request.draft.announce()
                request.draft_plans_in_flight += 1
            else:  # no memory for the draft: this row decodes plainly
                if not depth:
                    step.catch_up += draft_tokens
                    step.num_caught_up -= draft_tokens
                draft_tokens = depth = 0
        step.rows.append(
            _new_tuple(  # what `RowPlan(...)` does, in half the time
                RowPlan,
                (
                    request.row,
                    request.generation,
                    num_tokens,
                    depth,
                    depth,
                    samples,
                    request.proposer if depth else NOBODY,
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
                request.behind = MOST_BEHIND
                return depth
        request.behind += samples
        return depth

    def _free_row(self) -> None:
        """Preempt for a tenant that has waited long without a row."""
        first = self._waiting.peek()
        if first is None or first is not self._blocked or first.tenant.num_running:
            return
        wait_s, waited_s = self._wait_s, self._waiting.now_s - first.tenant.without_row_s
        if waited_s < wait_s or self._residents.leaving:
            return  # what is leaving may make room
        num_tenants = len(self._tenants.active)
        self.num_fairness_preemptions += self._residents.preempt_for(first, wait_s, num_tenants)

    def _is_in(self, step: Step, request: Request, decoding: Candidates) -> bool:
        """Whether the step has tokens of a request that was preempted meanwhile."""
        return request in self._residents.preempted and (
            request in decoding.requests or any(request is each for each, _ in step.prompts)
        )

    def _admit(self, step: Step, decoding: Candidates) -> None:
        """Start waiting requests in order while rows, budget and memory last.

        The head of the queue is never passed over: that is what makes waiting finite. Nor does one
        start in a step that has tokens of it already, from before it was preempted.
        """
        while step.tokens > 0:
            request = self._blocked = self._waiting.peek()
            if request is None or self._is_in(step, request, decoding):
                return
            if request.spec.proposer in self._looking_ahead:
                request.allow_drafts(self._control.allows_drafts(request))
            if not self._residents.admit(request):
                return
            self._waiting.pop(request)
            self._blocked = None
            request.tenant.num_waiting -= 1
            request.started_s = self._control.now_s
            self.num_prompt_tokens += len(request.tokens)
            self.num_cached_tokens += request.num_cached
            if request.queued_s is None:  # what is computed again is charged once
                request.tenant.service += len(request.tokens) - request.num_cached
                request.queued_s = max(self._control.now_s - request.arrival_s, 0.0)
            step.admitted.append(request.row_init())
            step.short.append(request)
            if _is_apart(request) == step.is_apart:
                self._take_chunk(step, request)


def _max_depth(proposer: ProposerTraits, limits: SchedulerLimits) -> int:
    on_device = limits.max_depth if proposer.place is Place.DEVICE else None
    return min(
        (each for each in (on_device, proposer.max_depth) if each is not None), default=sys.maxsize
    )


def _is_apart(request: Request) -> bool:
    """Whether its next tokens are computed in a step without others."""
    apart = request.apart
    return apart is not Apart.NEVER and (apart is Apart.ALWAYS or request.in_prompt)
