"""The central scheduler: continuous batching with lookahead slots, without a tensor or a clock.

`plan` says what the next target pass computes and reserves every KV slot it could need; `apply`
takes the verdict, commits tokens and returns the slots that were not needed. Up to `lag + 1` plans
may be in flight: a plan made before an earlier verdict is known works with upper bounds, and a
request that ends meanwhile keeps its blocks and its row until the last plan naming it is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import sub

from outrider.errors import CapacityError, OutriderError
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.outcomes import Outcomes, SchedulerStats, num_unbiased_drafts, unsent
from outrider.scheduler.planner import Planner, SchedulerLimits, Step
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.proposers import ProposerTraits
from outrider.scheduler.request import Request, RequestState
from outrider.scheduler.running import RunningRequests
from outrider.scheduler.tenants import Tenant, Tenants
from outrider.scheduler.types import (
    Exclusive,
    FinishReason,
    RequestSpec,
    RequestUpdate,
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Verdict,
)
from outrider.scheduler.waiting import Deadlines, WaitingQueue


class _InFlight:
    """A plan in flight, the requests of its rows, and the draft it was made for."""

    __slots__ = ("draft_life", "plan", "requests", "step")

    def __init__(self, plan: StepPlan, step: Step, draft_life: int) -> None:
        self.plan = plan
        self.step = step
        self.requests = step.requests
        self.draft_life = draft_life


class Scheduler:
    """Owns requests, rows and both block pools; see the module's text for the contract."""

    def __init__(
        self,
        limits: SchedulerLimits,
        target_pool: BlockPool,
        draft_pool: BlockPool | None = None,
        proposers: Iterable[ProposerTraits] = (),
        control: SpeculationControl | None = None,
        epoch: int = 0,
        exclusive: Callable[[RequestSpec], Exclusive] | None = None,
    ) -> None:
        """Requests may name any of `proposers`; `control` chooses their depths. `epoch` identifies
        this engine: workers drop all rows of a lower one. `exclusive` says when a request needs
        exclusive steps."""
        self.limits = limits
        self.target_pool = target_pool
        self.draft_pool = draft_pool or BlockPool(0, target_pool.block_size, False)
        self.epoch = epoch
        self._draft_life = 0  # counts lost drafts: the KV of an earlier one is gone
        self._next_draft_blocks: int | None = None  # of the next draft, if they differ
        self._step = 0
        self._arrivals = 0
        self._num_parked = 0
        self._requests: dict[SampleId, Request] = {}
        self._tenants = Tenants()
        # One priority level is worth one step's tokens to the tenant: a bounded head start.
        self._waiting = WaitingQueue(limits.max_num_batched_tokens)
        self.num_displaced = 0
        self._deadlines = Deadlines()
        self._proposers = {each.name: each for each in proposers}
        self._kv_rules = {
            each.name: each.kv_rule for each in self._proposers.values() if each.kv_rule is not None
        }
        self._running_requests = RunningRequests(
            limits.max_num_seqs,
            self.target_pool,
            self.draft_pool,
            self._waiting,
            self._kv_rules.keys(),
            {each.name for each in self._proposers.values() if each.needs_next_token},
        )
        self.control = control or SpeculationControl(seats=limits.max_num_seqs)
        self.control.add_proposers(self._proposers.values())
        self._planner = Planner(
            limits,
            self._running_requests,
            self._waiting,
            self._proposers,
            self.control,
            self._tenants,
        )
        self._exclusive = exclusive
        self._in_flight: deque[_InFlight] = deque()
        self._outcomes = Outcomes()

    # -- requests ---------------------------------------------------------------------------

    @property
    def stats(self) -> SchedulerStats:
        return self._outcomes.stats

    @property
    def num_waiting(self) -> int:
        """Requests without a row, those waiting for a sibling's prompt included."""
        return len(self._waiting) + self._num_parked

    @property
    def num_queue_entries(self) -> int:
        """Entries of the queue in memory, cancelled requests included."""
        return self._waiting.num_entries

    @property
    def num_watched(self) -> int:
        """Requests held in memory for their deadlines."""
        return self._deadlines.num_entries

    @property
    def num_running(self) -> int:
        return len(self._running_requests.running)

    @property
    def num_preemptions(self) -> int:
        return self._running_requests.num_preemptions

    @property
    def num_fairness_preemptions(self) -> int:
        """Preemptions for a tenant that had waited too long without a row."""
        return self._planner.num_fairness_preemptions

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache at admission."""
        return self._planner.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of these: cache hits."""
        return self._planner.num_cached_tokens

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight)

    def add(
        self,
        request: Request,
        *,
        after: SampleId | None = None,
        is_resumed: bool = False,
    ) -> tuple[SampleId, ...]:
        """Queue a request. `after` names a sibling with the same prompt: this one waits until the
        sibling's prompt is computed, then finds it in the prefix cache. A resumed request was
        accepted before: no limit rejects it.

        Returns displaced requests: with `max_waiting` requests waiting, the tenant with most of
        them loses its newest to a tenant with at least two fewer. Displaced requests have ended,
        without an update."""
        if request.sample_id in self._requests:
            link, handle = request.sample_id
            raise OutriderError(f"handle {handle} of link {link} is in use; choose another.")
        if len(request.tokens) >= request.max_len:  # resumed with complete output
            self.stats.finished += 1
            self._outcomes.end(request.sample_id, FinishReason.LENGTH)
            return ()
        self._refuse_what_cannot_fit(request)
        displaced: tuple[SampleId, ...] = ()
        limit = self.limits.max_waiting
        if limit is not None and not is_resumed and self.num_waiting >= limit:
            displaced = self._displace_for(request.spec.tenant)
            if not displaced and not self._may_overflow(request.spec.tenant, limit):
                raise CapacityError(self.full_message)
        request.tenant = self._tenants.enter(request.spec.tenant)
        request.tenant.num_waiting += 1
        # A sample is not displaced alone while its siblings run.
        request.may_be_displaced = after is None and not is_resumed
        self._arrivals += 1
        aged = request.spec.priority * self.limits.priority_aging_s + request.arrival_s
        request.key = (aged, self._arrivals)
        self._requests[request.sample_id] = request
        if self._exclusive is not None:
            request.exclusive = self._exclusive(request.spec)
            self._planner.has_exclusive |= request.exclusive is not Exclusive.NEVER
        self.control.load.observe_arrival(request.arrival_s)
        self._deadlines.watch(request)
        sibling = self._requests.get(after) if after is not None else None
        if sibling is not None and sibling.in_prompt and self.target_pool.prefix_caching:
            request.state = RequestState.PARKED
            self._num_parked += 1
            sibling.followers.append(request)
        else:
            self._waiting.push(request)
        return displaced

    @property
    def full_message(self) -> str:
        """The error of requests that are rejected or displaced because the queue is full."""
        limit = self.limits.max_waiting
        return f"{limit} requests are waiting already (max_waiting); retry later."

    def _displace_for(self, name: str) -> tuple[SampleId, ...]:
        """End the newest waiting request, with its siblings, of the tenant with most waiting, if
        that has more than the tenant of this name will have."""
        tenant, largest = self._tenants.active.get(name), self._tenants.largest_waiting()
        num_waiting = 0 if tenant is None else tenant.num_waiting
        if largest is None or num_waiting + 1 >= largest.num_waiting:
            return ()
        newest = self._waiting.newest(largest)
        if newest is None:
            return ()
        displaced = [
            newest,
            *(each for each in newest.followers if each.state is RequestState.PARKED),
        ]
        newest.followers = []
        for each in displaced:
            self._finish(each)
        self.num_displaced += len(displaced)
        return tuple(each.sample_id for each in displaced)

    def _may_overflow(self, name: str, limit: int) -> bool:
        """When nothing can be displaced (samples with running siblings cannot), a tenant with few
        waiting may exceed the limit, all of them together by at most half of it."""
        tenant, num_others = self._tenants.active.get(name), len(self._tenants.active)
        if tenant is None:
            return bool(num_others) and limit // (2 * (num_others + 1)) > 0
        return num_others > 1 and tenant.num_waiting < limit // (2 * num_others)

    def _refuse_what_cannot_fit(self, request: Request) -> None:
        pool = self.target_pool
        needed = pool.blocks_for(request.max_len)
        if needed > pool.num_blocks:
            raise CapacityError(
                f"the request may grow to {request.max_len} tokens, which needs {needed} KV blocks "
                f"of {pool.block_size}, but there are {pool.num_blocks}; raise "
                "kv_cache_gb or lower max_tokens."
            )

    def cancel(self, sample_id: SampleId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request at any moment; an unknown or finished id is no error (it may race)."""
        request = self._requests.get(sample_id)
        if request is not None:
            self._outcomes.end(sample_id, reason)
            self._finish(request)

    # -- loss and return of the draft --------------------------------------------------------

    @property
    def has_draft(self) -> bool:
        return self._planner.has_draft

    def lose_draft(self) -> None:
        """The draft model is lost with its KV: from the next plan on its rows decode plainly."""
        self._draft_life += 1
        self._planner.has_draft = False
        self._running_requests.forget_draft()

    def regain_draft(self) -> tuple[RowInit, ...]:
        """A draft model is back with an empty cache; returns the rows it needs. The next plans
        prefill it like any draft that is behind."""
        num_blocks, self._next_draft_blocks = self._next_draft_blocks, None
        if num_blocks is not None:
            before = self.draft_pool
            self.draft_pool = BlockPool(num_blocks, before.block_size, before.prefix_caching)
            self._running_requests.resize_draft(self.draft_pool)
        self._planner.has_draft = True
        return tuple(
            request.row_init()
            for request in self._running_requests.running
            if request.proposer in self._kv_rules
        )

    def expect_draft(self, num_blocks: int) -> None:
        """From any thread: the next draft model has `num_blocks` KV blocks."""
        self._next_draft_blocks = num_blocks

    def take_updates(self) -> list[RequestUpdate]:
        """What happened to requests since the last call, in order."""
        return self._outcomes.take_updates()

    # -- planning ---------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next pass, or None if nothing can be computed before a verdict or a request."""
        self.control.load.now_s = now_s
        for late in self._deadlines.expired(now_s):
            self.cancel(late.sample_id, FinishReason.DEADLINE)
        if len(self._in_flight) > self.limits.lag:
            return None
        step = self._planner.make_step(self._step)
        if not step.rows:
            return None
        self._step += 1
        plan = StepPlan(
            epoch=self.epoch,
            step=self._step,
            rows=tuple(step.rows),
            admitted=tuple(step.admitted),
            released=tuple(self._running_requests.released_rows),
            draft_released=tuple(self._running_requests.draft_released_rows),
            num_selected=step.num_selected,
            least_survival=step.least_survival,
            num_branches=step.ahead.num_branches,
        )
        self._running_requests.released_rows.clear()
        self._running_requests.draft_released_rows.clear()
        assert step.record is not None
        if step.is_typical:
            self.control.records.append(step.record)
        self._in_flight.append(_InFlight(plan, step, self._draft_life))
        return plan

    # -- applying ---------------------------------------------------------------------------

    def apply(self, verdict: Verdict) -> None:
        """Commit the outcome of the oldest plan; `take_updates` returns its effects."""
        flight = self._in_flight[0] if self._in_flight else None
        if flight is None or (verdict.epoch, verdict.step) != (flight.plan.epoch, flight.plan.step):
            expected = flight and f"{flight.plan.epoch}/{flight.plan.step}"
            raise OutriderError(
                f"verdict of epoch {verdict.epoch} step {verdict.step} where "
                f"{expected or 'none'} was expected"
            )
        self._in_flight.popleft()
        knows_draft = flight.draft_life == self._draft_life
        num_unbiased = num_unbiased_drafts(flight.plan)
        before = self.stats.tokens
        finished, preempted = (
            RequestState.FINISHED,
            RequestState.PREEMPTED,
        )  # looking up an enum member is slow
        for request, row_plan, row in zip(
            flight.requests, flight.plan.rows, verdict.rows, strict=True
        ):
            request.in_flight -= 1
            if row_plan.draft_tokens:
                request.draft_plans_in_flight -= 1
                if row_plan.depth:
                    request.drafts_in_flight -= 1
            if request.state is finished:
                self._running_requests.leave(request)
                continue
            self._commit(request, row_plan, row, knows_draft, num_unbiased)
            if request.state is preempted:
                self._running_requests.leave(request)
        self._outcomes.count_rounds()
        num_read = sum(chunk for _, chunk in flight.step.prompts)
        self.stats.count_step(num_read + self.stats.committed_tokens - before[0])
        self._learn(flight, verdict, before)

    def _learn(self, flight: _InFlight, verdict: Verdict, before: tuple[int, int, int]) -> None:
        if verdict.agreements:
            holders = {request.row: request for request in self._running_requests.running}
            for agreement in verdict.agreements:
                request = holders.get(agreement.row)
                if request is not None and request.generation == agreement.generation:
                    self.control.observe_agreement(request, agreement)
                    self.stats.checked[request.proposer] += len(agreement.hits)
                    self.stats.agreed[request.proposer] += sum(agreement.hits)
        step = flight.step
        self._planner.turns.end(step.is_exclusive, verdict.draft_s + verdict.verify_s)
        if step.record is None or not step.is_typical:
            return
        committed, verified, accepted = map(sub, self.stats.tokens, before)
        self.control.observe_step(step.record, verdict, committed, verified, accepted)

    def _commit(
        self, request: Request, plan: RowPlan, row: RowVerdict, knows_draft: bool, num_unbiased: int
    ) -> None:
        """`num_unbiased`: see `num_unbiased_drafts`."""
        (
            _,
            generation,
            base_len,
            drafted,
            verified,
            num_accepted,
            new,
            _,
            row_logprobs,
            is_broken,
        ) = row
        _, _, num_tokens, depth, _, samples, proposer, _, _, _, _, draft_tokens = plan
        if generation != request.generation or base_len != len(request.tokens):
            raise OutriderError(
                f"{request.sample_id}: verdict for generation {generation} at "
                f"{base_len}, expected {request.generation} at {len(request.tokens)}"
            )
        prompt_logprobs = unsent(request, row) if row_logprobs else row_logprobs
        # KV that is valid now. The workers apply the same rules to the same numbers.
        if samples:
            request.target.computed = base_len + num_accepted
        else:
            request.target.computed += num_tokens
        if draft_tokens and request.is_draft_given_up:
            self._running_requests.give_up_draft(
                request
            )  # its last plan is back: free the draft blocks
        elif draft_tokens and knows_draft:
            draft = request.draft
            if depth:  # it caught up with the text, then drafted past it
                fed = base_len - draft.computed
                draft.computed = draft.planned = self._kv_rules[proposer](
                    draft.computed, fed, drafted, num_accepted, base_len
                )
            else:
                draft.computed += draft_tokens
        finish: FinishReason | None = None
        if new:
            if request.proposer and num_unbiased:
                self.control.observe_round(
                    request, min(verified, num_unbiased), min(num_accepted, num_unbiased)
                )
            request.upper += len(new) - depth - 1
            new, finish = request.until_end(new[:-1] if is_broken else new)
            request.tokens += new
            request.tenant.service += len(new)
        if is_broken:
            finish = finish or FinishReason.ERROR
            self.target_pool.withdraw(
                request.target.blocks
            )  # a cache hit would fail other requests too
        else:
            self._running_requests.publish(request)
        if new or prompt_logprobs or finish is not None:
            self._outcomes.report(request, row, new, prompt_logprobs, finish)
        if finish is not None:
            self._finish(request)
            return
        if new and request.followers:
            self._release_followers(request)
        self._running_requests.return_lookahead(request)

    def _finish(self, request: Request) -> None:
        del self._requests[request.sample_id]
        self.stats.finished += 1
        self.control.end(request)
        self._release_followers(request)
        before, request.state = request.state, RequestState.FINISHED
        if before in (RequestState.RUNNING, RequestState.PREEMPTED):
            self._running_requests.end(request, was_running=before is RequestState.RUNNING)
        elif before is RequestState.WAITING:
            request.tenant.num_waiting -= 1
            self._waiting.forget(request)
        elif before is RequestState.PARKED:
            request.tenant.num_waiting -= 1
            self._num_parked -= 1
        self._deadlines.forget(request)
        self._tenants.leave(request.tenant)

    def _release_followers(self, request: Request) -> None:
        for follower in request.followers:
            if follower.state is RequestState.PARKED:
                self._num_parked -= 1
                follower.state = RequestState.WAITING
                self._waiting.push(follower)
        request.followers = []

    def check_integrity(self) -> None:
        """Rows and blocks add up, and requests of plans in flight still hold theirs."""
        self._running_requests.check_integrity()
        self._check_tenants()
        holders = {*self._running_requests.running, *self._running_requests.leaving}
        for flight in self._in_flight:
            for request, row in zip(flight.requests, flight.plan.rows, strict=True):
                assert request in holders, f"{request.sample_id} is in flight but holds nothing"
                assert (request.row, request.generation) == (row.row, row.generation)

    def _check_tenants(self) -> None:
        """The counters of each tenant match its requests."""
        counts: dict[Tenant, list[int]] = {
            tenant: [0, 0, 0] for tenant in self._tenants.active.values()
        }
        for request in self._requests.values():
            count = counts[request.tenant]
            count[0] += 1
            count[1] += request.state in (RequestState.WAITING, RequestState.PARKED)
            count[2] += request.state is RequestState.RUNNING
        for tenant, count in counts.items():
            counted = [tenant.num_requests, tenant.num_waiting, tenant.num_running]
            assert count == counted, f"{tenant.name!r} has {count}, not {counted}"
