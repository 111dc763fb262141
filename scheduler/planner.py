"""What one pass computes: a token for every decode row, prompts, and drafts in what is left.

In this order: whoever decodes keeps one token; prompts and new requests take their share; then the
policy says how far each row is drafted, and lookahead is reserved for that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import CapacityError
from outrider.scheduler.depths import ChooseDepths, DepthSnapshot
from outrider.scheduler.proposers import MOST_BEHIND, Place, ProposerTraits
from outrider.scheduler.request import NO_BLOCKS, Request, State
from outrider.scheduler.residents import Residents
from outrider.scheduler.types import NOBODY, RowInit, RowPlan
from outrider.scheduler.waiting import WaitingQueue

_new_tuple = tuple.__new__


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold in every step."""

    max_num_seqs: int  # rows on the workers
    max_num_batched_tokens: int  # tokens in one target pass, drafts included
    lag: int = 0  # plans in flight beyond the first
    priority_aging_s: float = 10.0  # waiting so long is worth one priority level
    max_waiting: int | None = None
    max_depth: int | None = None  # of proposers on the device; a request may want more

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise CapacityError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running request gets a token."
            )


class Step:
    """The plan being made: its rows so far and what is left of its budgets."""

    __slots__ = ("admitted", "catch_up", "requests", "rows", "short", "tokens")

    def __init__(self, budget: int) -> None:
        self.tokens = budget
        self.catch_up = budget  # known tokens the draft computes before it can guess
        self.rows: list[RowPlan] = []
        self.requests: list[Request] = []  # behind the rows
        self.admitted: list[RowInit] = []
        self.short: list[Request] = []  # those that may still need blocks for what is known


class _Decoding:
    """The decode rows of a step and what each could use; lists by row."""

    __slots__ = ("behind", "proposers", "requests", "total", "wanted")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.proposers: list[str] = []
        self.wanted: list[int] = []
        self.behind: list[int] = []
        self.total = 0  # wanted in all


class Planner:
    """Fills one step after another; the scheduler turns them into plans."""

    def __init__(
        self,
        limits: SchedulerLimits,
        residents: Residents,
        waiting: WaitingQueue,
        proposers: Mapping[str, ProposerTraits],
        choose_depths: ChooseDepths,
    ) -> None:
        self._budget = limits.max_num_batched_tokens
        self._max_depth = sys.maxsize if limits.max_depth is None else limits.max_depth
        self._on_device = {n for n, each in proposers.items() if each.place is Place.DEVICE}
        self._residents = residents
        self._waiting = waiting
        self._choose_depths = choose_depths
        # Ahead of the verdict nobody on the host knows what a row has come to.
        self._without_lag = {
            name for name, each in proposers.items() if limits.lag and each.place is Place.HOST
        }
        self._with_kv = {name for name, each in proposers.items() if each.keeps_kv}
        self._block_size = residents.target_pool.block_size
        self.has_draft = True  # or its rows are planned as if nobody drafted for them
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def make_step(self, number: int) -> Step:
        step = Step(self._budget)
        decoding, prompts = self._decode_rows(step)
        own_share = max(step.tokens - decoding.total, step.tokens // 2)
        for_drafts, step.tokens = step.tokens - own_share, own_share
        self._plan_prompts(step, prompts)
        self._admit(step)
        num_prompt_tokens = own_share - step.tokens
        step.tokens += for_drafts
        snapshot = DepthSnapshot(
            number,
            step.tokens,
            num_prompt_tokens,
            len(self._waiting),
            decoding.proposers,
            decoding.wanted,
            decoding.behind,
        )
        depths = self._choose_depths(snapshot) if decoding.total else decoding.wanted
        self._plan_decodes(step, decoding, depths)
        return step

    def _decode_rows(self, step: Step) -> tuple[_Decoding, list[Request]]:
        """Every request past its prompt, with room for its next token; and the others.

        The order is by key, so a request that must make room takes it from later ones.
        """
        decoding, prompts = _Decoding(), list[Request]()
        requests, proposers = decoding.requests, decoding.proposers
        wanted, behind = decoding.wanted, decoding.behind
        # Looking these up is slow.
        running, size, without_lag = State.RUNNING, self._block_size, self._without_lag
        for request in list(self._residents.running):
            if request.state is not running:
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
            behind.append(
                request.behind if request.drafts_in_flight else upper - request.draft.planned
            )
        decoding.total = sum(wanted)
        step.tokens -= len(requests)
        step.short += prompts
        return decoding, prompts

    def _usable_depth(self, proposer: str, depth: int) -> int:
        if depth > self._max_depth and proposer in self._on_device:
            depth = self._max_depth
        return depth if self.has_draft or proposer not in self._with_kv else 0

    def _plan_decodes(self, step: Step, decoding: _Decoding, depths: Sequence[int]) -> None:
        residents, with_kv, running = self._residents, self._with_kv, State.RUNNING
        size, append = self._block_size, self._append
        residents.count_spare_blocks(step.short)
        rows = zip(decoding.requests, decoding.wanted, decoding.behind, depths, strict=True)
        for request, most, behind, depth in rows:
            if request.state is not running:
                continue  # a prompt before it needed its memory
            draft_tokens = 0
            if depth:
                if depth > most or depth > step.tokens:  # whatever a policy may say
                    depth = min(most, step.tokens)
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
            append(step, request, 1, depth, draft_tokens, True)

    def _catch_up(self, step: Step, request: Request) -> int:
        """Applied tokens that the draft is to compute now, which the workers therefore know."""
        if request.drafts_in_flight:
            return 0  # nobody knows yet where it stands
        count = min(len(request.tokens) - request.draft.planned, step.catch_up)
        step.catch_up -= count
        return count

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
        if request.proposer in self._with_kv and self.has_draft:
            draft_tokens = self._catch_up(step, request)
        holding.planned += chunk
        request.in_prompt = holding.planned < length
        step.tokens -= chunk
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
        holding = request.target
        target_start, target_blocks = holding.announced, NO_BLOCKS
        if target_start < len(holding.blocks):
            target_start, target_blocks = holding.announce()
        draft_start, draft_blocks = 0, NO_BLOCKS
        if draft_tokens:
            if self._residents.reserve_draft(request, draft_tokens, depth):
                draft_start, draft_blocks = request.draft.announce()
            else:  # no memory for the draft: this row decodes plainly
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
            step.tokens -= depth
            if draft_tokens:
                request.drafts_in_flight += 1
                request.behind = MOST_BEHIND
                return
        request.behind += samples

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
            step.short.append(request)
            self._plan_chunk(step, request)
