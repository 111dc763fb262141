"""A real scheduler and step loop on fake workers, watched step by step.

`Simulation` knows what every request must say (plain decoding of the fake model) and checks, after
each step, that nothing was lost, leaked, reordered or starved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.catalog.proposers import traits
from outrider.engine.step import StepLoop
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.depths import ChooseDepths
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.request import Request, RequestState
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import (
    IN_PROCESS,
    DraftEvent,
    Exclusive,
    FinishReason,
    RequestSpec,
    RequestUpdate,
    RowInit,
    SampleId,
    StepPlan,
    Ticket,
    TokenLogprobs,
    Verdict,
)
from outrider.testing.fake_kv import text_hashes
from outrider.testing.fake_workers import FakeWorkers

PLAIN = SamplingParams(max_tokens=None)


def sample_id(name: str) -> SampleId:
    """The sample that a test calls by a name."""
    return SampleId(IN_PROCESS, int.from_bytes(name.encode()))


def name_of(sample: SampleId) -> str:
    return sample.handle.to_bytes(-(-sample.handle.bit_length() // 8)).decode()


def make_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    arrival_s: float = 0.0,
    *,
    deadline_s: float | None = None,
    output_ids: Sequence[int] = (),
    prompt_logprobs_sent: int = 0,
    **fields: Any,
) -> Request:
    """A request with the defaults most tests want; `fields` are those of `RequestSpec`."""
    usual: dict[str, Any] = {"params": PLAIN, "seed": 7, "max_len": len(prompt) + max_tokens}
    spec = RequestSpec(tuple(prompt), **(usual | fields))
    return Request(
        sample_id(name),
        spec,
        seed=spec.seed,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        output_ids=output_ids,
        prompt_logprobs_sent=prompt_logprobs_sent,
    )


@dataclass
class Record:
    """One request as its reader sees it."""

    request: Request
    expected: list[int]
    ends_with: str
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_accepted: int = 0
    num_drafted: int = 0


class Simulation:
    """Steps a scheduler on `FakeWorkers`; every step is followed by every check."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        draft_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 64,
        lag: int = 0,
        prefix_caching: bool = True,
        acceptance: float | Sequence[int] = 0.7,
        priority_aging_s: float = 10.0,
        max_waiting: int | None = None,
        choose_depths: ChooseDepths | str = "fixed",
        costs: StepCosts | None = None,
        exclusive: Callable[[RequestSpec], Exclusive] | None = None,
        head: str | None = None,
    ) -> None:
        limits = SchedulerLimits(max_num_seqs, budget, lag, priority_aging_s, max_waiting)
        self.target_pool = BlockPool(num_blocks, block_size, prefix_caching)
        self.draft_pool = BlockPool(draft_blocks, block_size, prefix_caching)
        self.scheduler = Scheduler(
            limits,
            self.target_pool,
            self.draft_pool,
            traits(has_draft_model=True, head=head),
            SpeculationControl(choose_depths, costs, seats=max_num_seqs),
            exclusive=exclusive,
        )
        self.workers = FakeWorkers(
            num_blocks,
            draft_blocks,
            block_size,
            max_num_batched_tokens=budget,
            acceptance=acceptance,
        )
        self.loop = StepLoop(self.scheduler, self, self.workers)
        self.records: dict[str, Record] = {}
        self.live: dict[str, Record] = {}
        self.plans: list[StepPlan] = []
        self.now_s = 0.0
        self._head: str | None = None
        self._patience = 0
        self._news: list[str] = []  # about the draft, not told to the scheduler yet

    # -- what a user does -------------------------------------------------------------------

    def add(
        self,
        request: Request,
        *,
        after: str | None = None,
        is_resumed: bool = False,
    ) -> Record:
        expected, ends_with = self._plain_decoding(request)
        sibling = None if after is None else sample_id(after)
        self.scheduler.add(request, after=sibling, is_resumed=is_resumed)
        record = Record(request, expected, ends_with)
        name = name_of(request.sample_id)
        self.records[name] = self.live[name] = record
        return record

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(sample_id(name))

    def lose_draft(self) -> None:
        """The draft dies; the scheduler hears of it only after a plan that counts on it."""
        self.workers.lose_draft()
        self._news = ["unnoticed", "lost"]

    def regain_draft(self) -> None:
        self._news = ["lost", "back"]

    def step(self, seconds: float = 1.0) -> StepPlan | None:
        """One turn of the step loop; returns its plan."""
        self.now_s += seconds
        self.plans.clear()
        before = (self.scheduler.stats.steps, self.scheduler.num_in_flight)
        for update in self.loop.step(self.now_s):
            self._take(update)
        after = (self.scheduler.stats.steps, self.scheduler.num_in_flight)
        assert after != before or not self.scheduler.has_work, "there is work but nothing moves"
        self._check()
        return self.plans[0] if self.plans else None

    def drain(self) -> None:
        """Step until all is done; then nothing may be held any more."""
        while self.scheduler.has_work:
            self.step()
        assert not self.live, f"lost: {sorted(self.live)}"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.target_pool.num_free == self.target_pool.num_blocks
        assert self.draft_pool.num_free == self.draft_pool.num_blocks

    # -- between scheduler and workers ------------------------------------------------------

    def events(self) -> list[DraftEvent]:
        """As a remote draft tells them, one piece of news a step."""
        news = self._news.pop(0) if self._news else ""
        if news == "lost" and self.scheduler.has_draft:
            return [DraftEvent.LOST]
        return [DraftEvent.JOINED] if news == "back" else []

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        self.workers.adopt(epoch, rows)

    def propose(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        self._check_admission_order(plan)
        return self.workers.propose(plan)

    def observe(self, verdict: Verdict) -> None:
        self.workers.observe(verdict)

    # -- checks -----------------------------------------------------------------------------

    def _plain_decoding(self, request: Request) -> tuple[list[int], str]:
        text = text_hashes(request.tokens)[-1]
        room = request.max_len - len(request.tokens)
        tokens = self.workers.model.continuation(text, request.seed, room)
        first = max(request.prompt_len + request.spec.params.min_tokens - len(request.tokens), 0)
        for index in range(first, len(tokens)):
            if tokens[index] in request.stop_ids:
                return tokens[: index + 1], FinishReason.STOP
        return tokens, FinishReason.LENGTH

    def _take(self, update: RequestUpdate) -> None:
        name = name_of(update.sample_id)
        assert name in self.live, f"{name} is reported after its end"
        record = self.live[name]
        record.tokens += update.token_ids
        record.prompt_logprobs += update.prompt_logprobs
        record.num_cached_tokens = update.num_cached_tokens
        record.num_accepted += update.num_accepted
        record.num_drafted += update.num_drafted
        assert record.tokens == record.expected[: len(record.tokens)], "not the plain text"
        if update.finish_reason is None:
            return
        record.finish_reason = update.finish_reason
        del self.live[name]
        if update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert update.finish_reason == record.ends_with
            assert record.tokens == record.expected, "the text ends too early"

    def _check(self) -> None:
        self.scheduler.check_integrity()
        for record in self.live.values():
            deadline_s = record.request.deadline_s
            assert deadline_s is None or deadline_s > self.now_s, "a deadline has passed"
            self._check_counters(record.request)
        self._check_patience()

    def _check_counters(self, request: Request) -> None:
        """Scheduler and workers count KV by the same rule."""
        if request.state is RequestState.RUNNING and not request.in_flight:
            row = request.row
            if row in self.workers.target_kv.computed:
                assert request.target.computed == self.workers.target_kv.computed[row]
                if not self._news:
                    assert request.draft.computed == self.workers.draft_kv.computed[row]

    def _check_admission_order(self, plan: StepPlan) -> None:
        if not plan.admitted:
            return
        last: dict[str, tuple[float, int]] = {}
        for init in plan.admitted:
            request = self.records[name_of(init.sample_id)].request
            last[request.spec.tenant] = max(last.get(request.spec.tenant, request.key), request.key)
        for record in self.live.values():
            request = record.request
            if request.state is RequestState.WAITING and request.spec.tenant in last:
                assert request.key > last[request.spec.tenant], "passed over"

    def _check_patience(self) -> None:
        """Whoever comes first among all that compete is done after a bounded number of steps; of
        several tenants, each of which waits for the others, see `test_fair_tenants`."""
        competing = [
            record.request
            for record in self.live.values()
            if record.request.state is not RequestState.PARKED
        ]
        if len({request.spec.tenant for request in competing}) != 1:
            self._head = None
            return
        head = min(competing, key=lambda request: request.key)
        if name_of(head.sample_id) != self._head:
            self._head = name_of(head.sample_id)
            total = sum(request.max_len for request in competing)
            self._patience = (self.scheduler.limits.lag + 1) * (total + 10)
        self._patience -= 1
        assert self._patience > 0, f"{self._head} starves"
